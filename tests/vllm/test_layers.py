"""Layers with one norm for attention and MLP; and the mode without overlap."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace as Given
from typing import Any

import pytest
from vllm.config import CompilationMode, CUDAGraphMode

from ladder.vllm import versions
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


@pytest.mark.parametrize("cuda, other, suits", [
    (True, {}, True), (False, {}, False), (True, {"kernel_config": Given(linear_backend="flashinfer_cutedsl")}, False),
    (True, {"quant_config": Given()}, False), (True, {"lora_config": Given()}, False),
    (True, {"model_config": Given(is_moe=True)}, False),
    (True, {"parallel_config": Given(tensor_parallel_size=2, pipeline_parallel_size=1)}, False),
    (True, {"parallel_config": Given(tensor_parallel_size=1, pipeline_parallel_size=2)}, False),
])  # fmt: skip
def test_where_two_lanes_are_taken_unasked(
    cuda: bool, other: dict[str, Any], suits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "current_platform", Given(is_cuda=lambda: cuda))
    config: Any = Given(
        parallel_config=Given(tensor_parallel_size=1, pipeline_parallel_size=1),
        model_config=Given(is_moe=False),
        kernel_config=Given(linear_backend="auto"),
        quant_config=None,
        lora_config=None,
    )
    vars(config).update(other)
    assert versions.suits_lanes(config) is suits


@pytest.mark.parametrize("pooler, graphs", [(None, CUDAGraphMode.FULL_DECODE_ONLY), (Given(), None)])
def test_whole_graphs_are_of_models_that_generate(pooler: Any, graphs: CUDAGraphMode | None) -> None:
    compilation = Given(mode=None, cudagraph_mode=None)
    config: Any = Given(
        compilation_config=compilation,
        parallel_config=Given(pipeline_parallel_size=1),
        model_config=Given(pooler_config=pooler),
        optimization_level=2,
    )
    versions.default_modes(config)
    assert compilation.mode == CompilationMode.NONE and compilation.cudagraph_mode == graphs
