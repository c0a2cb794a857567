"""Sizes, families, config.json, and which numbers of ranks can share a model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from ladder.config import SIZES, ModelConfig, Rope
from ladder.engine.options import EngineOptions
from ladder.engine.setup import Setup
from ladder.errors import LadderError
from ladder.layers.rope import frequencies
from ladder.model import Decoder
from tests.checkpoints import tiny
from tests.families import FAMILIES, SMALL, make

# hidden, layers, heads, kv heads, ffn, vocabulary; parameters in billions as published (the paper's: as its names say)
PUBLISHED = {
    "1B": (1536, 40, 24, 24, 4096, 49_152, 1.28),
    "1.5B": (1536, 52, 24, 24, 4096, 49_152, 1.62),
    "3B": (2304, 40, 36, 36, 9216, 49_152, 3.62),
    "4.5B": (2304, 52, 36, 36, 9216, 49_152, 4.64),
    "3B-32h": (2304, 40, 32, 32, 9216, 49_152, 3.62),
    "4.5B-32h": (2304, 52, 32, 32, 9216, 49_152, 4.64),
    "llama-3-8b": (4096, 32, 32, 8, 14_336, 128_256, 8.03),
    "34B": (8192, 48, 64, 8, 22_016, 32_000, 33.74),
    "llama-3-70b": (8192, 80, 64, 8, 28_672, 128_256, 70.55),
    "llama-3.1-70b": (8192, 80, 64, 8, 28_672, 128_256, 70.55),
    "176B": (14_336, 70, 112, 112, 57_344, 250_880, 237.3),  # BLOOM's dimensions, but with a gated MLP and a head
    "llama-3.1-405b": (16_384, 126, 128, 8, 53_248, 128_256, 405.85),
    "mixtral-8x7b": (4096, 32, 32, 8, 14_336, 32_000, 46.7),
    "qwen3-30b-a3b": (2048, 48, 32, 4, 6144, 151_936, 30.5),
    "llama-3.2-1b": (2048, 16, 32, 8, 8192, 128_256, 1.24),
    "llama-3.2-3b": (3072, 28, 24, 8, 8192, 128_256, 3.21),
    "smollm2-135m": (576, 30, 9, 3, 1536, 49_152, 0.1345),
    "50M": (640, 10, 8, 8, 1792, 16_384, 0.0613),  # ours, as its name says, and the embedding
    "50M-long": (640, 13, 8, 8, 1792, 16_384, 0.0765),
    "embedded": (320, 8, 8, 8, 864, 4096, 0.01123),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes(name: str) -> None:
    c = ModelConfig.named(name)
    *dimensions, billions = PUBLISHED[name]
    assert [c.hidden, c.layers, c.heads, c.kv_heads, c.ffn, c.vocab] == dimensions
    model = Decoder(c, device="meta")
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.005)


def test_every_size_is_tested_and_has_its_degrees() -> None:
    assert SIZES.keys() == PUBLISHED.keys() | {"tiny", "quick"}
    degrees = {name: config.degrees() for name, config in SIZES.items()}
    assert degrees["tiny"] == degrees["50M"] == degrees["embedded"] == [1, 2, 4, 8]
    assert degrees["smollm2-135m"] == [1, 3]
    assert {1, 2, 4, 8, 16} <= set(degrees["llama-3.1-405b"])
    assert 8 not in degrees["3B"] and 8 in degrees["3B-32h"]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("wiring", ["standard", "ladder", "ladder@0"])
def test_config_json_round_trip(name: str, wiring: str) -> None:
    config = ModelConfig.named(name).rewired(wiring)
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def theirs(family: str, **changes: object) -> dict[str, Any]:
    """A config.json as transformers writes it."""
    model_type, own = FAMILIES[family]
    return {**json.loads(CONFIG_MAPPING[model_type](**{**SMALL, **own}).to_json_string(use_diff=True)), **changes}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wiring", ["standard", "ladder"])
def test_config_json_round_trip_of_families(family: str, wiring: str) -> None:
    """Ours has the meaning of theirs, to us and, key for key of what both name, to transformers."""
    raw = theirs(family)
    config = ModelConfig.from_hf(raw).rewired(wiring)
    ours = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(ours) == config
    if wiring == "standard":
        kind = CONFIG_MAPPING[ours["model_type"]]
        again = json.loads(kind(**ours).to_json_string(use_diff=False))
        assert ModelConfig.from_hf(again) == config


@pytest.mark.parametrize(
    "family, change, message",
    [
        ("falcon-7b", {"activation": "swish"}, "activation 'swish' is not supported: known are silu, gelu"),
        ("gpt2", {"activation_function": "quick_gelu"}, "activation 'quick_gelu' is not supported"),
        ("gemma2", {"hidden_activation": "mish"}, "activation 'mish' is not supported"),
        ("falcon-7b", {"alibi": True}, "alibi True is not supported"),
        ("falcon", {"parallel_attn": False}, "new Falcon decoder without parallel attention is not supported"),
        ("phi3", {"rope_parameters": {"rope_type": "yarn"}}, "'yarn' is not supported: known are default, linear"),
        ("gpt-neox", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "'yarn' is not supported"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}}, "'short_factor' is missing"),
        ("phi3-longrope", {"hidden_size": 64}, "rotary scaling has 3 factors for head size 8"),
        ("gpt-neox", {"rope_parameters": {"partial_rotary_factor": 0.4}}, "0.4 of head size 8 is no number of pairs"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention True is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True is not supported"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ("mixtral", {"num_experts_per_tok": 5}, "5 of 4 experts"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "a value has the wrong type"),
        ("smollm3", {"no_rope_layers": [1]}, "a value has the wrong type"),
    ],
)
def test_settings_of_families_that_are_refused(
    family: str, change: dict[str, object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(theirs(family, **change)))
    with pytest.raises(LadderError, match=message) as caught:
        ModelConfig.from_directory(tmp_path)
    assert "\n" not in str(caught.value) and "config.json" in str(caught.value)


def test_the_context_of_longrope_is_the_original_one() -> None:
    """Beyond it the other factors would hold, for all keys anew."""
    raw = theirs("phi3-longrope")
    assert (raw["max_position_embeddings"], raw["rope_parameters"]["factor"]) == (256, 4.0)
    config = ModelConfig.from_hf(raw)
    assert config.context == config.rope.original_context == 128
    assert config.rope.factors == (1.0, 1.5, 2.0) and config.rope.long_factors == (2.0, 3.0, 4.0)
    assert config.to_hf()["max_position_embeddings"] == 128 * 4


def test_gemma_3_has_no_cap_on_scores() -> None:
    """Its layers in transformers ignore the key that Gemma 2's read."""
    raw = {"attn_logit_softcapping": 5.0}
    assert ModelConfig.from_hf(theirs("gemma3", **raw)).attention_softcap is None
    assert ModelConfig.from_hf(theirs("gemma2", **raw)).attention_softcap == 5.0


def test_degrees_of_experts() -> None:
    """Slices of every expert, or whole experts: each has its own degrees."""
    config = ModelConfig.from_hf(theirs("qwen3-moe"))  # six experts of width 24, and a dense layer
    assert config.degrees() == [1, 2, 4, 8] and config.degrees(expert_parallel=True) == [1, 2]
    with pytest.raises(LadderError, match=r"^4 ranks .*6 experts of ffn 24 .* that work are 1, 2$"):
        config.check_degree(4, expert_parallel=True)
    with pytest.raises(LadderError, match="expert parallelism is for models with experts"):
        Decoder(ModelConfig.named("tiny"), device="meta", expert_parallel=True)


@pytest.mark.parametrize("size", [0, -1, 3, 6, 16])
def test_ranks_that_cannot_share_are_refused_with_those_that_can(size: int) -> None:
    with pytest.raises(LadderError, match=rf"^{size} ranks .* the degrees that work are 1, 2, 4, 8$"):
        ModelConfig.named("tiny").check_degree(size)


def test_refused_at_construction() -> None:
    class Three:
        size, rank = 3, 0

    with pytest.raises(LadderError, match="3 ranks cannot share"):
        Decoder(ModelConfig.named("tiny"), Three(), device="meta")  # type: ignore[arg-type]


def test_old_and_new_rope_keys_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    oldest = {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}}
    expected = Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    plain = {key: value for key, value in ModelConfig.named("tiny").to_hf().items() if key != "rope_parameters"}
    assert {ModelConfig.from_hf({**plain, **raw}).rope for raw in (old, oldest, new)} == {expected}
    assert Rope.from_hf(expected.to_hf(), 1) == expected


def test_llama3_frequencies_at_the_published_settings() -> None:
    """The real models' 8192 original positions; the tiny families use another number."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for size in ("llama-3.1-405b", "llama-3.2-1b"):
        config = ModelConfig.named(size)
        raw = {k: v for k, v in config.to_hf().items() if k not in ("architectures", "model_type", "dtype")}
        expected, scale = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**raw), "cpu")
        assert scale == 1.0
        torch.testing.assert_close(frequencies(config.rope, config.head_dim), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "bloom"}, "unknown model family 'bloom': known are llama, mistral, qwen2, qwen3"),
        ({"model_type": "gpt2"}, "'n_layer' is missing"),
        ({"model_type": None}, "unknown model family None"),
        ({"hidden_act": "quick_gelu"}, "'quick_gelu' is not supported: known are silu, gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config must name a quant_method"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "wide"}, "'hidden_size' must be a whole number, not 'wide'"),
        ({"hidden_size": 64.0}, "'hidden_size' must be a whole number, not 64.0"),
        ({"vocab_size": True}, "'vocab_size' must be a whole number"),
        ({"num_hidden_layers": 0}, "layers must be from 1 to 4096, not 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": float("inf")}, "Infinity is no number that JSON has"),
        ({"hidden_size": 10**18}, "hidden must be from 1 to"),
        ({"head_dim": -8}, "head size -8 does not fit"),
        ({"head_dim": 7}, "head size 7 does not fit"),
        ({"rms_norm_eps": -1}, "norm_eps must be"),
        ({"rms_norm_eps": float("nan")}, "NaN is no number that JSON has"),
        ({"rope_parameters": {"rope_theta": 0}}, "rotary base 0.0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor 0.0"),
        ({"eos_token_id": ["a"]}, "'eos_token_id' must be"),
        ({"eos_token_id": -1}, "'eos_token_id' must be"),
        ({"num_key_value_heads": 3}, "8 heads cannot share 3 key/value heads"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary scaling 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "'factor' is missing"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding window must be at least 1, not 0"),
        ({"dtype": "float8_e4m3fn"}, "'float8_e4m3fn' is not supported"),
        ({"ladder_layers": 5}, "ladder_layers is 5, the model has 4 layers"),
        ({"ladder_layers": 2, "wiring": "ladder"}, "keep one"),
        ({"model_type": "ladder", "base_model_type": "llama"}, "needs the key 'wiring'"),
        ({"model_type": "ladder", "base_model_type": "llama", "wiring": "ladder:9"}, "more than the model's 4 layers"),
        ({"model_type": "ladder", "base_model_type": "bloom", "wiring": "ladder"}, "unknown model family 'bloom'"),
        ({"layer_types": ["full_attention"], "model_type": "qwen2", "use_sliding_window": True}, "windows is for 1"),
    ],
)
def test_a_config_that_does_not_fit_is_one_sentence(change: dict[str, object], message: str, tmp_path: Path) -> None:
    raw = {**ModelConfig.named("tiny").to_hf(), **change}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(LadderError, match=message) as caught:
        ModelConfig.from_directory(tmp_path)
    assert "\n" not in str(caught.value) and "config.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", "[" * 200_000], ids=lambda text: text[:3])
def test_a_config_that_is_no_json_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LadderError, match=r"config\.json"):
        ModelConfig.from_directory(tmp_path)


def test_silent_keys_take_transformers_defaults() -> None:
    raw = {"model_type": "mistral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = ModelConfig.from_hf({**raw, "intermediate_size": 64, "vocab_size": 32})
    assert (config.kv_heads, config.context, config.windows) == (8, 131_072, (4096, 4096))
    theirs = make("mistral").config.__class__(**{k: v for k, v in raw.items() if k != "model_type"})
    assert (theirs.num_key_value_heads, theirs.max_position_embeddings, theirs.sliding_window) == (8, 131_072, 4096)


def test_end_of_text_ids(tmp_path: Path) -> None:
    raw = replace(ModelConfig.named("tiny"), eos=(7,)).to_hf()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.from_directory(tmp_path).eos == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert ModelConfig.from_directory(tmp_path).eos == (7, 9)


def test_first_layers() -> None:
    config = ModelConfig(64, 4, 8, 4, 128, vocab=320, windows=(None, 3, None, 5)).rewired("ladder")
    part = config.first(2)
    assert (part.layers, part.windows, str(part.wiring), part.hidden) == (2, (None, 3), "standard", 64)


def test_the_degree_that_a_checkpoint_was_trained_for(tmp_path: Path) -> None:
    """Kept in config.json, forgotten under another wiring; other degrees are refused before a weight is read."""
    directory = tiny(tmp_path / "model", "desync-2x")
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "wiring_ranks": 2}))
    config = ModelConfig.from_directory(directory)
    assert config.ranks == 2 and config.to_hf()["wiring_ranks"] == 2
    assert config.rewired("ladder").ranks == 1 and "wiring_ranks" not in config.rewired("ladder").to_hf()
    assert Setup(EngineOptions(directory, tp=2), tokenizer=False).config.ranks == 2
    with pytest.raises(LadderError, match="was trained for 2 ranks, not 4: give --tp 2"):
        Setup(EngineOptions(directory, tp=4), tokenizer=False)
    assert Setup(EngineOptions(directory, wiring="ladder", tp=4), tokenizer=False).config.ranks == 1


def test_settings_that_a_family_does_not_have() -> None:
    """What transformers ignores is ignored: a share of a Llama's head, a window that Qwen3-MoE does not use."""
    llama = ModelConfig.from_hf({**ModelConfig.named("tiny").to_hf(), "partial_rotary_factor": 0.5})
    assert llama.rope.share == 1
    plain = {key: value for key, value in ModelConfig.named("qwen3-30b-a3b").to_hf().items() if "sliding" not in key}
    assert set(ModelConfig.from_hf({**plain, "sliding_window": 4096}).windows) == {None}
