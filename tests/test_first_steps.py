"""What a newcomer meets first: the machine's limits, mistakes in arguments, and what the commands say about them."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ladder.bench.sweep.cells import Cell
from ladder.bench.sweep.measure import Timings, figures
from ladder.checkpoint import SINGLE
from ladder.config import ModelConfig
from ladder.data.texts import tokenize
from ladder.errors import LadderError
from ladder.files import locked, writing
from ladder.hf.load import reason
from ladder.perf.memory import free_bytes, size_text
from ladder.perf.schedule import hideable
from ladder.train import folder
from ladder.wiring import Wiring
from tests.checkpoints import tiny

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parent.parent
TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 20


@pytest.fixture(scope="module")
def standard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain checkpoint in bfloat16, with a tokenizer of bytes."""
    return tiny(tmp_path_factory.mktemp("standard"), dtype="bfloat16")


@pytest.fixture(scope="module")
def tokens(standard: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same text as the checkpoint's tokens."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "book.txt").write_text(TEXT)
    tokenize([folder / "book.txt"], folder / "data", str(standard))
    return folder / "data"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text(TEXT)
    return tmp_path / "book.txt"


# --- dtype auto -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb, native, asked, expected", [
    *((verb, False, "auto", torch.float32) for verb in ("eval", "scan", "trace")),
    *((verb, True, "auto", torch.bfloat16) for verb in ("eval", "scan", "trace")),
    *((verb, False, "bfloat16", torch.bfloat16) for verb in ("eval", "scan")),  # trace has no such option
])  # fmt: skip
def test_auto_is_float32_on_a_cpu_without_bf16_products(
    verb: str, native: bool, asked: str, expected: torch.dtype, standard: Path, text: Path, tmp_path: Path, run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    seen: list[torch.dtype] = []

    def stop(dtype: torch.dtype) -> None:
        seen.append(dtype)
        raise LadderError("seen")

    monkeypatch.setattr("ladder.devices.cpu_multiplies_bfloat16", lambda: native)
    monkeypatch.setattr("ladder.hf.evaluate._on_text", lambda each, model, *rest: stop(model.dtype))
    monkeypatch.setattr("ladder.scan.scan.scan", lambda model, *rest: stop(model.dtype))
    monkeypatch.setattr(
        "ladder.bench.trace.trace.trace", lambda setting, tp: stop(getattr(torch, setting.config.dtype))
    )
    arguments: dict[str, tuple[Any, ...]] = {
        "eval": (standard, "--text", text, "--dtype", asked),
        "scan": (standard, "--data", text, "--seq-len", 16, "--tokens", 64, "--dtype", asked),
        "trace": ("--model", standard, "--out", tmp_path / "trace"),
    }
    assert run(verb, *arguments[verb]) == (2, "", "ladder: seen\n")
    assert seen == [expected]


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with half a megabyte left."""
    for module in ("ladder.perf.memory", "ladder.hf.load"):
        monkeypatch.setattr(f"{module}.free_bytes", lambda: 500_000)


@pytest.mark.parametrize("arguments, message", [
    ("generate --model MODEL --prompt abc --max-num-seqs 100000", "at TP 1 needs .*: give a smaller --max-num-seqs"),
    ("generate --model MODEL --tp 2 --prompt abc --dtype float64", "at TP 2 needs 1.5 MB of memory, this "),
    ("trace --batch 1000000 --out OUT", r"a batch of 1000000 on 2 ranks needs [0-9.]+ GB of memory.*smaller --batch"),
    ("eval MODEL --text TEXT --dtype float32", r"0.000189 billion weights, 4 bytes for each\) needs .*: use a smaller"),
    ("scan MODEL --data TEXT --seq-len 16 --tokens 64 --dtype float32", "billion weights, 4 bytes for each"),
    ("eval MODEL --text TEXT --window 100 --batch 100 --dtype bfloat16", "logits of 12 sequences of 100 .* --batch"),
    ("scan MODEL --data TEXT --seq-len 100 --batch 100 --dtype bfloat16", "logits of 11 sequences of 100 .* --batch"),
    ("fit MODEL OUT --data DATA --seq-len 16 --batch 1", "billion weights, 4 bytes for each"),
    ("adapt MODEL OUT --data DATA --seq-len 16 --batch 2", r"training .* \(.* 20 bytes for each\) needs .*: train a"),
    ("adapt MODEL OUT --data DATA --seq-len 16 --batch 2 --kl-weight 0 --lm-weight 1", "16 bytes for each"),
    ("train OUT --size llama-3-70b --data DATA --seq-len 16 --batch 2", "training llama-3-70b .* needs 1[0-9.]+ GB"),
])  # fmt: skip
def test_what_does_not_fit_into_memory_costs_a_sentence(
    arguments: str, message: str, standard: Path, text: Path, tokens: Path, tmp_path: Path, run: Run,
    little_memory: None,
) -> None:  # fmt: skip
    places = {"MODEL": standard, "TEXT": text, "DATA": tokens, "OUT": tmp_path / "out"}
    given = [str(places.get(each, each)) for each in arguments.split()]
    status, out, err = run(*given)
    assert (status, out, err.count("\n")) == (2, "", 1) and re.search(message, err), err
    assert not (tmp_path / "out").exists()


def test_what_this_machine_has_left(tmp_path: Path) -> None:
    """Of the machine, and of the container: files that are cached there are given back when needed."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    assert free_bytes(proc, cgroup) > 1 << 20  # all there is, where nothing is known
    (proc / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    5000 kB\n")
    assert free_bytes(proc, cgroup) == 5000 << 10
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("2000000\n")
    assert free_bytes(proc, cgroup) == 5000 << 10
    (cgroup / "memory.max").write_text("3000000\n")
    (cgroup / "memory.stat").write_text("anon 1500000\ninactive_file 400000\n")
    assert free_bytes(proc, cgroup) == 1_400_000


def test_sizes_in_the_unit_that_shows_them() -> None:
    assert [size_text(count) for count in (3, 40e3, 2e6, 0.3e9, 41e9)] == [
        "3 bytes", "40000 bytes", "2.0 MB", "0.3 GB", "41.0 GB"
    ]  # fmt: skip


# --- disks that are full, and folders that are in use ---------------------------------------------------------------


def limited(size: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`ladder ARGUMENTS` in a process none of whose files may have more than `size` bytes: as a full disk, for it."""
    program = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
    program += "import sys\nfrom ladder.cli import main\nsys.argv[0] = 'ladder'\nmain()\n"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [
    "fit MODEL OUT --data DATA --seq-len 16 --batch 1 --tokens 256 --ridge 100 --wiring ladder@3",
    "adapt MODEL OUT --data DATA --seq-len 16 --batch 2 --tokens 64 --save-every 1 --log-every 1 --lr 1e-6",
])  # fmt: skip
def test_a_full_disk_costs_a_sentence(arguments: str, standard: Path, tokens: Path, tmp_path: Path) -> None:
    places = {"MODEL": standard, "DATA": tokens, "OUT": tmp_path / "out"}
    done = limited(200_000, *(places.get(each, each) for each in arguments.split()))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert re.search("^ladder: .*out.* cannot be written, the disk may be full: ", done.stderr), done.stderr


def test_only_errors_of_writing_are_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shapes"), writing(tmp_path):
        raise RuntimeError("shapes do not match")
    with pytest.raises(OSError, match="cannot be written"), writing(tmp_path):
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")


def test_a_folder_is_written_by_one_run(standard: Path, tokens: Path, tmp_path: Path, run: Run) -> None:
    arguments = ("adapt", standard, tmp_path / "out", "--data", tokens, "--seq-len", 16, "--batch", 2, "--tokens", 64)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text("{}")
    with locked(tmp_path / "out"):
        status, _, err = run(*arguments)
        assert status == 2 and "out is being written by another process: wait" in err
        with pytest.raises(LadderError, match="another process"), folder.owned(tmp_path / "out", {}):
            pass
    (tmp_path / "out" / "run.json").unlink()
    assert run(*arguments)[0] == 0  # the lock has ended with the block
    with pytest.raises(LadderError, match="is finished"), folder.owned(tmp_path / "out", {}):
        pass


def test_a_file_of_lines_is_written_by_one_sweep(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("a cell was measured")

    monkeypatch.setattr("ladder.bench.sweep.sweep._measured", measured)
    arguments = ("bench", "--size", "tiny", "--arm", "standard", "--prompt", 8, "--new", 8, "--out")
    (tmp_path / "lines.jsonl").touch()
    with locked(tmp_path / "lines.jsonl"):
        status, _, err = run(*arguments, tmp_path / "lines.jsonl")
    assert status == 2 and "lines.jsonl is being written by another process" in err
    (tmp_path / "file").write_text("")
    for out, message in ((tmp_path, "is a directory"), (tmp_path / "file" / "lines.jsonl", "file is a file")):
        status, _, err = run(*arguments, out)  # before the first cell
        assert status == 2 and message in err and err.count("\n") == 1


# --- weights of another wiring, and weights that are no numbers -----------------------------------------------------


def test_weights_of_another_wiring_are_warned_of(standard: Path, tmp_path: Path, run: Run) -> None:
    wired = tiny(tmp_path / "wired", "ladder")
    arguments = ("--prompt", "abc", "--max-new-tokens", 2)
    for model, own, asked in ((wired, "ladder", "standard"), (standard, "standard", "ladder")):
        status, _, err = run("generate", "--model", model, "--wiring", asked, *arguments)
        assert status == 0 and err.count("\n") == 1
        assert f"are those of the wiring '{own}', and are run as '{asked}': without adaptation" in err
        assert run("generate", "--model", model, "--wiring", own, *arguments)[2] == ""


def test_weights_that_are_not_numbers(standard: Path, text: Path, tokens: Path, tmp_path: Path, run: Run) -> None:
    spoiled = tiny(tmp_path / "spoiled")
    tensors = load_file(spoiled / SINGLE)
    tensors["model.layers.3.mlp.down_proj.weight"][0, 100] = torch.nan
    save_file(tensors, spoiled / SINGLE, metadata={"format": "pt"})
    status, out, err = run("eval", spoiled, "--text", text, "--json")
    assert status == 2 and "perplexity is" in err and "its output is not finite" in err
    line = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert line["value"] is None
    rest = ("--seq-len", 16, "--batch", 1)
    for arguments in (
        ("adapt", spoiled, tmp_path / "out", "--data", tokens, "--tokens", 64, *rest),
        ("fit", spoiled, tmp_path / "out", "--data", tokens, *rest),
        ("scan", spoiled, "--data", text, "--tokens", 64, *rest),
    ):
        status, out, err = run(*arguments)
        assert (status, out) == (2, "")
        assert "'model.layers.3.mlp.down_proj.weight' holds values that are not finite" in err
        assert not (tmp_path / "out").exists()


# --- what is hidden -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wiring, most", [
    ("standard", 0), ("parallel", 0), ("ladder", 15), ("ladder-2", 15), ("parallel-1", 7), ("none", 0),
    ("standard:4 ladder:4", 8),
])  # fmt: skip
def test_all_reduces_that_something_computes_beside(wiring: str, most: int) -> None:
    assert hideable(Wiring.parse(wiring, 8)) == most


@pytest.mark.parametrize("wiring, hidden", [("standard", 0.0), ("parallel", 0.0), ("ladder", 0.7)])
def test_standard_hides_nothing_however_a_cpu_was_shared(wiring: str, hidden: float) -> None:
    """The steps of all wirings take as long as those without communication: time in which a rank did not run."""
    rest = {"link": "x", "cell_link": "x", "link_kind": "real", "mode": "ranks", "device": "cpu", "dtype": "float32"}
    cell = Cell("tiny", 2, 1, 8, 8, arm=wiring, wiring=wiring, layers=4, of_layers=4, repetitions=2, **rest)
    timings = Timings([1.0, 1.0], [10.0, 10.0], none=10.0, all_reduce=1.0, all_gather=1.0, memory=1.0)
    found = figures(cell, ModelConfig.named("tiny"), timings, {"read_tb_s": 1.0, "tflop_s": 1.0})
    assert found["hidden"] == hidden and found["exposed_ms"] == pytest.approx(found["comm_ms"] * (1 - hidden))


# --- messages that mislead ------------------------------------------------------------------------------------------


def test_a_list_is_told_to_its_end() -> None:
    error = ValueError(
        "Couldn't instantiate the backend tokenizer from one of:\n(1) a `tokenizers` library serialization file,\n"
        "(2) a slow tokenizer instance to convert or\n(3) an equivalent slow tokenizer class\nYou need more\nlines"
    )
    assert reason(error).endswith("(3) an equivalent slow tokenizer class")
    assert reason(ValueError("missing:\n  a\n  b")) == "missing: a"
    assert reason(ValueError("one\ntwo")) == "one" and reason(ValueError()) == "ValueError"


def test_a_side_network_is_no_model_of_the_engines(tmp_path: Path, run: Run) -> None:
    (tmp_path / "side.json").write_text("{}")
    status, _, err = run("generate", "--model", tmp_path, "--prompt", "abc")
    assert status == 2 and "is a side network, which runs beside its model in transformers alone" in err


def test_trace_names_a_folder(tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").touch()
    assert run("trace", "--out", tmp_path / "file") == (
        2,
        "",
        f"ladder: {tmp_path / 'file'} is a file: name a folder\n",
    )
    status, _, err = run("trace", "--out", tmp_path / "file" / "trace")
    assert status == 2 and "file is a file" in err


def test_an_adapter_is_no_wider_than_the_model(standard: Path, tokens: Path, tmp_path: Path, run: Run) -> None:
    rest = ("--data", tokens, "--seq-len", 16, "--batch", 2, "--method", "lora", "--lora-rank", 65)
    status, _, err = run("adapt", standard, tmp_path / "out", *rest)
    assert status == 2 and "--lora-rank 65 is more than the model's width of 64" in err


@pytest.mark.parametrize("command", [
    ["-m", "ladder.bench.overlap", "--help"],
    ["-m", "ladder.bench.one_rank", "--help"],
    ["-m", "ladder.bench.trace.step_trace", "--help"],
    ["examples/tiny_checkpoint.py", "--help"],
])  # fmt: skip
def test_programs_tell_what_they_are(command: list[str]) -> None:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.startswith("usage: ") and not done.stderr


def test_the_example_checkpoint_refuses_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for arguments, message in (
        ([], "the following arguments are required: directory"),
        ([str(tmp_path / "new"), "lader"], "unknown wiring 'lader'"),
        ([str(tmp_path / "full")], "is there already: name a new folder"),
    ):
        command = [sys.executable, "examples/tiny_checkpoint.py", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr


def test_eval_of_the_beginning_of_a_text(standard: Path, text: Path, run: Run) -> None:
    status, out, _ = run("eval", standard, "--text", text, "--tokens", 101, "--dtype", "float32", "--json")
    assert status == 0 and json.loads(out)["n"] == 100
    words = text.read_text()
    text.write_text(words[:101])
    assert run("eval", standard, "--text", text, "--dtype", "float32", "--json")[1] == out
