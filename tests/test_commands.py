"""Every command and every Python block of README.md and docs/ is run, with small stand-ins for what they name.

What takes a GPU, several processes, a server or minutes is parsed by the real command line.
"""

import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
import typer
from torch.distributed.run import get_args_parser
from transformers import ViTForImageClassification

from examples import images
from ladder.cli import app
from ladder.data.texts import tokenize
from ladder.hf.convert import convert
from ladder.quantize.options import QuantizeOptions
from ladder.quantize.write import quantize
from tests.blocks import PAGES, PROGRAMS, ROOT, Block, blocks, commands, without_code
from tests.scripts import example

Run = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.filterwarnings("ignore")  # those of libraries; every program here is tested elsewhere, too
# appended to a verb's options, of which the last one counts: it then takes a second
SMALL = {
    "generate": ["--max-new-tokens", "2"],
    "convert": [],
    "data": [],
    "plan": [],
    "quantize": ["--tokens", "256", "--batch", "2"],
    "fit": ["--tokens", "256", "--batch", "2", "--dtype", "float32", "--device", "cpu"],
    "scan": ["--tokens", "128", "--seq-len", "64", "--batch", "2", "--points", "2"],
    "adapt": ["--tokens", "256", "--batch", "2", "--eval-tokens", "128", "--device", "cpu"],
    "eval": ["--limit", "2", "--window", "64"],
}
# patterns for models of other depths than the stand-in's four layers
WORDS = {"standard:16 ladder:16": "standard:2 ladder:2", "standard:15 ladder:15": "ladder"}
# what is not run, and why
PARSED: dict[str, Callable[[list[str]], bool]] = {
    "several processes": lambda words: "--tp" in words and words[1] not in ("plan", "tune", "generate"),
    "a server or an endpoint": lambda words: words[1] in ("serve", "chat", "load"),
    "minutes": lambda words: words[1] in ("bench", "train", "trace", "report", "explore", "demo"),
    "a GPU": lambda words: words[1] == "tune" or "cuda" in words,
    "images": lambda words: "images.safetensors" in words,
    "a task of the network": lambda words: "hellaswag" in words,
}


def verbs() -> list[str]:
    return list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def ladder_commands() -> dict[str, list[str]]:
    """By page and line: also those that torchrun starts."""
    found = {}
    for block, words in commands():
        if words[0] == "ladder":
            found[str(block)] = words
        elif words[0] == "torchrun":
            found[f"{block} torchrun"] = ["ladder", *words[words.index("ladder") + 1 :]]
    return found


LADDER = ladder_commands()
RUN = {  # each once, wherever it stands
    shlex.join(words): words
    for place, words in LADDER.items()
    if "torchrun" not in place and not any(reason(words) for reason in PARSED.values())
}
CUDA = [place for place, words in LADDER.items() if PARSED["a GPU"](words)]


def test_there_are_commands() -> None:
    assert len(LADDER) > 60 and len(RUN) > 30 and len(CUDA) > 5


def test_where_commands_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between fences and indented, with lines that go on; formulas are no commands."""
    monkeypatch.setattr("tests.blocks.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\nladder plan  # a\n```\n\n    ladder serve D \\\n        b\n    pip install x\n\n    ladder   r = 1\n"
    )
    found = [words for _, words in commands([page])]
    assert found == [["ladder", "plan"], ["ladder", "serve", "D", "b"], ["pip", "install", "x"]]


@pytest.mark.parametrize("place", LADDER)
def test_the_command_line_has_it(place: str) -> None:
    """Every option exists, and its value is of its type; nothing is run."""
    words = LADDER[place]
    verb = typer.main.get_command(app).commands[words[1]]  # type: ignore[attr-defined]
    verb.make_context(words[1], words[2:])


def test_that_can_fail() -> None:
    verb = typer.main.get_command(app).commands["plan"]  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="--chips"):
        verb.make_context("plan", ["--chips", "h200"])


def test_verbs_in_prose_exist() -> None:
    texts = " ".join(without_code(page.read_text()) for page in PAGES)
    assert set(re.findall(r"`ladder ([a-z]+)[ `]", texts)) <= set(verbs())


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that commands read, by the names that the pages use."""
    folder = tmp_path_factory.mktemp("commands")
    example("tiny_checkpoint", folder / "DIR")
    convert(str(folder / "DIR"), folder / "OUT", "ladder")
    shutil.copytree(folder / "OUT", folder / "FITTED")
    quantize(QuantizeOptions(folder / "OUT", folder / "QUANTIZED", format="int8"))
    (folder / "book.txt").write_text("It was a dark and stormy night; the rain fell in torrents.\n" * 100)
    (folder / "prompts.txt").write_text("Once upon a time\nIt was a dark night\n")
    (folder / "more.jsonl").write_text(json.dumps({"text": "and the rain fell in torrents " * 20}) + "\n")
    (folder / "mine.jsonl").write_text(json.dumps({"query": "a", "choices": ["b", "c"], "gold": 0}) + "\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a text " * 40]}), folder / "wiki.parquet")
    tokenize([folder / "book.txt"], folder / "TEXT", str(folder / "DIR"))
    ViTForImageClassification(images.config(layers=2)).save_pretrained(folder / "VIT")
    return folder


@pytest.fixture
def here(stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, with a copy of every stand-in."""
    for path in stand_ins.iterdir():
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", RUN)
def test_it_runs(run: Run, here: Path, command: str) -> None:
    words = [WORDS.get(word, word) for word in RUN[command][1:]]
    made = words[2] if words[0] in ("convert", "fit", "adapt", "quantize") else words[1] if words[0] == "data" else None
    if made and Path(made).exists():
        shutil.rmtree(made)  # the page makes it anew
    small = SMALL.get(words[0], [])
    if words[0] == "quantize" and "--calibrate" not in words:
        small = []
    status, out, err = run(*words, *small)
    assert status == 0, err
    assert out.strip() or made or "--out" in words
    if made:
        assert any(Path(made).iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and they would use it")
@pytest.mark.parametrize("place", CUDA)
def test_without_a_gpu_it_says_so(run: Run, here: Path, place: str) -> None:
    status, _, err = run(*LADDER[place][1:])
    assert status == 2
    assert "gpu" in err.lower() or "cuda" in err.lower()
    assert len(err.splitlines()) == 1


def test_torchrun_takes_its_options() -> None:
    found = [words for _, words in commands() if words[0] == "torchrun"]
    for words in found:
        given = get_args_parser().parse_args(words[1:])
        assert given.module and given.training_script == "ladder"
    assert len(found) > 4


def test_programs_exist_and_know_their_options() -> None:
    """`python -m MODULE` and `python FILE`, in blocks and in prose; flags stand in their source."""
    found = [words[1:] for _, words in commands() if words[0] == "python"]
    for page in PAGES:
        found += [match.split() for match in re.findall(r"`python (-m [^`]+|\S+\.py[^`]*)`", page.read_text())]
    assert len(found) > 20
    for words in found:
        name, options = (words[1], words[2:]) if words[0] == "-m" else (words[0], words[1:])
        if name in ("pytest", "ladder"):
            continue
        file = Path(name.replace(".", "/") + ".py" if words[0] == "-m" else name)
        source = ROOT / file if (ROOT / file).is_file() else ROOT / file.with_suffix("") / "__main__.py"
        text = source.read_text()
        assert '__name__ == "__main__"' in text, name
        for flag in (word.removeprefix("--") for word in options if word.startswith("--")):
            assert re.search(rf"""["' -]{flag}["'=,]""", text), (name, flag)


def test_make_and_pip() -> None:
    """Targets of the Makefile, and extras of the package."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    programs = set()
    for _, words in commands():
        programs.add(words[0])
        if words[0] == "make":
            assert set(words[1:]) <= targets, words
        if words[0] == "pip":
            assert words[1] == "install"
            for text in re.findall(r"\[([^]]+)\]", " ".join(words)):
                assert set(text.split(",")) <= extras
    for page in PAGES:
        for text in re.findall(r"(?:\.|ladder-residual)\[([a-z,]+)\]", page.read_text()):
            assert set(text.split(",")) <= extras, page
        assert set(re.findall(r"`make ([a-z-]+)`", page.read_text())) <= targets, page
    assert programs <= set(PROGRAMS)


@pytest.mark.parametrize("block", list(blocks("python")), ids=str)
def test_python_blocks(here: Path, block: Block) -> None:
    space: dict[str, object] = {"__name__": "page"}
    if block.page == "docs/families.md":  # about models of images
        shutil.rmtree("DIR")
        Path("VIT").rename("DIR")
        space["pixels"] = torch.zeros(4, 1, 12, 12)
    exec(compile(block.text, str(block), "exec"), space)
