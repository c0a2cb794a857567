"""What a newcomer meets first: the machine's limits, mistakes in arguments, and what the commands say about them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.errors import LadderError
from tests.checkpoints import tiny

Run = Callable[..., tuple[int, str, str]]
TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 20


@pytest.fixture(scope="module")
def standard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain checkpoint in bfloat16, with a tokenizer of bytes."""
    return tiny(tmp_path_factory.mktemp("standard"), dtype="bfloat16")


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
