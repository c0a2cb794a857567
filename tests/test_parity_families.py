"""The product against the oracle, family by family: every wiring at degrees 1, 2 and 4; experts both ways."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from ladder.comm.base import Comm, Solo
from ladder.comm.emulated import World
from ladder.config import ModelConfig, Rope
from tests import families, oracle, oracle_families
from tests.oracle_families import HABITS, Habits
from tests.recording import Event, Recording
from tests.test_parity import WIRINGS
from tests.tolerance import apart, forward
from tests.weights import decoder, draw, joined

# what test_parity has already is left out: the plain Llama, its biases, Qwen's windows
LEFT_OUT = ("llama-2", "llama-3", "llama-3.2", "llama-bias", "mistral-full", "qwen2-window", "smollm2")
NAMES = [name for name in families.FAMILIES if name not in LEFT_OUT]
CHANGES: dict[str, dict[str, Any]] = {
    "olmo2": {"num_key_value_heads": 2},  # four ranks have copies of a head whose norm is over all heads
    "olmo2-bias": {"attention_bias": True},
    "falcon-relu": {"activation": "relu"},
    "gpt2-gelu": {"activation_function": "gelu"},
}
FAMILIES = {name: name for name in NAMES} | {"olmo2-bias": "olmo2", "falcon-relu": "falcon-7b", "gpt2-gelu": "gpt2"}
HYBRIDS = (
    ("standard", "ladder", "parallel", "desync-2x"),
    ("desync-3x", "ladder", "ladder", "standard"),
    ("none", "ladder-3", "desync-5x", "ladder-1-2"),
    ("ladder-2", "parallel", "none", "parallel"),
    ("parallel-1", "desync-2x-1", "parallel-1", "parallel-1"),
)
PATTERNS = (*((name,) * 4 for name in WIRINGS), *HYBRIDS)
SETTINGS = (
    *("activation", "rope", "local_rope", "no_rope", "windows", "parallel", "attention_scale", "query_scalar"),
    *("attention_softcap", "logit_softcap", "embed_scale", "residual_scale", "logit_divisor"),
)
LENGTH = 12  # longer than any of the windows
EXPERTS = [name for name in NAMES if families.FAMILIES[name][0] in ("mixtral", "qwen3_moe")]


def model(name: str) -> tuple[ModelConfig, dict[str, Tensor], Tensor]:
    """A configuration, weights of it and a text."""
    model_type, own = families.FAMILIES[FAMILIES[name]]
    theirs = CONFIG_MAPPING[model_type](**{**families.SMALL, **own, **CHANGES.get(name, {})})
    config = ModelConfig.from_hf(theirs.to_dict())
    tokens = torch.randint(config.vocab, (1, LENGTH), generator=torch.Generator().manual_seed(3))
    return config, draw(config), tokens


def tolerance(config: ModelConfig) -> float:
    """Relative to the largest logit."""
    experts = 0 if config.experts is None else config.experts.ffn
    return forward(config.layers, max(config.ffn, config.hidden, config.heads * config.head_dim, experts), LENGTH)


def compare(world: World, name: str, expert_parallel: bool = False) -> None:
    config, weights, tokens = model(name)

    def run(comm: Comm) -> list[Tensor]:
        one = decoder(config, weights, comm, expert_parallel)
        found = []
        for rows in PATTERNS:
            one.rewire(" ".join(f"{row}:1" for row in rows))
            with torch.inference_mode():
                found.append(joined(one, one(tokens)))
        return found

    first, *others = world.run(run)
    for rows, found, *rest in zip(PATTERNS, first, *others, strict=True):
        assert all(torch.equal(found, other) for other in rest), f"{rows}: the ranks disagree"
        expected = oracle.logits(config, weights, tokens, rows, world.size, expert_parallel)
        assert apart(found, expected) <= tolerance(config), rows


def cases() -> Iterator[tuple[str, int]]:
    """Each model_type at three degrees, its further variants at one of them."""
    seen = set()
    for name, base in FAMILIES.items():
        model_type = families.FAMILIES[base][0]
        yield from ((name, ranks) for ranks in ((2,) if model_type in seen else (1, 2, 4)))
        seen.add(model_type)


@pytest.mark.parametrize("name, ranks", cases())
def test_every_wiring(worlds: dict[int, World], name: str, ranks: int) -> None:
    compare(worlds[ranks], name)


@pytest.mark.parametrize(
    "name, ranks", [("mixtral", 2), ("mixtral", 4), *((name, 2) for name in EXPERTS if name != "mixtral")]
)
def test_whole_experts_on_a_rank(worlds: dict[int, World], name: str, ranks: int) -> None:
    compare(worlds[ranks], name, expert_parallel=True)


def test_experts_are_shared_out_in_two_ways() -> None:
    """Where ranks keep their partial sums the two ways of sharing are two functions; else they are one."""
    config, weights, tokens = model("mixtral")
    for row, same in (("ladder", True), ("desync-3x", False)):
        one, other = (oracle.logits(config, weights, tokens, (row,) * 4, 2, whole) for whole in (False, True))
        assert (apart(one, other) <= forward(4, 96, LENGTH, torch.float64)) if same else apart(one, other) > 1e-2


def settings() -> Iterator[tuple[str, str, Any]]:
    """Every setting of each family in which it is not a plain Llama, and the plain value."""
    for name in FAMILIES:
        config, _, _ = model(name)
        plain = {"activation": "silu", "rope": Rope(), "windows": (None,) * config.layers}
        for field in fields(ModelConfig):
            if field.name in SETTINGS:
                value = plain.get(field.name, field.default)
                if getattr(config, field.name) != value and not (field.name == "rope" and config.family == "gpt2"):
                    yield name, field.name, value


@pytest.mark.parametrize("name, field, plain", settings(), ids=str)
def test_each_setting_moves_the_logits(name: str, field: str, plain: Any) -> None:
    """Else the comparison would not notice its absence."""
    config, weights, tokens = model(name)
    rows = ("standard",) * config.layers
    with_it = oracle.logits(config, weights, tokens, rows, 1)
    without = oracle.logits(replace(config, **{field: plain}), weights, tokens, rows, 1)
    assert apart(without, with_it) > 100 * tolerance(config)


def test_all_settings_are_among_them() -> None:
    assert {field for _, field, _ in settings()} == set(SETTINGS)


@pytest.mark.parametrize("kind", ("default", "linear", "llama3", "longrope"))
def test_every_rope_is_among_them(kind: str) -> None:
    assert kind in {model(name)[0].rope.kind for name in FAMILIES}


@pytest.mark.parametrize(
    "family, plain",
    [
        ("gemma2", {"one_plus": False}),
        ("gemma2", {"root_embedding": False}),
        ("gpt2", {"layer_norm": False}),
        ("olmo2", {"qk_norm": None}),
        ("qwen3", {"qk_norm": None}),
        ("gemma2", {"norms": (Habits().norms[0], None, "pre_feedforward_layernorm", None)}),
        ("olmo2", {"norms": ("post_attention_layernorm", None, "post_feedforward_layernorm", None)}),
    ],
)
def test_each_habit_moves_the_logits(family: str, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with what a family does, whatever its config.json says."""
    config, weights, tokens = model(family)
    rows = ("standard",) * config.layers
    with_it = oracle.logits(config, weights, tokens, rows, 1)
    monkeypatch.setitem(HABITS, config.family, replace(HABITS[config.family], **plain))
    monkeypatch.setattr(oracle_families.Checkpoint, "check", lambda self: None)  # norms are left over
    assert apart(oracle.logits(config, weights, tokens, rows, 1), with_it) > 100 * tolerance(config)


def test_the_experts_habits_move_the_logits() -> None:
    config, weights, tokens = model("qwen3-moe")
    assert config.experts is not None
    rows = ("standard",) * config.layers
    with_it = oracle.logits(config, weights, tokens, rows, 1)
    for change in ({"normalize": False}, {"top_k": 1}):
        other = replace(config, experts=replace(config.experts, **change))
        assert apart(oracle.logits(other, weights, tokens, rows, 1), with_it) > 100 * tolerance(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_number_of_all_reduces(name: str) -> None:
    """Where every sub-block reduces, as many as there must be flags for: a norm over all heads has one of its own."""
    config, weights, tokens = model(name)
    config, log = config.rewired("ladder"), list[Event]()
    decoder(config, weights, Recording(Solo(), log))(tokens)
    assert [kind for kind, _ in log].count("send") == config.most_all_reduces
