"""Attention of several prompts in one launch against a naive computation in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ladder.checkpoint import Random, load
from ladder.config import ModelConfig
from ladder.engine.forward import Forward
from ladder.jit import PRESENT
from ladder.kernels import launch
from ladder.kernels.attention.attend_prompts import attend_prompts, tokens_of_tile
from ladder.kernels.launch import Kernels, References
from ladder.kernels.table import SHARED, Table
from ladder.layers.attention import Attention
from ladder.layers.cache import BLOCK, FP8, Metadata, PrefillMetadata, places
from ladder.model import Decoder
from tests.test_kernels import DEVICE, SEEDS, Draw, assert_close, exact, poisoned, some_attention

pytestmark = pytest.mark.skipif(not PRESENT, reason="Triton is not installed")
CAPACITY = 400


@pytest.fixture(params=(torch.float32, torch.bfloat16) if DEVICE.type == "cuda" else (torch.float32,), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


def some_prompts(
    draw: Draw, prompts: list[tuple[int, int]], decoded: int, windows: tuple[int | None, ...]
) -> PrefillMetadata:
    """Of pieces that start anywhere, each of a slot of its own; the first rows are decoded."""
    slots = torch.randperm(len(prompts) + decoded, generator=draw._generator)
    counts = torch.tensor([1] * decoded + [count for _, count in prompts])
    positions = torch.cat([torch.tensor([5] * decoded), *(torch.arange(s, s + c) for s, c in prompts)]).long()
    width = -(-CAPACITY // BLOCK)
    tables = torch.randperm(len(slots) * width, generator=draw._generator).view(-1, width).int()
    angles = torch.zeros(2, len(positions), 1)
    given = (slots.repeat_interleave(counts), positions, angles, angles, tables)
    every = Metadata(*(x.to(DEVICE) for x in given), CAPACITY)
    return PrefillMetadata(**vars(every), prompts=tuple(prompts), windows=windows, newest=every.first(decoded))


def naive(turned: Tensor, block: Attention, metadata: PrefillMetadata, keys: Tensor, values: Tensor) -> Tensor:
    """One row after the other, [rows that are not decoded, heads * d]."""
    found, first = [], metadata.decoded
    slots, positions = metadata.slots[first:].tolist(), metadata.positions[first:].tolist()
    for row, slot, position in zip(turned[first:].cpu(), slots, positions, strict=True):
        first = 0 if block.window is None else max(0, position + 1 - block.window)
        seen = torch.arange(first, position + 1)
        at = places(metadata.tables.cpu(), torch.full_like(seen, slot), seen)
        k, v = (x.cpu()[at].double().repeat_interleave(block.heads // block.kv_heads, dim=1) for x in (keys, values))
        scores = torch.einsum("hd,thd->ht", row[: block.heads].double(), k) * block.scale
        scores = scores if block.cap is None else block.cap * torch.tanh(scores / block.cap)
        found.append(torch.einsum("ht,thd->hd", torch.softmax(scores, dim=-1), v).flatten())
    return torch.stack(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_several_prompts(seed: int, dtype: torch.dtype) -> None:
    """Pieces with and without history, of one token and of many, a window, a cap, any group, rows that are decoded."""
    draw = Draw(seed, dtype)
    kv_heads, group, d = draw.pick(1, 2), draw.pick(1, 3, 8), draw.pick(16, 20, 64)
    block = some_attention(draw, kv_heads, group, d)
    prompts = [(draw.pick(0, 0, 1, 63, 64, 150), draw.pick(1, 2, 17, 64, 130)) for _ in range(draw.pick(1, 2, 4))]
    metadata = some_prompts(draw, prompts, draw.pick(0, 2), (block.window,))
    lines = metadata.tables.numel() * BLOCK
    keys, values = draw(lines, kv_heads, d), draw(lines, kv_heads, d)
    turned = draw(len(metadata.slots), block.heads + 2 * kv_heads, d)
    with poisoned():
        found = attend_prompts(turned, block, metadata, keys, values, draw.pick(SHARED, 60_000))[metadata.decoded :]
    assert_close(found, naive(turned, block, metadata, keys, values).to(DEVICE), dtype)


def test_the_library_agrees() -> None:
    """What `over_pieces` computes of the same rows, whose keys and values are in the cache."""
    draw = Draw(3, torch.float32)
    prompts = [(0, 40), (0, 40), (17, 1), (90, 33)]
    block = some_attention(draw, 2, 3, 16)
    metadata = some_prompts(draw, prompts, 2, (block.window,))
    lines = metadata.tables.numel() * BLOCK
    keys, values = draw(lines, 2, 16), draw(lines, 2, 16)
    turned = draw(len(metadata.slots), block.heads + 4, 16)
    at = places(metadata.tables, metadata.slots, metadata.positions)
    keys[at], values[at] = turned[:, block.heads : block.heads + 2], turned[:, block.heads + 2 :]
    found = attend_prompts(turned, block, metadata, keys, values, SHARED)
    by_tiles = replace(metadata, prompts=(), made={16: torch.cat([metadata.tiles(16), torch.zeros(3, 2).to(at)])})
    for each in (metadata, by_tiles):
        expected = References().attend_prompts(exact(turned), block, each, keys.double(), values.double())
        assert_close(found[metadata.decoded :], expected[metadata.decoded :], torch.float32)


def test_tiles_of_no_tokens() -> None:
    """They fill up the number of tiles: all others have the same bits, and no row is written twice."""
    draw = Draw(4, torch.float32)
    block = some_attention(draw, 2, 3, 16)
    metadata = some_prompts(draw, [(0, 40), (70, 33)], 2, (block.window,))
    lines = metadata.tables.numel() * BLOCK
    keys, values = draw(lines, 2, 16), draw(lines, 2, 16)
    turned = draw(len(metadata.slots), block.heads + 4, 16)
    found = attend_prompts(turned, block, metadata, keys, values, SHARED)
    (tokens,) = metadata.made
    assert tokens == tokens_of_tile(block.heads, block.kv_heads, 16, 4)
    more = torch.cat([metadata.made[tokens], torch.zeros(5, 2).to(metadata.made[tokens])])
    with poisoned():
        again = attend_prompts(turned, block, replace(metadata, made={tokens: more}), keys, values, SHARED)
    assert torch.equal(found[2:], again[2:]) and again[:2].isnan().all()


def test_tiles() -> None:
    draw = Draw(0, torch.float32)
    metadata = some_prompts(draw, [(0, 5), (100, 9)], 3, (None,))
    assert metadata.tiles(4).tolist() == [[16, 1], [12, 4], [8, 4], [7, 1], [3, 4]]
    assert metadata.tiles(4) is metadata.tiles(4) and len(metadata.tiles(16)) == 2


@pytest.mark.parametrize(
    ("prompts", "window", "cap", "ours"),
    (
        ([(0, 30)], None, None, False),
        ([(0, 30)], 30, None, False),
        ([(0, 30)], 29, None, True),
        ([(0, 30)], None, 2.0, True),
        ([(1, 30)], None, None, True),
        ([(0, 30), (0, 30)], None, None, True),
    ),
)
def test_when_the_library_has_a_kernel(
    monkeypatch: pytest.MonkeyPatch, prompts: list[tuple[int, int]], window: int | None, cap: float | None, ours: bool
) -> None:
    draw = Draw(0, torch.float32)
    block = some_attention(draw, 1, 2, 16)
    block.window, block.cap = window, cap
    metadata = some_prompts(draw, prompts, 1, (window,))
    asked: list[Attention] = []
    monkeypatch.setattr(launch, "attend_prompts", lambda *given: asked.append(given[1]))
    monkeypatch.setattr(Attention, "over_pieces", lambda *given: torch.zeros(30, 32))
    rows = len(metadata.slots)
    Kernels(Table("a chip"), False).attend_prompts(draw(rows, 4, 16), block, metadata, draw(9, 1, 16), draw(9, 1, 16))
    assert bool(asked) is ours


@pytest.mark.parametrize("cache", (torch.float32, FP8), ids=("float32", "fp8"))
def test_a_pass_of_several_prompts(cache: torch.dtype) -> None:
    """Two prompts and a row that is decoded, then the rest of one: as by the references."""
    config = replace(ModelConfig.named("tiny").first(2).rewired("ladder"), context=CAPACITY)
    model = load(Decoder(config, device=DEVICE), Random(5, 0.15))
    found = []
    for each in (References(), Kernels(Table("a chip"), False)):
        passes = Forward(model, model.new_cache(3, CAPACITY, dtype=cache), each)
        if isinstance(each, Kernels):  # the matrix products are not in question
            each.norm, each.norm_project, each.project = (  # type: ignore[method-assign]
                References.norm, References().norm_project, References().project,
            )  # fmt: skip
        logits = []
        for counts, slots in (([20], [1]), ([1, 18, 35], [1, 0, 2]), ([17, 9], [0, 2])):
            ids = torch.arange(7, 7 + sum(counts), device=DEVICE) % config.vocab
            decoded = int(counts[0] == 1)
            last = torch.arange(sum(counts), device=DEVICE)
            with torch.inference_mode():
                logits.append(passes.prefill(ids, counts, slots, last, decoded))
            passes.cache.advance(counts, slots)
        found.append(torch.cat(logits))
    assert (found[0] - found[1]).abs().max() < 1e-4 * found[0].abs().max()
