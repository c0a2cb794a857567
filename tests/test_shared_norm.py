"""Layers with one norm, which attention and MLP both read through: their config.json, weights, hosts and training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ladder.hf
from ladder import LLM, SamplingParams
from ladder.checkpoint import Directory, load
from ladder.config import ModelConfig
from ladder.config.lock import WIRED_MODEL_TYPE
from ladder.errors import LadderError
from ladder.hf import rewire, share_norm
from ladder.hf.convert import convert
from ladder.hf.names import IN_MEMORY
from ladder.model import Decoder
from ladder.perf.costs import RankCosts
from ladder.quantize.options import QuantizeOptions
from ladder.quantize.write import quantize
from ladder.train.options import ScratchOptions
from ladder.train.scratch import train
from tests.checkpoints import tiny as checkpoint
from tests.hosts import CONFIGS, FORWARD, host
from tests.test_hf import close, tokens
from tests.training import silent, training
from tests.weights import answer, draw, tiny

OWN = ("falcon", "falcon-two-norms", "falcon-sequential", "olmo2")  # Falcon's config.json says so itself
FAMILIES = [name for name in CONFIGS if name not in OWN]
NATIVE = [name for name in FAMILIES if name != "bloom"]


def native(folder: Path) -> torch.Tensor:
    source = Directory(folder)
    model = Decoder(source.config, dtype=torch.float32)
    source.check(model.shards())
    return load(model, source)(tokens())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, tmp_path: Path) -> None:
    """Made, saved, loaded by transformers and by the engine, converted: every layer has a tensor less."""
    model = ladder.hf.rewire(host(name, shared_norm=True), "parallel:2 ladder:1 parallel:1")
    gone = set(host(name).state_dict()) - set(model.state_dict())
    assert {key.split(".")[-1] for key in gone} <= {"weight", "bias"} and len({key.split(".")[2] for key in gone}) == 4
    expected = model(tokens()).logits
    model.save_pretrained(tmp_path / "model")
    raw = json.loads((tmp_path / "model/config.json").read_text())
    assert raw["model_type"] == WIRED_MODEL_TYPE and raw["shared_norm"] is True and raw["vocab_size"] is None
    assert not set(load_file(tmp_path / "model/model.safetensors")) & gone
    loaded, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager", output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    assert torch.equal(loaded(tokens()).logits, expected)
    if name in NATIVE:
        assert close(native(tmp_path / "model"), expected, FORWARD)
    convert(str(tmp_path / "model"), tmp_path / "standard", "standard")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "standard", attn_implementation="eager")
    assert torch.equal(plain(tokens()).logits, ladder.hf.rewire(model, "standard")(tokens()).logits)
    if name in NATIVE:
        assert close(native(tmp_path / "standard"), plain(tokens()).logits, FORWARD)


def test_a_standard_model_stays_locked(tmp_path: Path) -> None:
    """Other software would draw the norm that is not there."""
    model = host("llama", shared_norm=True)
    assert type(model.config).__name__ == "LadderLlamaConfig"  # by its config alone, whatever class made it
    model.save_pretrained(tmp_path / "one")
    ladder.hf.rewire(ladder.hf.rewire(model, "ladder"), "standard").save_pretrained(tmp_path / "two")
    for folder in ("one", "two"):
        raw = json.loads((tmp_path / folder / "config.json").read_text())
        assert (raw["model_type"], raw["wiring"], raw["vocab_size"]) == (WIRED_MODEL_TYPE, "standard", None)
        config = ModelConfig.from_directory(tmp_path / folder)
        assert config.shared_norm and config.wiring.is_standard and ModelConfig.from_hf(config.to_hf()) == config
        assert AutoConfig.from_pretrained(tmp_path / folder).shared_norm is True
    made = LlamaForCausalLM(LlamaConfig(**{**CONFIGS["llama"][1], "vocab_size": 97, "shared_norm": False}))
    assert hasattr(made.model.layers[0], "post_attention_layernorm") and type(made.config) is LlamaConfig


def test_the_mlp_reads_through_the_attentions_norm() -> None:
    """It is the model with two norms whose gains are equal, and no other; under every wiring."""
    for wiring in ("standard", "parallel", "ladder"):
        shared = tiny(3, shared_norm=True).rewired(wiring)
        weights = draw(shared)
        copies = {key.replace("input_l", "post_attention_l"): x for key, x in weights.items() if "input_l" in key}
        two, ids = replace(shared, shared_norm=False), tokens() % shared.vocab
        assert torch.equal(answer(shared, weights, ids), answer(two, {**weights, **copies}, ids))
        own = draw(two)
        assert (answer(shared, weights, ids) - answer(two, {**own, **weights}, ids)).abs().max() > 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_two_norms_are_folded_into_one(name: str, tmp_path: Path) -> None:
    """The same function under every wiring, a tensor less in each layer; saved, and read by the engine."""
    wiring, ids = "parallel:2 ladder:1 standard:1", tokens()
    model = rewire(host(name), wiring)
    expected, before = model(ids).logits, set(model.state_dict())
    assert share_norm(model) is model and model.config.shared_norm
    gone = before - set(model.state_dict())
    assert close(model(ids).logits, expected, FORWARD)
    assert {key.split(".")[2] for key in gone} == set("0123") and model.name_or_path.endswith(IN_MEMORY)
    dropped = rewire(host(name, shared_norm=True), wiring)
    dropped.load_state_dict({key: x for key, x in rewire(host(name), wiring).state_dict().items() if key not in gone})
    assert not close(dropped(ids).logits, expected, 100 * FORWARD)  # the control: it mattered
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(loaded(ids).logits, model(ids).logits) and loaded.config.wiring == wiring
    if name in NATIVE:
        assert close(native(tmp_path), expected, FORWARD)
    for other in ("ladder", "parallel"):
        assert close(rewire(model, other)(ids).logits, rewire(host(name), other)(ids).logits, FORWARD)


def test_norms_that_cannot_be_shared() -> None:
    model = host("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = 0
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(LadderError, match="a gain of layer 1's first norm is 0, that of its second is not"):
        share_norm(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight[3] = 0
    share_norm(model)
    with pytest.raises(LadderError, match="the layers of the llama model have no two norms"):
        share_norm(model)
    with pytest.raises(LadderError, match="shared_norm is not for olmo2"):
        share_norm(host("olmo2"))


def test_a_checkpoint_with_two_norms_is_refused(tmp_path: Path) -> None:
    host("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "shared_norm": True}))
    source = Directory(tmp_path)
    with pytest.raises(
        LadderError, match=r"has the tensor 'model\.layers\.0\.post_attention_layernorm\.weight', which"
    ):
        source.check(Decoder(source.config).shards())


def test_saved_and_generated_with(tmp_path: Path) -> None:
    """Weights that lie together are written one by one; the engine's tokens are transformers'."""
    checkpoint(tmp_path / "model", "parallel", shared_norm=True)
    model, prompt = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval(), [5, 17, 9]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    with LLM(tmp_path / "model") as llm:
        found = llm.generate([prompt], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert list(found[0].token_ids) == expected[0, 3:].tolist()


@pytest.mark.parametrize("name", OWN)
def test_refused(name: str) -> None:
    with pytest.raises(LadderError, match=r"^shared_norm is not for (falcon|olmo2): it is for families with a norm"):
        host(name, shared_norm=True)
    with pytest.raises(LadderError, match=r"^shared_norm is not for (falcon|olmo2): it is for families with a norm"):
        tiny(1, family=name.partition("-")[0], shared_norm=True)


@pytest.mark.parametrize("value", ("yes", 1, None, [], {"a": 1}))
def test_the_key_is_true_or_false(value: Any) -> None:
    raw = {**tiny(1).to_hf(), "shared_norm": value}
    if value is None:  # as if it were not there
        assert not ModelConfig.from_hf(raw).shared_norm
        return
    with pytest.raises(LadderError, match=r"^shared_norm must be true or false, not"):
        ModelConfig.from_hf(raw)


def test_counted_once() -> None:
    one, two = (RankCosts(tiny(4, shared_norm=shared), 2).vectors for shared in (True, False))
    assert two - one == 4 * tiny(4).hidden


def test_quantized(tmp_path: Path) -> None:
    """Two products, the same function."""
    config = {"hidden_size": 64, "intermediate_size": 64}
    ladder.hf.rewire(host("llama", **config, shared_norm=True), "parallel").save_pretrained(tmp_path / "model")
    quantize(QuantizeOptions(tmp_path / "model", tmp_path / "out", format="fp8"), silent)
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert raw["shared_norm"] is True and raw["wiring"] == "parallel"
    expected = native(tmp_path / "model")
    difference = (native(tmp_path / "out") - expected).norm() / expected.norm()
    assert 0 < difference < 0.2


def test_trained_from_scratch(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(ScratchOptions(out, size="tiny", wiring="parallel", shared_norm=True), training(data, 2), silent)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.shared_norm is True and model.config.wiring == "parallel"
    assert not any("post_attention" in name for name in load_file(out / "model.safetensors"))
    with pytest.raises(LadderError, match="is a run with shared-norm True, not False"):
        train(ScratchOptions(out, size="tiny", wiring="parallel"), training(data, 2), silent)
    ids = torch.arange(3, 14)[None]
    source = Directory(out)
    assert close(load(Decoder(source.config, dtype=torch.float32), source)(ids), model(ids).logits, FORWARD)
