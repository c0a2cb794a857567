"""The product against the oracle: every wiring at every degree, in numbers."""

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ladder.checkpoint import Random, load
from ladder.comm.base import Comm
from ladder.comm.emulated import World
from ladder.config import ModelConfig, Rope
from ladder.model import Decoder
from tests import oracle
from tests.conftest import DEGREES
from tests.tolerance import forward
from tests.weights import DEVIATION, TINY, answer, decoder, draw, joined, tiny

TOLERANCE = forward(6, 32, 9)  # of logits of magnitude one; at most six layers, eight heads of four, nine tokens

WIRINGS = (
    *("standard", "parallel", "ladder", "ladder-2", "ladder-3", "ladder-1-2", "ladder-2-1", "ladder-0-1"),
    *("parallel-1", "parallel-2", "desync-2x", "desync-3x", "desync-4x", "desync-5x"),
    *("desync-2x-1", "desync-2x-2", "desync-3x-1", "none"),
    *("desync-3x-local", "desync-5x-1-local"),
)
SAME_AT_EVERY_DEGREE = ("standard", "parallel", "parallel-1", "ladder", "ladder-2", "ladder-1-2")

HYBRIDS = (
    ("standard", "standard", "ladder", "ladder"),
    ("ladder", "ladder", "standard", "standard"),
    ("standard", "ladder", "standard", "ladder"),
    ("desync-2x", "desync-2x", "ladder", "ladder"),
    ("desync-3x", "ladder", "ladder", "standard"),  # the run ends with drift that no sum has carried yet
    ("desync-3x", "desync-2x", "desync-3x", "desync-3x"),  # the count starts anew
    ("ladder-2", "desync-4x", "desync-4x", "ladder"),
    ("parallel", "parallel", "ladder-2", "ladder-2"),
    ("ladder-2", "parallel", "none", "parallel"),
    ("none", "ladder", "ladder", "ladder"),
    ("none", "ladder-3", "desync-5x", "ladder-1-2"),
    ("ladder", "none", "none", "ladder-2"),
    ("parallel-1", "ladder", "parallel-2", "parallel-1"),
    ("desync-3x-1", "parallel-1", "desync-2x-2", "ladder"),  # drift joins a partial sum that was held
    ("desync-3x-2", "desync-3x-2", "desync-3x-2", "standard"),
    ("ladder-3", "ladder-3", "ladder-0-1", "ladder-3"),
)

FAMILIES: dict[str, dict[str, Any]] = {
    "qkv_bias": {"qkv_bias": True},
    "o_bias": {"o_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "all_biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qk_norm": {"family": "qwen3"},
    "windows": {"family": "qwen2", "windows": (None, 1, 3, 4)},
    "wide_windows": {"family": "mistral", "windows": (7, 8, 9, 7)},  # of eight tokens: only 7 hides one
    "tied": {"tied": True},
    "one_kv_head": {"kv_heads": 1},
    "no_sharing": {"kv_heads": 8},
    "linear_rope": {"rope": Rope(100.0, "linear", 4.0)},
    "llama3_rope": {"head_dim": 8, "rope": Rope(100.0, "llama3", 8.0, 1.0, 4.0, 64)},
}


def wired(config: ModelConfig, rows: tuple[str, ...]) -> ModelConfig:
    return config.rewired(" ".join(f"{name}:1" for name in rows))


def some_tokens(batch: int = 2, length: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(TINY["vocab"], (batch, length), generator=torch.Generator().manual_seed(seed))


def ours(world: World, config: ModelConfig, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The product's logits, which all ranks must have in the same bits."""
    first, *others = world.run(lambda comm: answer(config, weights, tokens, comm))
    assert all(torch.equal(first, other) for other in others)
    return first


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    difference = (actual.double() - expected.double()).abs().max().item()
    assert difference <= TOLERANCE, f"the logits are {difference:.1e} apart"  # also refuses NaN


@pytest.mark.parametrize("ranks", DEGREES)
@pytest.mark.parametrize("name", WIRINGS)
def test_every_wiring_at_every_degree(worlds: dict[int, World], name: str, ranks: int) -> None:
    config, tokens, rows = tiny(5), some_tokens(), (name,) * 5
    weights = draw(config)
    expected = oracle.logits(config, weights, tokens, rows, ranks)
    assert_close(ours(worlds[ranks], config.rewired(name), weights, tokens), expected)


@pytest.mark.parametrize("ranks", DEGREES)
@pytest.mark.parametrize("rows", HYBRIDS, ids=" ".join)
def test_hybrids(worlds: dict[int, World], rows: tuple[str, ...], ranks: int) -> None:
    config, tokens = tiny(4), some_tokens()
    weights = draw(config)
    expected = oracle.logits(config, weights, tokens, rows, ranks)
    assert_close(ours(worlds[ranks], wired(config, rows), weights, tokens), expected)


def test_the_comparison_can_fail() -> None:
    """Wirings, hybrids and degrees really differ, by far more than the tolerance, and logits are of magnitude one."""
    config, tokens = tiny(4), some_tokens()
    weights = draw(config)
    all_rows = [(name,) * 4 for name in WIRINGS if name != "ladder-0-1"] + list(HYBRIDS)
    logits = {rows: oracle.logits(config, weights, tokens, rows, ranks=4) for rows in all_rows}
    for one, other in combinations(all_rows, 2):
        assert (logits[one] - logits[other]).abs().max() > 1000 * TOLERANCE, f"{one} and {other} are too close"
    for rows, of_four in logits.items():
        assert 0.3 < of_four.std() < 3
        by_degree = (oracle.logits(config, weights, tokens, rows, ranks=2) - of_four).abs().max()
        if any(name.startswith(("desync", "none")) for name in rows):
            assert by_degree > 1000 * TOLERANCE, f"{rows} does not depend on the degree"
        else:
            assert by_degree <= forward(6, 32, 9, torch.float64)


def test_parallel_is_ladder_0_1(worlds: dict[int, World]) -> None:
    """Both let the MLP read what the attention read; the one sends a sum per layer, the other two."""
    config, tokens = tiny(4), some_tokens()
    weights = draw(config)
    one, other = (ours(worlds[4], config.rewired(name), weights, tokens) for name in ("parallel", "ladder-0-1"))
    assert_close(one, other)


@pytest.mark.parametrize("name", SAME_AT_EVERY_DEGREE)
def test_the_same_function_at_every_degree(worlds: dict[int, World], name: str) -> None:
    config, tokens = tiny(4).rewired(name), some_tokens()
    weights = draw(config)
    alone = answer(config, weights, tokens)
    for world in worlds.values():
        assert_close(ours(world, config, weights, tokens), alone)


def test_desync_depends_on_the_degree(worlds: dict[int, World]) -> None:
    config, tokens = tiny(4).rewired("desync-2x"), some_tokens()
    weights = draw(config)
    two, four = (ours(worlds[ranks], config, weights, tokens) for ranks in (2, 4))
    assert (two - four).abs().max() > 1000 * TOLERANCE


@pytest.mark.parametrize("ranks", (1, 2, 4))
@pytest.mark.parametrize("name", FAMILIES)
def test_families(worlds: dict[int, World], name: str, ranks: int) -> None:
    config, tokens = tiny(4, **FAMILIES[name]), some_tokens(length=8)
    weights = draw(config)
    expected = oracle.logits(config, weights, tokens, ("ladder",) * 4, ranks)
    assert_close(ours(worlds[ranks], config.rewired("ladder"), weights, tokens), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_differ_from_the_plain_one(name: str) -> None:
    """Each habit moves the oracle's logits; else the test above would not notice its absence."""
    config, plain, tokens = tiny(4, **FAMILIES[name]), tiny(4), some_tokens(length=8)
    with_it, without = (oracle.logits(c, draw(c), tokens, ("ladder",) * 4, ranks=1) for c in (config, plain))
    assert (with_it - without).abs().max() > 1000 * TOLERANCE


@pytest.mark.parametrize("ranks", (1, 2, 4))
@pytest.mark.parametrize("name", WIRINGS)
def test_cached_decoding(worlds: dict[int, World], name: str, ranks: int) -> None:
    """A ragged first pass, then two tokens at once, then one by one: as without a cache, and as the oracle says."""
    config = tiny(4, windows=(None, 3, None, 2)).rewired(name)
    weights, tokens, first = draw(config), some_tokens(batch=3, length=9, seed=3), [5, 1, 4]

    def decode(comm: Comm) -> tuple[Tensor, list[list[Tensor]]]:
        model = decoder(config, weights, comm)
        cache = model.new_cache(slots=3, capacity=12)
        for stale in cache.keys + cache.values:
            stale.fill_(7.0)  # what lies beyond a line's length may be anything
        start = some_tokens(batch=3, length=5, seed=4)  # any ids at the right of the shorter lines
        for line, length in enumerate(first):
            start[line, :length] = tokens[line, :length]
        last = torch.tensor(first) - 1
        answers = [list(joined(model, model(start, cache, last)))]
        cache.advance(first)
        for count in (2, 1, 1):
            piece = torch.stack([tokens[line, n : n + count] for line, n in enumerate(cache.lengths)])
            answers.append(list(joined(model, model(piece, cache))))
            cache.advance([count] * 3)
        return joined(model, model(tokens)), answers

    expected = oracle.logits(config, weights, tokens, (name,) * 4, ranks)
    for plain, answers in worlds[ranks].run(decode):
        assert_close(plain, expected)
        for line, length in enumerate(first):
            cached = torch.cat([answer[line] for answer in answers])
            assert_close(cached, plain[line, length - 1 : length + 4])


def test_random_weights_are_the_same_at_every_degree(worlds: dict[int, World]) -> None:
    config = tiny(4, qkv_bias=True, o_bias=True, mlp_bias=True).rewired("ladder")
    tokens, source = some_tokens(), Random(5, DEVIATION)

    def drawn(comm: Comm) -> Tensor:
        model = load(Decoder(config, comm), source)
        return joined(model, model(tokens))

    expected = oracle.logits(config, draw(config, 5), tokens, ("ladder",) * 4, ranks=1)
    for world in worlds.values():
        assert_close(world.run(drawn)[0], expected)


lags = st.integers(0, 4)
rows_of_the_table = st.one_of(
    st.sampled_from(WIRINGS),
    st.builds("ladder-{}".format, lags),
    st.builds("ladder-{}-{}".format, lags, lags),
    st.builds("parallel-{}".format, lags),
    st.builds("desync-{}x".format, st.integers(1, 7)),
    st.builds("desync-{}x-{}".format, st.integers(1, 7), lags),
    st.builds("desync-{}x-{}-local".format, st.integers(1, 7), lags),
)
# few different rows, so that runs of several layers are common
patterns = st.lists(rows_of_the_table, min_size=1, max_size=3).flatmap(
    lambda pool: st.lists(st.sampled_from(pool), min_size=1, max_size=6)
)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    rows=patterns,
    ranks=st.sampled_from(DEGREES),
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 3),
    length=st.integers(1, 7),
)
def test_any_pattern(worlds: dict[int, World], rows: list[str], ranks: int, seed: int, batch: int, length: int) -> None:
    config, tokens = tiny(len(rows)), some_tokens(batch, length, seed)
    weights = draw(config, seed)
    expected = oracle.logits(config, weights, tokens, rows, ranks)
    assert_close(ours(worlds[ranks], wired(config, tuple(rows)), weights, tokens), expected)
