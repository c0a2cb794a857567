"""Layers with one norm for attention and MLP; and the mode without overlap."""

from functools import partial
from pathlib import Path

from tests.vllm.engines import engine
from tests.vllm.references import CLOSE, apart, checkpoint, native, prompts


def test_layers_with_one_norm(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model", "llama", "parallel", shared_norm=True)
    with engine(directory, 2) as found:
        for wiring in ("parallel", "ladder"):
            found.rewire(wiring)
            assert apart(found.generate(prompts()), prompts(), partial(native, directory, wiring, 2)) < CLOSE


def test_the_reference_mode(tmp_path: Path) -> None:
    """No overlap, the same numbers."""
    directory = checkpoint(tmp_path / "model", "llama", "ladder")
    with engine(directory, 2, additional_config={"ladder": {"reference": True}}) as found:
        for wiring in ("ladder", "desync-2x"):
            found.rewire(wiring)
            assert apart(found.generate(prompts()), prompts(), partial(native, directory, wiring, 2)) < CLOSE
