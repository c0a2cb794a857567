"""The KV cache in fp8: kernels against their references, the engine against the oracle; memory, and what is refused.

Keys and values that lie close to the middle of two fp8 numbers may be rounded either way, depending on float32's own
rounding errors. The oracle refuses texts that have any, and others are tried. Where many tokens are compared, the
model is in float64, whose errors are too small for that.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder import LLM, SamplingParams
from ladder.checkpoint import Random, load, save
from ladder.comm.base import Comm, Solo
from ladder.comm.emulated import World
from ladder.config import ModelConfig
from ladder.engine.memory import cache_blocks
from ladder.engine.model_runner import AddSequence, ModelRunner
from ladder.engine.options import EngineOptions
from ladder.engine.sampling import Chosen
from ladder.engine.scheduler import ScheduledBatch
from ladder.engine.setup import Setup
from ladder.errors import LadderError
from ladder.jit import PRESENT
from ladder.kernels.attention.attend import Scratch, attend, attend_reference
from ladder.kernels.attention.rotary import rotate_write, rotate_write_reference
from ladder.kernels.launch import References
from ladder.kernels.table import Split
from ladder.layers.attention import Attention
from ladder.layers.cache import BLOCK, FP8, RESERVED, KVCache, Metadata, read, write
from ladder.model import Decoder
from tests import oracle, test_kernels, test_parity_families, test_seeds
from tests.checkpoints import tiny as tiny_checkpoint
from tests.test_fused import PROMPT, InTurns, forward_logits, interpreter
from tests.test_kernels import DEVICE, DTYPES, PDL, SEEDS, Draw, exact, filled, some_metadata
from tests.test_parity import FAMILIES, TOLERANCE, some_tokens
from tests.test_parity import assert_close as assert_logits_close
from tests.tolerance import apart
from tests.weights import Given, decoder, draw, joined, tiny

kernels = pytest.mark.skipif(not PRESENT, reason="Triton is not installed")


# Kernels. Rotations by quarter turns are exact, so kernels and references store the same numbers.


def quarter_turns(metadata: Metadata, draw: Draw) -> Metadata:
    turns = torch.randint(4, metadata.cos.shape, generator=draw._generator).to(DEVICE)
    return replace(metadata, cos=(1 - turns).float() * (turns % 2 == 0), sin=(2 - turns).float() * (turns % 2 == 1))


def plain_attention(draw: Draw, kv_heads: int, group: int, d: int) -> Attention:
    window, cap, heads = draw.pick(None, 17), draw.pick(None, 2.0), kv_heads * group
    config = ModelConfig(heads * d, 1, heads, kv_heads, 16, 16, windows=(window,), attention_softcap=cap, head_dim=d)
    block: Attention = filled(draw, Attention(config, 0, 1, Solo(), draw.dtype))
    return block


def some_table(draw: Draw, lines: int, kv_heads: int, d: int) -> Tensor:
    return draw(lines, kv_heads, d).to(FP8)


def same_numbers(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.float(), other.float())  # a zero may have either sign


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_attend(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    batch, kv_heads, group, d = draw.pick(1, 3), draw.pick(1, 2), draw.pick(1, 3, 8), draw.pick(16, 20, 64)
    capacity, block = draw.pick(1, 70, 200), plain_attention(draw, kv_heads, group, d)
    metadata = quarter_turns(some_metadata(draw, batch, 4, capacity, d, distinct=True), draw)
    lines = metadata.tables.numel() * BLOCK
    keys, values = some_table(draw, lines, kv_heads, d), some_table(draw, lines, kv_heads, d)
    qkv = draw(1, batch, (block.heads + 2 * kv_heads) * d)
    qkv[..., -kv_heads * d :] *= 200  # values beyond the range of fp8
    qkv = torch.cat([qkv, *[torch.zeros_like(qkv)] * draw.pick(0, 2)])
    config = Split(draw.pick(1, 2, 4), draw.pick(16, 32), 4, draw.pick(3, 5), draw.pick(0, 1))
    expected_keys, expected_values = keys.clone(), values.clone()
    expected = attend_reference(exact(qkv), exact(block), exact(metadata), expected_keys, expected_values)
    assert not same_numbers(values, expected_values)
    for _ in range(2):
        scratch = Scratch.of(batch, block.heads, d, config.splits, DEVICE)
        found = attend(qkv, block, metadata, keys, values, config, scratch, PDL)
        assert found.dtype is dtype
        test_kernels.assert_close(found, expected, dtype)
        assert same_numbers(keys, expected_keys) and same_numbers(values, expected_values)


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_rotate_write(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    rows, kv_heads, group, d = draw.pick(1, 9), draw.pick(1, 2), draw.pick(1, 3), draw.pick(16, 20)
    block = plain_attention(draw, kv_heads, group, d)
    metadata = quarter_turns(some_metadata(draw, rows, 2, 12, d, distinct=False), draw)
    lines = metadata.tables.numel() * BLOCK
    keys, values = some_table(draw, lines, kv_heads, d), some_table(draw, lines, kv_heads, d)
    # from far below the smallest number of fp8 to far beyond its largest
    exponents = torch.randint(-14, 14, (rows, (block.heads + 2 * kv_heads) * d), generator=draw._generator).to(DEVICE)
    qkv = (draw(*exponents.shape).float() * 2.0**exponents).to(dtype)
    expected_keys, expected_values = keys.clone(), values.clone()
    expected = rotate_write_reference(exact(qkv), exact(block), exact(metadata), expected_keys, expected_values)
    found = rotate_write(qkv, block, metadata, keys, values)
    assert torch.equal(found.double(), expected)
    assert same_numbers(keys, expected_keys) and same_numbers(values, expected_values)


@kernels
def test_a_kernel_rounds_to_the_nearest_and_even() -> None:
    """All numbers of fp8, the middles between two of them, and what lies just below and above those."""
    numbers = torch.tensor(oracle.E4M3)
    below, above = numbers[:-1], numbers[1:]
    middles = (below + above) / 2
    even = torch.where(torch.arange(len(middles)) % 2 == 0, below, above)
    x = torch.cat([numbers, middles, middles * (1 - 2**-20), middles * (1 + 2**-20), torch.tensor([460.0, 480.0, 1e9])])
    expected = torch.cat([numbers, even, below, above, torch.full((3,), 448.0)])
    d = 2 * len(x)  # one key and one value have all of them
    x, expected = torch.cat([x, -x]).to(DEVICE), torch.cat([expected, -expected]).to(DEVICE)
    config = ModelConfig(d, 1, 1, 1, 16, 16, head_dim=d)
    block = Attention(config, 0, 0, Solo(), torch.float32)
    zero = torch.zeros(1, dtype=torch.long, device=DEVICE)
    cos, sin = torch.ones(1, 1, d // 2, device=DEVICE), torch.zeros(1, 1, d // 2, device=DEVICE)
    metadata = Metadata(zero, zero, cos, sin, zero.int().unsqueeze(0), 1)
    for write_rows in (rotate_write, rotate_write_reference):
        keys, values = torch.zeros(2, BLOCK, 1, d, device=DEVICE).to(FP8)
        q, k, v = write_rows(x.repeat(1, 3), block, metadata, keys, values)[0]
        assert torch.equal(q, x)
        for found in (k, v, keys[0, 0].float(), values[0, 0].float()):
            wrong = (found != expected).nonzero().flatten()
            assert not len(wrong), (wrong, found[wrong], expected[wrong])


def test_numbers_beyond_the_range() -> None:
    table, at = torch.zeros(4, 1, 2).to(FP8), torch.tensor([2, 0])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.tensor([[[-1e4, 449.0]], [[math.inf, 0.3]]], dtype=dtype)
        told = write(table, at, x)
        assert told.dtype is dtype and torch.equal(told, read(table, at, dtype))
        assert told.flatten().tolist() == [-448.0, 448.0, 448.0, 0.3125]
    assert write(table, at, torch.full((2, 1, 2), math.nan)).isnan().all()  # a request that is not finite is to end


# The decoder and the engine against the oracle.


def clear_text(
    config: ModelConfig, weights: dict[str, Tensor], size: int, batch: int, length: int
) -> tuple[Tensor, Tensor]:
    """A text that the oracle does not refuse, and its logits."""
    for seed in range(400):
        tokens = torch.randint(config.vocab, (batch, length), generator=torch.Generator().manual_seed(seed))
        with suppress(AssertionError):
            return tokens, oracle.logits(config, weights, tokens, config.wiring.layers, size, fp8_cache=True)
    raise AssertionError("no text is clear of roundings")


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_of_any_length(worlds: dict[int, World], name: str, ranks: int) -> None:
    config = tiny(4, **FAMILIES[name]).rewired("ladder")
    weights = draw(config)
    tokens, expected = clear_text(config, weights, ranks, 1, 8)
    plain = oracle.logits(config, weights, tokens, config.wiring.layers, ranks)
    assert (plain - expected).abs().max() > 100 * TOLERANCE  # fp8 can be seen

    def pieces(comm: Comm, lengths: tuple[int, ...]) -> Tensor:
        model, found = decoder(config, weights, comm), []
        cache = model.new_cache(1, 16, dtype=FP8)
        for part in tokens.split(lengths, dim=1):
            found.append(joined(model, model(part, cache)))
            cache.advance([part.shape[1]])
        return torch.cat(found, dim=1)

    for lengths in ((8,), (3, 5), (5, 1, 1, 1), (1,) * 8):
        for found in worlds[ranks].run(lambda comm, lengths=lengths: pieces(comm, lengths)):
            assert_logits_close(found, expected)


@pytest.mark.parametrize("name", test_parity_families.FAMILIES)
def test_backends_of_every_family(worlds: dict[int, World], name: str) -> None:
    """Prefill and decode by references of the kernels at TP 2."""
    config, weights, _ = test_parity_families.model(name)
    config = config.rewired("ladder")
    tokens, expected = clear_text(config, weights, 2, 1, PROMPT + 2)
    for found in worlds[2].run(lambda comm: forward_logits(config, weights, tokens, References(), comm, FP8)):
        assert apart(found, expected[:, PROMPT - 1 :]) <= test_parity_families.tolerance(config)


@interpreter
@pytest.mark.parametrize("changes", ({}, FAMILIES["qk_norm"]), ids=("llama", "qwen3"))
def test_kernels_together(worlds: dict[int, World], changes: dict[str, Any]) -> None:
    config = tiny(1, **changes).rewired("ladder")
    weights = draw(config)
    tokens, expected = clear_text(config, weights, 2, 2, PROMPT + 1)
    for found in worlds[2].run(lambda comm: forward_logits(config, weights, tokens, InTurns(), comm, FP8)):
        assert_logits_close(found, expected[:, PROMPT - 1 :])


def greedy(config: ModelConfig, weights: dict[str, Tensor], prompt: list[int], count: int) -> list[int]:
    """The oracle's likeliest tokens, none of them close to a second."""
    text = list(prompt)
    for _ in range(count):
        logits = oracle.logits(config, weights, torch.tensor([text]), config.wiring.layers, 1, fp8_cache=True)[0, -1]
        best = logits.topk(2)
        assert best.values[0] - best.values[1] > 100 * TOLERANCE
        text.append(int(best.indices[0]))
    return text[len(prompt) :]


@pytest.fixture(scope="module")
def texts() -> tuple[ModelConfig, dict[str, Tensor], list[list[int]], list[list[int]]]:
    """A model, prompts, and how the oracle goes on."""
    config = replace(tiny(2, context=64).rewired("ladder"), eos=())
    weights = draw(config)
    prompts: list[list[int]] = []
    expected: list[list[int]] = []
    for seed in range(400):
        prompt = some_tokens(1, 6, seed)[0].tolist()
        with suppress(AssertionError):
            expected.append(greedy(config, weights, prompt, 5))
            prompts.append(prompt)
        if len(prompts) == 3:
            return config, weights, prompts, expected
    raise AssertionError("no text is clear of roundings")


@pytest.mark.parametrize("tp", (1, 2))
def test_the_engine(texts: Any, tmp_path: Path, tp: int) -> None:
    config, weights, prompts, expected = texts
    save(load(Decoder(config, dtype=torch.float32), Given(weights)), tmp_path)
    for chunk in (512, 4):
        with LLM(tmp_path, dtype="float32", cache_dtype="fp8", tp=tp, prefill_chunk=chunk) as llm:
            found = llm.generate(prompts, SamplingParams(5))
        assert [result.token_ids for result in found] == expected


def run(comm: Comm, order: list[int], **rest: Any) -> tuple[dict[int, list[int]], int]:
    return test_seeds.run(comm, order, dtype=torch.float64, cache_dtype=FP8, **rest)


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    return {id: run(Solo(), [id])[0][id] for id in range(5)}


def test_what_was_computed_before_changes_nothing(alone: dict[int, list[int]]) -> None:
    """Chunks of prompts, batches, preemptions; and fp8 is not what the model's own dtype gives."""
    assert test_seeds.run(Solo(), [0, 1, 2, 3, 4], dtype=torch.float64)[0] != alone
    for chunk in (7, 16, 100):
        assert run(Solo(), [4, 2, 0, 3, 1], chunk=chunk)[0] == alone
    found, preemptions = run(Solo(), [0, 1, 4], blocks=10)
    assert preemptions > 0 and found == {id: alone[id] for id in (0, 1, 4)}


def test_after_a_shared_beginning(monkeypatch: pytest.MonkeyPatch, alone: dict[int, list[int]]) -> None:
    runner = ModelRunner(load(Decoder(test_seeds.CONFIG, dtype=torch.float64), Random(5, 0.15)), 4, 64, cache_dtype=FP8)
    compute, starts = runner._passes.compute, list[int]()

    def recorded(work: ScheduledBatch) -> Chosen:
        starts.append(work.starts[0])
        return compute(work)

    monkeypatch.setattr(runner._passes, "compute", recorded)
    for spec, shared in zip(test_seeds.specs([2, 3]), (0, 3 * BLOCK), strict=True):
        starts.clear()
        runner.apply([AddSequence(spec)])
        found: list[int | None] = []
        while runner.busy:
            found += [token.token for token in runner.step()]
        assert starts[0] == shared and found == alone[spec.id]


def test_ranks(worlds: dict[int, World], alone: dict[int, list[int]]) -> None:
    for found, _ in worlds[2].run(lambda comm: run(comm, [0, 1, 2, 3, 4])):
        assert found == alone


def test_large_keys_and_values() -> None:
    """Beyond 448 they saturate, and the logits are finite; blocks that are erased are fit for others."""
    config = tiny(2)
    weights = {name: x * (1e4 if "k_proj" in name or "v_proj" in name else 1) for name, x in draw(config).items()}
    model = decoder(config, weights)
    cache = model.new_cache(1, 32, dtype=FP8)
    with torch.inference_mode():
        assert model(some_tokens(1, 8), cache).isfinite().all()
    for table in (*cache.keys, *cache.values):
        assert table[:8].float().abs().max() == 448
        table.copy_(torch.full(table.shape, math.nan))
    cache.erase([1])
    for table in (*cache.keys, *cache.values):
        assert not table[BLOCK:].float().any() and table[:BLOCK].float().isnan().all()


# Memory, options.


def test_twice_the_tokens() -> None:
    config = replace(ModelConfig.named("tiny"), dtype="bfloat16", context=1 << 20)
    block = KVCache.block_bytes(config, 2, torch.bfloat16)
    found = {
        dtype: cache_blocks(
            EngineOptions(memory=100 * block / 1e9, cache_dtype=dtype), config, _Two(), torch.device("cpu")
        )
        for dtype in ("auto", "fp8")
    }
    assert found == {"auto": 100, "fp8": 200}
    cache = KVCache(config, 2, 1, 64, torch.device("cpu"), FP8, blocks=200)
    assert sum(table.nbytes for table in (*cache.keys, *cache.values)) == 100 * block


class _Two(Solo):
    """A rank that another is like."""

    size = 2


def test_a_small_cache(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, tokenizer=False)
    block = KVCache.block_bytes(ModelConfig.from_directory(tmp_path), 1, torch.float32)
    with LLM(tmp_path, dtype="float32", cache_dtype="fp8", memory=(RESERVED + 1.5) * block / 1e9) as llm:
        room = 4 * (RESERVED + 1) + 2 - RESERVED  # blocks of a quarter of the size
        with pytest.raises(LadderError, match=f"room for {room * BLOCK}"):
            llm.generate([[1] * (room * BLOCK)], SamplingParams(1))


@pytest.mark.parametrize("options, message", [
    ({"cache_dtype": "int8"}, "unknown cache_dtype 'int8': known are auto, fp8"),
    ({"cache_dtype": "fp8", "dtype": "float64"}, "cache_dtype fp8 is not for float64 models"),
])  # fmt: skip
def test_refuses(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    tiny_checkpoint(tmp_path, tokenizer=False, layers=1)
    with pytest.raises(LadderError, match=message):
        LLM(tmp_path, **options)


@pytest.mark.parametrize(
    "capability, kernels, refused", (((8, 0), True, True), ((8, 0), False, False), ((8, 9), True, False))
)
def test_older_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int], kernels: bool, refused: bool
) -> None:
    tiny_checkpoint(tmp_path, tokenizer=False, layers=1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    options = EngineOptions(tmp_path, device="cuda", cache_dtype="fp8", kernels=kernels)
    if refused:
        with pytest.raises(LadderError, match=r"cache_dtype fp8 needs a GPU of compute capability 8\.9 or newer"):
            Setup(options, tokenizer=False)
    else:
        Setup(options, tokenizer=False)


def test_the_command_line(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, tokenizer=False)
    arguments = ["--model", tmp_path, "--token-ids", "5,17,9", "--max-new-tokens", 12]
    plain, fp8 = (run("generate", *arguments, "--cache-dtype", dtype) for dtype in ("auto", "fp8"))
    with LLM(tmp_path, cache_dtype="fp8") as llm:
        expected = llm.generate([[5, 17, 9]], SamplingParams(12))[0].token_ids
    assert fp8[0] == 0 and fp8[1].split() == list(map(str, expected)) and plain[0] == 0 and plain[1] != fp8[1]
