"""Every command and every Python block of README.md and docs/ is run, with small stand-ins for what they name.

What takes processes of its own is in tests/test_commands_processes.py; what is not run, and why: KINDS in
tests/commands.py.
"""

import os
import re
import shutil
import signal
import threading
import tomllib
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from urllib.request import urlopen

import datasets
import pytest
import torch
import typer

from ladder.cli import app
from tests.blocks import FENCE, LANGUAGES, PAGES, PROGRAMS, ROOT, Block, blocks, commands, without_code
from tests.commands import KINDS, kind, ladder_commands, made, of_kind, put, small, stand_ins

Run = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.filterwarnings("ignore")  # those of libraries; every program here is tested elsewhere, too
LADDER = ladder_commands()
RUN, GPU = of_kind("ladder"), of_kind("gpu")
HELLASWAG = {"ind": 1, "activity_label": "Rain", "ctx_a": "It rained.", "ctx_b": "he", "label": "0"}
HELLASWAG |= {"endings": ["got wet.", "stayed dry.", "slept.", "sang."], "split": "val", "source_id": "x"}
seen: list[str] = []  # what `look` has seen


def verbs() -> list[str]:
    return list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_there_are_commands() -> None:
    assert len(LADDER) > 70 and len(RUN) > 50 and len(GPU) > 5


def test_every_command_is_of_a_known_kind() -> None:
    """Else somebody decides how a test runs it, or why none can."""
    assert {kind(words) for _, words in commands()} == set(KINDS)
    texts = [page.read_text() for page in PAGES]
    assert {found[1] for text in texts for found in FENCE.finditer(text)} <= set(LANGUAGES)
    assert not [str(block) for block, words in commands() if {"|", "&&", ";", "&", "<"} & set(words)]  # for a shell


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
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_ins(tmp_path_factory.mktemp("commands"))


@pytest.fixture
def here(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, with everything that commands read; stand-ins for the network, a user and a browser, too."""
    put(given, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", hub(datasets.load_dataset))
    monkeypatch.setattr("sys.stdin", StringIO("Once upon a time\n"))
    monkeypatch.setattr("webbrowser.open", look)
    return tmp_path


def hub(load: Callable[..., object]) -> Callable[..., object]:
    """`datasets.load_dataset`, for which the network has one small data set."""

    def load_dataset(path: str, *names: object, **options: object) -> object:
        if path != "Rowan/hellaswag":
            return load(path, *names, **options)
        rows = datasets.Dataset.from_list([HELLASWAG] * 3)
        return datasets.DatasetDict({"train": rows, "validation": rows})

    return load_dataset


def look(url: str) -> bool:
    """A browser that asks for the page; then its user presses Ctrl-C."""

    def ask() -> None:
        try:
            with urlopen(url, timeout=60) as answer:
                seen.append(answer.read().decode())
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=ask).start()
    return True


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@pytest.mark.parametrize("command", RUN)
def test_it_runs(run: Run, here: Path, command: str) -> None:
    """It says or writes something; a report, a picture or a model is there in the end."""
    words = small(RUN[command])
    if (out := made(words)) is not None:
        remove(out)  # the page makes it anew
    status, said, err = run(*words[1:])
    assert status == 0, err
    assert "Traceback" not in err
    assert said.strip() or out is not None
    if out is not None:
        assert any(out.iterdir()) if out.is_dir() else out.stat().st_size
    if words[1:] == ["explore"]:
        assert re.search(r"exploring at http://127.0.0.1:\d+", said) and "stopped" in said
        assert "<html" in seen.pop() and not seen


def test_images(run: Run, here: Path) -> None:
    """The page about other models, from its first block to its last, with a vision transformer of two layers."""
    remove(here / "DIR")
    (here / "VIT").rename("DIR")
    page = ROOT / "docs" / "families.md"
    space: dict[str, object] = {"__name__": "page", "pixels": torch.zeros(12, 1, 12, 12)}
    for found in ("OUT", "FITTED", "ADAPTED"):
        remove(here / found)
    for block in blocks("python", [page]):
        exec(compile(block.text, str(block), "exec"), space)
    images = [words for _, words in commands([page])]
    assert [words[1] for words in images] == ["fit", "adapt"]
    for words in images:
        status, _, err = run(*small(words)[1:])
        assert status == 0 and any(Path(words[3]).iterdir()), err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and they would use it")
@pytest.mark.parametrize("command", GPU)
def test_without_a_gpu_it_says_so(run: Run, here: Path, command: str) -> None:
    status, _, err = run(*GPU[command][1:])
    assert status == 2
    assert "gpu" in err.lower() or "cuda" in err.lower()
    assert len(err.splitlines()) == 1


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
