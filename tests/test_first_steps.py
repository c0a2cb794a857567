"""What a newcomer meets first: the machine's limits, mistakes in arguments, and what the commands say about them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.data.texts import tokenize
from ladder.errors import LadderError
from ladder.perf.memory import free_bytes, size_text
from tests.checkpoints import tiny

Run = Callable[..., tuple[int, str, str]]
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
