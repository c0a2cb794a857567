"""What vLLM refuses of a wired checkpoint, before anything is started: without the plugin all of it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from vllm import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.plugins import load_general_plugins

from ladder.vllm.families import VLLM_FAMILIES
from ladder.vllm.plugin import register
from tests.vllm.references import checkpoint

PROGRAM = "import sys; from vllm import EngineArgs; EngineArgs(sys.argv[1], **eval(sys.argv[2])).create_engine_config()"


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> Path:
    load_general_plugins()
    return checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama", "ladder")


def changed(directory: Path, out: Path, **keys: Any) -> Path:
    """The same checkpoint with another config.json."""
    out.mkdir()
    for file in directory.iterdir():
        if file.name != "config.json":
            (out / file.name).symlink_to(file)
    raw = json.loads((directory / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**raw, **keys}))
    return out


def refusal(directory: Path, **options: Any) -> str:
    with pytest.raises(Exception) as caught:
        EngineArgs(str(directory), skip_tokenizer_init=True, dtype="float32", **options).create_engine_config()
    return str(caught.value)


def test_the_plugin_may_be_called_again(wired: Path) -> None:
    register()
    register()
    archs = ModelRegistry.get_supported_archs()
    assert {family.wired for family in VLLM_FAMILIES.values()} <= set(archs)
    assert "ladder.vllm.models" not in sys.modules  # lazily


def test_without_the_plugin(wired: Path) -> None:
    """In a process whose vLLM was told to load no plugins, and as `ladder.hf` would not read it."""
    told = {**os.environ, "VLLM_PLUGINS": ""}
    options = "dict(skip_tokenizer_init=True, dtype='float32')"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(wired), options], env=told, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "`ladder`" in done.stderr and "does not recognize this architecture" in done.stderr


def test_transformers_makes_no_standard_model_of_our_config(wired: Path) -> None:
    """vLLM's transformers backend would, of the family's own config."""
    config = EngineArgs(str(wired), skip_tokenizer_init=True, dtype="float32").create_model_config().hf_config
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForCausalLM.from_config(config)


def test_what_a_config_says(wired: Path, tmp_path: Path) -> None:
    assert "unknown wiring 'laddr'" in refusal(changed(wired, tmp_path / "a", wiring="laddr"))
    assert "give --tensor-parallel-size 4" in refusal(changed(wired, tmp_path / "b", wiring_ranks=4))
    assert "staleness is not 1 yet" in refusal(changed(wired, tmp_path / "c", staleness=0.5))
    assert "wired phi3 models are not served" in refusal(changed(wired, tmp_path / "d", base_model_type="phi3"))
    local = changed(wired, tmp_path / "e", wiring="none", ladder_vocab_size=300)
    assert "ends without an all-reduce" in refusal(local, tensor_parallel_size=2)


def test_options(wired: Path) -> None:
    compiled = {"compilation_config": {"mode": 3}}
    assert "vLLM's compiler would move the all-reduces" in refusal(wired, **compiled)
    pieces = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
    assert "VLLM_USE_BREAKABLE_CUDAGRAPH=1" in refusal(wired, **pieces)
    assert "unknown setting ladder.lane" in refusal(wired, additional_config={"ladder": {"lane": 2}})
    assert "must be 1 or 2" in refusal(wired, additional_config={"ladder": {"lanes": 3}})
    assert "leave out ladder.lanes" in refusal(wired, additional_config={"ladder": {"lanes": 2, "reference": True}})
    lanes = {"additional_config": {"ladder": {"lanes": 2}}}
    assert "one pipeline stage" in refusal(wired, pipeline_parallel_size=2, **lanes)
    assert "--cpu-offload-gb" in refusal(wired, cpu_offload_gb=1)


def test_all_reduces_of_one_stream(wired: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC", "1")
    assert "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC: leave it out" in refusal(wired, tensor_parallel_size=2)


def test_caches_of_compiled_code_see_wiring_and_settings(wired: Path, tmp_path: Path) -> None:
    def hashed(directory: Path, **settings: Any) -> str:
        options: Any = {"additional_config": {"ladder": settings}} if settings else {}
        args = EngineArgs(str(directory), skip_tokenizer_init=True, dtype="float32", **options)
        return args.create_engine_config().compute_hash()

    other = changed(wired, tmp_path / "other", wiring="ladder-2")
    assert len({hashed(wired), hashed(wired, reference=True), hashed(other)}) == 3


def test_the_paper_s_checkpoints(wired: Path, tmp_path: Path) -> None:
    raw = json.loads((wired / "config.json").read_text())
    plain = {**raw, "model_type": "llamaLadder", "vocab_size": raw["ladder_vocab_size"], "ladder_layers": 2}
    plain |= {"wiring": None, "architectures": ["LlamaLadderForCausalLM"]}
    paper = changed(wired, tmp_path / "paper", **plain)
    config = EngineArgs(str(paper), skip_tokenizer_init=True, dtype="float32").create_model_config()
    assert config.architecture == "LadderLlamaForCausalLM"
    assert config.hf_config.ladder_layers == 2 and config.hf_config.vocab_size == 320
