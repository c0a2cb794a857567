"""Every kernel against its reference in float64: random shapes and inputs, outputs poisoned.

On a GPU the kernels are compiled and launched as in the product; without one they run in Triton's interpreter.
"""

import copy
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ladder.comm.base import RankOnly, Solo
from ladder.config import ModelConfig, Rope
from ladder.jit import PRESENT
from ladder.kernels import launch
from ladder.kernels.activation import activate_rows
from ladder.kernels.attention.attend import Scratch, attend, attend_reference
from ladder.kernels.attention.rotary import rotate_write, rotate_write_reference
from ladder.kernels.embed import embed, embed_reference
from ladder.kernels.gemv import beside_all_reduces, gemv, projected
from ladder.kernels.launch import Kernels, References
from ladder.kernels.norm import add_norm, add_norm_reference
from ladder.kernels.sampling.argmax import argmax, argmax_reference
from ladder.kernels.small_gemm import small_gemm
from ladder.kernels.stream import Source
from ladder.kernels.table import SHARED, Gemv, SmallGemm, Split, Table
from ladder.layers.activation import activate
from ladder.layers.attention import Attention
from ladder.layers.cache import BLOCK, Metadata
from ladder.layers.embedding import Embedding
from ladder.layers.formats import Dense
from ladder.layers.norm import Norm
from ladder.layers.rope import RopeTable

pytestmark = pytest.mark.skipif(not PRESENT, reason="Triton is not installed")

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
PDL = GPU and torch.cuda.get_device_capability() >= (9, 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if GPU else (torch.float32,)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # relative, in norm
SEEDS = range(12 if GPU else 4)


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that a kernel asks for is full of NaN."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


class Draw:
    """Random tensors and choices of one seed."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self._generator) * scale).to(self.dtype).to(DEVICE)

    def pick(self, *choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=self._generator))]


def exact(value: Any) -> Any:
    """The same in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value.clone()
    if isinstance(value, Source):
        return Source(exact(value.base), tuple(map(exact, value.sums)), drifts=tuple(map(exact, value.drifts)))
    if isinstance(value, Metadata):
        return replace(value, cos=exact(value.cos), sin=exact(value.sin))
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).double()
    return type(value)(map(exact, value)) if isinstance(value, tuple) else value


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == expected.shape
    distance = ((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()
    assert distance <= TOLERANCE[dtype], f"{distance:.1e} apart"  # also refuses NaN


def some_source(draw: Draw, rows: int, width: int) -> Source:
    sums = tuple(draw(rows, width) for _ in range(draw.pick(0, 1, 2)))
    flags = tuple(torch.full((1,), 3, dtype=torch.int32, device=DEVICE) for _ in sums) if PDL else ()
    return Source(draw(rows, width), sums, flags, 3, tuple(draw(rows, width) for _ in range(draw.pick(0, 1, 2))))


ACTIVATIONS = (None, "silu", "gelu", "gelu_pytorch_tanh", "relu")


def filled(draw: Draw, module: Any, scale: float = 1.0) -> Any:
    """A module of one of the layers with random parameters."""
    for parameter in module.to(DEVICE).parameters():
        parameter.data = draw(*parameter.shape, scale=scale if parameter.dim() > 1 else 1.0)
    return module


def some_norm(draw: Draw, width: int) -> Norm:
    """Root-mean-square, with an offset, or centered with a bias."""
    config = ModelConfig(16, 1, 2, 2, 16, 16, family=draw.pick("llama", "gemma2", "gpt2"))
    norm: Norm = filled(draw, Norm("norm", width, config, draw.dtype))
    return norm


def some_weight(draw: Draw, outputs: int, width: int) -> Dense:
    weight: Dense = filled(draw, Dense(outputs, width, draw.pick(False, True), draw.dtype, ()), width**-0.5)
    return weight


@pytest.mark.parametrize("seed", SEEDS)
def test_gemv(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    width, outputs = draw.pick(16, 96, 512, 1000), draw.pick(16, 50, 136)
    activation = draw.pick(*ACTIVATIONS)
    pair = activation is not None and draw.pick(False, True)
    source, norm = some_source(draw, 1, width), draw.pick(None, some_norm(draw, width))
    weight = some_weight(draw, outputs * (1 + pair), width)
    plus, divisor, alpha = draw.pick(None, draw(1, outputs)), draw.pick(1, 4), draw.pick(1.0, 0.3)
    config = Gemv(draw.pick(1, 2, 8), draw.pick(4, 8), draw.pick(3, 256), draw.pick(2, 4))
    out = torch.full((1, outputs), float("nan"), dtype=dtype, device=DEVICE)
    with poisoned():
        agreed = gemv(
            source, norm, weight.weight, weight.bias, activation, pair, plus, divisor, alpha, out, config, PDL, 132
        )  # fmt: skip
    x, expected_agreed = add_norm_reference(exact(source), exact(norm))
    assert_close(out, projected(x, exact(weight), activation, pair, exact(plus), divisor, alpha), dtype)
    assert_close(agreed, expected_agreed, dtype)


@pytest.mark.parametrize("seed", SEEDS)
def test_small_gemm(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    rows, width, outputs = draw.pick(2, 3, 16, 33, 64), draw.pick(64, 256, 320), draw.pick(16, 50, 136)
    splits = draw.pick(1, 2)
    activation = None if splits > 1 else draw.pick(*ACTIVATIONS)
    pair = activation is not None and draw.pick(False, True)
    x, weight = draw(rows, width), some_weight(draw, outputs * (1 + pair), width)
    plus = draw(rows, outputs) if splits == 1 and draw.pick(False, True) else None
    divisor, alpha = draw.pick(1, 4), draw.pick(1.0, 0.3)
    config = SmallGemm(draw.pick(32, 64), draw.pick(16, 32), splits, draw.pick(2, 3), 4, draw.pick(0, 16, 32))
    out = torch.full(
        (splits, rows, outputs), float("nan"), dtype=dtype if splits == 1 else torch.float32, device=DEVICE
    )
    small_gemm(x, weight.weight, weight.bias, activation, pair, plus, divisor, alpha, out, config, PDL)
    expected = projected(exact(x), exact(weight), activation, pair, exact(plus), divisor, alpha)
    assert_close(out.double().sum(0), expected, dtype)


@pytest.mark.parametrize("seed", SEEDS)
def test_add_norm(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    rows, width = draw.pick(1, 7, 80), draw.pick(16, 96, 1000)
    source, norm = some_source(draw, rows, width), draw.pick(None, some_norm(draw, width), some_norm(draw, width))
    with poisoned():
        found = add_norm(source, norm, PDL)
    for one, other in zip(found, add_norm_reference(exact(source), exact(norm)), strict=True):
        assert_close(one, other, dtype)


def some_metadata(draw: Draw, rows: int, slots: int, capacity: int, d: int, distinct: bool) -> Metadata:
    picked = (
        torch.randperm(slots, generator=draw._generator)[:rows] if distinct else torch.zeros(rows, dtype=torch.long)
    )
    positions = torch.randint(capacity, (rows,), generator=draw._generator) if distinct else torch.arange(rows)
    angle = torch.rand(2, rows, d // 2, generator=draw._generator) * 6
    width = -(-capacity // BLOCK)  # the blocks of the slots in any order
    tables = torch.randperm(slots * width, generator=draw._generator).view(slots, width).int()
    return Metadata(*(x.to(DEVICE) for x in (picked, positions, angle.cos(), angle.sin(), tables)), capacity)


def some_attention(draw: Draw, kv_heads: int, group: int, d: int) -> Attention:
    """With or without norms by head, an offset in them, a window, a cap on scores; the second of two ropes."""
    family, window, cap = draw.pick("llama", "qwen3", "gemma3_text"), draw.pick(None, 1, 17), draw.pick(None, 2.0)
    heads, rest = kv_heads * group, {"windows": (window,), "attention_softcap": cap, "head_dim": d}
    config = ModelConfig(heads * d, 1, heads, kv_heads, 16, 16, family=family, **rest)
    block: Attention = filled(draw, Attention(config, 0, 1, Solo(), draw.dtype))
    return block


@pytest.mark.parametrize("seed", SEEDS)
def test_attend(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    batch, kv_heads, group, d = draw.pick(1, 3), draw.pick(1, 2), draw.pick(1, 3, 8), draw.pick(16, 20, 64)
    capacity, block = draw.pick(5, 70, 200), some_attention(draw, kv_heads, group, d)
    metadata = some_metadata(draw, batch, 4, capacity, d, distinct=True)
    lines = metadata.tables.numel() * BLOCK
    keys, values = draw(lines, kv_heads, d), draw(lines, kv_heads, d)
    qkv = draw(draw.pick(1, 3), batch, (block.heads + 2 * kv_heads) * d)
    config = Split(draw.pick(1, 2, 4), draw.pick(16, 32), 4, draw.pick(3, 5), draw.pick(0, 1))
    expected_keys, expected_values = exact(keys), exact(values)
    expected = attend_reference(exact(qkv), exact(block), exact(metadata), expected_keys, expected_values)
    scratch = Scratch.of(batch, block.heads, d, config.splits, DEVICE)
    for _ in range(2):  # the second finds what the first has left in the scratch
        with poisoned():
            found = attend(qkv, block, metadata, keys, values, config, scratch, PDL)
        assert_close(found, expected, dtype)
        assert_close(keys, expected_keys, dtype)
        assert_close(values, expected_values, dtype)


def test_attention_has_one_configuration_for_short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up with short prompts compiles what longer ones need."""
    found: list[Split] = []
    monkeypatch.setattr(launch, "attend", lambda *given: found.append(given[5]))
    draw = Draw(0, torch.float32)
    block, metadata = some_attention(draw, 2, 1, 16), some_metadata(draw, 3, 4, 70, 16, distinct=True)
    kernels, keys = Kernels(Table("a chip"), False), draw(70, 2, 16)
    for reach in (17, 700, 2048, 2049, 8192):
        kernels.attend(draw(1, 3, 4 * 2 * 16), block, replace(metadata, reach=reach), keys, keys)
    assert found[0] == found[1] == found[2] and found[3] == found[4]


@pytest.mark.parametrize("seed", SEEDS)
def test_rotate_write(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    rows, kv_heads, group, d = draw.pick(1, 9), draw.pick(1, 2), draw.pick(1, 3), draw.pick(16, 20)
    block, metadata = some_attention(draw, kv_heads, group, d), some_metadata(draw, rows, 2, 12, d, distinct=False)
    lines = metadata.tables.numel() * BLOCK
    keys, values = draw(lines, kv_heads, d), draw(lines, kv_heads, d)
    qkv = draw(rows, (block.heads + 2 * kv_heads) * d)
    expected_keys, expected_values = exact(keys), exact(values)
    expected = rotate_write_reference(exact(qkv), exact(block), exact(metadata), expected_keys, expected_values)
    with poisoned():
        found = rotate_write(qkv, block, metadata, keys, values)
    assert_close(found, expected, dtype)
    assert_close(keys, expected_keys, dtype)
    assert_close(values, expected_values, dtype)


@pytest.mark.parametrize("seed", SEEDS)
def test_activate(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    pair, activation = draw.pick(False, True), draw.pick(*ACTIVATIONS[1:])
    x = draw(draw.pick(1, 5), (1 + pair) * draw.pick(7, 1024, 1500))
    with poisoned():
        found = activate_rows(x, activation, pair)
    assert_close(found, activate(exact(x), activation, pair), dtype)


@pytest.mark.parametrize("family", ("llama", "gemma3_text", "gpt2", "smollm3"))
@pytest.mark.parametrize("seed", SEEDS)
def test_embed(seed: int, family: str, dtype: torch.dtype) -> None:
    """Scaled, with learned positions, with several ropes; the tokens of three ranks."""
    draw = Draw(seed, dtype)
    batch, hidden, d = draw.pick(1, 5), draw.pick(16, 100), draw.pick(4, 20)
    ropes = {"local_rope": Rope(100.0), "windows": (3, None)} if family == "gemma3_text" else {}
    config = ModelConfig(hidden, 2, 1, 1, 16, 33, family, d, 90, no_rope=(1,) * (family == "smollm3"), **ropes)
    embedding = filled(draw, Embedding(config, RankOnly(draw.pick(0, 1, 2), 3), dtype))
    table = RopeTable(config, DEVICE)
    tokens = torch.randint(33, (batch,), generator=draw._generator).to(DEVICE)
    positions = torch.randint(100, (batch,), generator=draw._generator).to(DEVICE)
    flags = torch.full((draw.pick(1, 9),), 7, dtype=torch.int32, device=DEVICE)
    found, expected = (
        Metadata(
            positions,
            positions,
            *(torch.full((len(table.frequencies), batch, d // 2), nan) for _ in range(2)),
            torch.zeros(1, 1, dtype=torch.int32),
            1,
        )
        for nan in (float("nan"), 0.0)
    )
    found, expected = (replace(each, cos=each.cos.to(DEVICE), sin=each.sin.to(DEVICE)) for each in (found, expected))
    with poisoned():
        x = embed(embedding, tokens, found, table, flags)
    assert not flags.any()
    assert torch.equal(x, embed_reference(embedding, tokens, expected, table, flags))
    for one, other in ((found.cos, expected.cos), (found.sin, expected.sin)):
        assert (one - other).abs().max() <= 100 * 2**-23  # angles up to 100 radians, rounded to float32


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", ("plain", "ties", "nan", "infinite", "empty"))
def test_argmax(case: str, seed: int) -> None:
    draw = Draw(seed, torch.float32)
    step, count = 5000, draw.pick(1, 2048, 4097, 5000)
    logits = draw(3, step)
    logits[:, count:] = 1e9  # what lies beyond the vocabulary is not looked at
    if case == "ties":
        logits = logits.round()
    elif case == "nan":
        logits[1, count // 2] = float("nan")
    elif case == "infinite":
        logits[:, :count] = float("-inf")
    elif case == "empty":
        count = 0
    with poisoned():
        found = argmax(logits, 100, count, PDL)
    torch.testing.assert_close(found[:, 0], argmax_reference(logits, 100, count)[:, 0], rtol=0, atol=0, equal_nan=True)
    sane = found[:, 0].isfinite()
    assert torch.equal(found[sane, 1], argmax_reference(logits, 100, count)[sane, 1])


@pytest.mark.parametrize("rows", (1, 2, 5, 64, 65))
def test_every_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    """As the forward pass asks for them, configurations chosen by rule."""
    draw = Draw(rows, dtype)
    kernels, references = Kernels(Table("any"), PDL, cores=132), References()
    source, norm = some_source(draw, rows, 64), some_norm(draw, 64)
    for kernel, outputs, activation in (("qkv", 96, None), ("gate_up", 160, "silu"), ("head", 77, None)):
        weight, pair = some_weight(draw, outputs, 64), activation is not None
        with poisoned():
            y, agreed = kernels.norm_project(source, norm, weight, kernel, activation, pair)
        expected, expected_agreed = references.norm_project(
            exact(source), exact(norm), exact(weight), kernel, activation, pair
        )
        assert_close(y.double().sum(0), expected[0], dtype)
        assert_close(agreed, expected_agreed, dtype)
    x, weight, plus = draw(rows, 160), some_weight(draw, 64, 160), draw(rows, 64)
    with poisoned():
        y = kernels.project(x, weight, plus, 4, 0.5)
    assert_close(y, references.project(exact(x), exact(weight), exact(plus), 4, 0.5), dtype)


def test_a_kernel_that_waits_leaves_room_for_the_all_reduce() -> None:
    for programs, warps, stages, tile, cores in product(
        (3, 128, 256, 1000), (4, 8, 16), (2, 3), (1 << 14, 1 << 15, 1 << 16), (108, 132)
    ):
        config = Gemv(1, warps, programs, stages)
        fitted, registers = beside_all_reduces(config, tile, cores, 0)
        each = -(-fitted // cores)  # on the fullest multiprocessor
        assert 1 <= fitted <= programs and fitted < each * cores
        assert each * registers * warps * 32 <= 65536 * 7 // 8 and each * tile * (stages - 1) <= SHARED
        # beside a library's all-reduce: fewer than would touch every multiprocessor
        assert 1 <= beside_all_reduces(config, tile, cores, 8)[0] <= min(programs, cores - 8)


def test_the_comparison_can_fail(dtype: torch.dtype) -> None:
    draw = Draw(0, dtype)
    source, norm = some_source(draw, 2, 64), some_norm(draw, 64)
    found, _ = add_norm(source, norm, PDL)
    spoil: list[Callable[[Tensor], Tensor]] = [lambda x: x * 1.05, lambda x: x.flip(-1), lambda x: x * float("nan")]
    for how in spoil:
        with pytest.raises(AssertionError):
            assert_close(how(found), add_norm_reference(exact(source), exact(norm))[0], dtype)


COMPILED = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from ladder.kernels.gemv import _gemv
from ladder.kernels.quantized.gemv import quantized_gemv
from ladder.kernels.quantized.small_gemm import quantized_small_gemm
from ladder.kernels.small_gemm import fitting
from ladder.kernels.table import Shape, rule

def built(kernel, fixed, kinds, warps=4):
    return compiled(kernel, fixed, kinds, warps).asm

def compiled(kernel, fixed, kinds, warps, capability=90):
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "*bf16") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    aligned = {(n,): [["tt.divisibility", 16]] for n, kind in enumerate(signature.values()) if kind.startswith("*")}
    return compile(ASTSource(kernel, signature, values, aligned), target=GPUTarget("cuda", capability, 32),
                   options={"num_warps": warps, "launch_pdl": capability >= 90})

def groups(plus, kind):
    kernel = _gemv if kind == "bf16" else quantized_gemv
    fixed = {"K": 1024, "BN": 8, "TILES": 4, "SUMS": 0, "FLAGS": 0, "DRIFTS": 0, "NORM": 0, "PAIR": 0}
    fixed |= {"OFFSET": 0, "ACT": 0, "ALPHA": 0, "BIAS": 0, "PLUS": plus, "STAGES": 4, "PDL": True}
    if kernel is _gemv:
        fixed |= {"BK": 1024, "TP": 4}
    elif kind == "i32":
        fixed |= {"BITS": 4, "WIDTH": 128, "DEEP": 1, "LANES": 32, "SHARE": 4, "STEP": 4, "DIGITS": 2}
    else:
        fixed |= {"BITS": 8, "WIDTH": 1024, "DEEP": 2, "LANES": 32, "SHARE": 8, "STEP": 8, "DIGITS": 0}
    if kernel is quantized_gemv:
        fixed |= {"ZEROS": False, "ASM": True, "WHOLE": True, "FOURS": True}
    kinds = {"flag1": "*i32", "flag2": "*i32", "need": "i32", "N": "i32", "GROUPS": "i32", "zeros": "*u8"}
    kinds |= {"eps": "fp32", "scale": "fp32", "alpha": "fp32", "weight": "*" + kind}
    made = built(kernel, fixed, kinds)
    text = made["ptx"]
    assert "griddepcontrol.wait" in text and ("dp4a" in text) == (kind == "i32")
    if kind == "i32":  # a thread has whole chunks, and those of a warp's threads follow each other
        assert "sizePerThread = [1, 1, 1, 4], threadsPerWarp = [1, 1, 32, 1]" in made["ttgir"]
    return len(re.findall("cp.async.commit_group", text))

for kind in ("bf16", "fp8e4nv", "i32"):
    without, with_plus = groups(0, kind), groups(1, kind)
    assert without == with_plus > 1, (kind, without, with_plus)

for bits, group, floating in ((4, 128, False), (8, 0, True)):
    fixed = {"K": 1024, "MB": 16, "BN": 64, "BK": 128, "SPLITS": 1, "PAIR": False, "ACT": 0, "BIAS": False}
    fixed |= {"PLUS": False, "ALPHA": False, "STAGES": 4, "IEEE": False, "PDL": True, "ZEROS": False, "ASM": True}
    fixed |= {"BITS": bits, "GROUP": group, "FP8": floating, "SLICES": 4, "RUN": 16}
    kinds = {"weight": "*i8", "zeros": "*u8", "M": "i32", "N": "i32", "scale": "fp32", "alpha": "fp32"}
    made = built(quantized_small_gemm, fixed, kinds)
    # numbers are made from bytes by the threads that multiply them
    assert "warpsPerCTA = [4, 1, 1]" in made["ttgir"] and "mma" in made["ptx"] and "cp.async" in made["ptx"], bits
    (loop,) = [part for part in made["ttgir"].split("scf.for")[1:] if "tt.dot " in part]
    loop = loop.split("scf.yield")[0]
    assert "ttg.convert_layout" not in loop and "ttg.local_store" not in loop, bits

# what the compiler needs of shared memory is what `fitting` says
for bits, group, rows, kind, capability, bytes in (
    (4, 128, 4, "*bf16", 89, 101376), (4, 0, 64, "*bf16", 89, 101376), (4, 128, 4, "*fp32", 90, 232448),
    (8, 0, 64, "*fp32", 90, 232448), (8, 128, 16, "*fp32", 89, 101376),
):
    config = rule(Shape("row", rows, 4096, 4096, bits=bits, group=group))
    block, depth, stages = fitting(config, bits, group, rows, 2 if kind == "*bf16" else 4, bytes - 8192)
    fixed = {"K": 4096, "MB": block, "BN": config.rows, "BK": depth, "SPLITS": 1, "PAIR": False, "ACT": 0}
    fixed |= {"BIAS": False, "PLUS": False, "ALPHA": False, "STAGES": stages, "IEEE": kind == "*fp32", "PDL": False}
    fixed |= {"ZEROS": False, "ASM": True, "BITS": bits, "GROUP": group, "FP8": bits == 8, "SLICES": config.warps}
    kinds = {name: kind for name in ("x", "bias", "plus", "out")} | {"weight": "*i8", "scales": "*fp32"}
    kinds |= {"zeros": "*u8", "M": "i32", "N": "i32", "scale": "fp32", "alpha": "fp32"}
    made = compiled(quantized_small_gemm, {**fixed, "RUN": 16}, kinds, config.warps, capability)
    assert made.metadata.shared <= bytes, (bits, group, rows, kind, capability, made.metadata.shared)

# where a thread is said to have four neighbouring inputs it has
for inputs, bits, warps in ((1024, 8, 8), (2048, 4, 4), (4096, 4, 8), (14336, 4, 8), (2048, 8, 16)):
    chunks = inputs * bits // 128
    padded = 1 << (chunks - 1).bit_length()
    deep = max(1, min(2, padded // 32))
    fixed = {"K": inputs, "BN": 8, "TILES": 4, "SUMS": 0, "FLAGS": 0, "DRIFTS": 0, "NORM": 0, "PAIR": 0, "OFFSET": 0}
    fixed |= {"ACT": 0, "ALPHA": 0, "BIAS": 0, "PLUS": 0, "STAGES": 3, "PDL": True, "BITS": bits, "FOURS": True}
    fixed |= {"WIDTH": inputs * bits // 32, "DEEP": deep, "LANES": padded // deep, "SHARE": 0, "STEP": 4, "DIGITS": 2}
    fixed |= {"ZEROS": False, "ASM": True, "WHOLE": True}
    kinds = {"flag1": "*i32", "flag2": "*i32", "need": "i32", "N": "i32", "GROUPS": "i32", "zeros": "*u8"}
    kinds |= {"eps": "fp32", "scale": "fp32", "alpha": "fp32", "weight": "*i32"}
    assert 4 * padded >= 32 * warps
    text = built(quantized_gemv, fixed, kinds, warps)["ttgir"]
    lines = [line for line in text.splitlines() if "elementwise_inline_asm" in line and "0x5140" in line]
    assert lines
    for line in lines:
        (name,) = set(re.findall(r"x4xi32, (#\\w+)>", line))
        (layout,) = [each for each in text.splitlines() if each.startswith(name + " =")]
        alone = re.search(r"register = \\[\\[0, 0, 0, 1\\], \\[0, 0, 0, 2\\]", layout)
        assert alone or re.search(r"sizePerThread = \\[\\d+, \\d+, \\d+, 4\\]", layout), (inputs, bits, layout)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="Triton brings no compiler here")
def test_compiled_for_a_gpu() -> None:
    """`plus`, which others write, takes no part in the pipeline of the weight, whose loads are made before the wait;
    and codes do not change threads.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
