"""The examples do what they say."""

from pathlib import Path

import pytest

from examples.vision import main


def test_a_vision_transformer_converted_and_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = main(tmp_path, steps=12, examples=200)
    said = capsys.readouterr().out
    assert "fitted on 176 examples: KL" in said
    assert "rewired: wiring standard:1 ladder:3" in said and "fitted: wiring standard:1 ladder:3" in said
    assert all(0 <= value <= 1 for value in found.values())
    rewired, fitted = (float(part.split()[1].rstrip(",")) for part in said.split("KL")[1:3] for part in [f"KL {part}"])
    assert fitted < rewired
