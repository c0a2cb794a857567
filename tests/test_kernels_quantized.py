"""Matrix kernels over quantized weights against torch's products of the dequantized ones, in float64."""

import inspect
import re
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.bench.model import fill
from ladder.config import ModelConfig
from ladder.config.quantization import Storage, named_format
from ladder.engine.forward import Forward
from ladder.jit import PRESENT
from ladder.kernels.gemv import gemv, projected
from ladder.kernels.launch import Kernels, References
from ladder.kernels.norm import add_norm_reference
from ladder.kernels.quantized import integers, operand
from ladder.kernels.quantized.dequantize import dequantize
from ladder.kernels.small_gemm import fitting, small_gemm
from ladder.kernels.stream import Source
from ladder.kernels.table import SHARED, Gemv, Shape, SmallGemm, Table, candidates, rule, sound
from ladder.layers.formats import Dense
from ladder.layers.quantized import Quantized
from ladder.model import Decoder
from tests.test_fused import InTurns, few_programs, interpreter
from tests.test_kernels import (
    ACTIVATIONS,
    DEVICE,
    PDL,
    SEEDS,
    Draw,
    assert_close,
    dtype,
    exact,
    poisoned,
    some_norm,
    some_source,
)

__all__ = ["dtype", "few_programs"]
pytestmark = pytest.mark.skipif(not PRESENT, reason="Triton is not installed")

FORMATS = [
    Storage("fp8", "compressed", 0, 1),
    Storage("fp8", "compressed", 0, 0),
    Storage("fp8", "fp8", 128, 128),
    Storage("int8", "compressed", 0, 1),
    Storage("int4", "compressed", 0, 1),
    Storage("int4", "compressed", 32, 1),
    Storage("int4", "compressed", 64, 1),
    Storage("int4", "compressed", 128, 1),
    Storage("int4", "awq", 64, 1, True),
    Storage("int4", "awq", 128, 1, True),
    Storage("int4", "compressed", 0, 1, True),
]
formats = pytest.mark.parametrize("storage", FORMATS, ids=lambda each: f"{each.kind}-{each.group}-{each.zero}")


def some_quantized(draw: Draw, storage: Storage, outputs: int, inputs: int) -> Quantized:
    """Random codes, scales, zeros and bias."""
    weight = Quantized(storage, outputs, inputs, draw.pick(False, True), draw.dtype, ())
    values = draw(*weight.codes.shape).float().cpu()
    if storage.kind == "fp8":
        weight.codes.data = (values * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    else:
        low, high = (-128, 128) if storage.kind == "int8" else (0, 256)
        codes = torch.randint(low, high, weight.codes.shape, generator=draw._generator)
        weight.codes.data = codes.to(weight.codes.dtype)
    size = {"fp8": 100.0, "int8": 74.0, "int4": 4.6}[storage.kind] * inputs**0.5  # about one for a product
    scales = torch.rand(weight.scales.shape, generator=draw._generator) + 0.5
    weight.scales.data = (scales / size).to(weight.scales.dtype)
    if weight.zeros is not None:
        weight.zeros.data = torch.randint(0, 16, weight.zeros.shape, generator=draw._generator).to(torch.uint8)
    if weight.bias is not None:
        weight.bias.data = draw(outputs)
    return weight.to(DEVICE)


def exactly(weight: Quantized) -> Dense:
    """What it means, in float64."""
    found = Dense(weight.outputs, weight.inputs, weight.bias is not None, torch.float64, ())
    weight.dtype = torch.float64
    found.weight.data = weight.dequantized()
    if weight.bias is not None and found.bias is not None:
        found.bias.data = weight.bias.data.double()
    return found


def some_product(draw: Draw, splits: int = 1) -> tuple[Any, bool, int, float]:
    activation = None if splits > 1 else draw.pick(*ACTIVATIONS)
    return activation, activation is not None and draw.pick(False, True), draw.pick(1, 4), draw.pick(1.0, 0.3)


@formats
@pytest.mark.parametrize("seed", SEEDS[: 2 if torch.cuda.is_available() else 1])
def test_gemv(storage: Storage, seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    unit = storage.group or 32
    width, outputs = unit * draw.pick(1, 3, 5), draw.pick(16, 50)
    activation, pair, divisor, alpha = some_product(draw)
    source, norm = some_source(draw, 1, width), draw.pick(None, some_norm(draw, width))
    weight = some_quantized(draw, storage, outputs * (1 + pair), width)
    plus = draw.pick(None, draw(1, outputs))
    config = Gemv(draw.pick(1, 2, 8), draw.pick(4, 8), draw.pick(3, 256), draw.pick(2, 4))
    out = torch.full((1, outputs), float("nan"), dtype=dtype, device=DEVICE)
    packed = weight.packed
    assert packed is not None
    with poisoned():
        agreed = gemv(source, norm, packed, weight.bias, activation, pair, plus, divisor, alpha, out, config, PDL, 132)
    x, expected_agreed = add_norm_reference(exact(source), exact(norm))
    assert_close(out, projected(x, exactly(weight), activation, pair, exact(plus), divisor, alpha), dtype)
    assert_close(agreed, expected_agreed, dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter has no instructions of a GPU")
@formats
@pytest.mark.parametrize("pair", (False, True))
@pytest.mark.parametrize("outputs, width", ((1536, 4096), (4096, 14336), (1280, 8192), (2048, 1024), (1030, 3584)))
def test_gemv_as_configured_for_real_sizes(storage: Storage, pair: bool, outputs: int, width: int) -> None:
    draw = Draw(outputs, torch.bfloat16)
    x, weight = draw(1, width), some_quantized(draw, storage, outputs * (1 + pair), width)
    config = rule(Shape("gate_up" if pair else "row", 1, outputs, width, pair, bits=4 if storage.kind == "int4" else 8,
                        group=storage.group))  # fmt: skip
    assert isinstance(config, Gemv) and weight.packed is not None
    out = torch.full((1, outputs), float("nan"), dtype=x.dtype, device=DEVICE)
    with poisoned():
        gemv(
            Source(x), None, weight.packed, weight.bias, "silu" if pair else None, pair, None, 1, 1.0, out, config, PDL
        )
    expected = projected(exact(x), exactly(weight), "silu" if pair else None, pair, None, 1, 1.0)
    assert_close(out, expected, torch.bfloat16)


def test_rows_that_are_no_whole_words_are_the_library_s() -> None:
    """Kernels read codes in words of four bytes."""
    draw, kernels = Draw(0, torch.float32), Kernels(Table("a chip"), False)
    for inputs, ours in ((64, True), (66, False)):
        weight = some_quantized(draw, Storage("int8", "compressed", 0, 1), 16, inputs)
        assert (kernels._config("row", 1, weight, False) is not None) is ours


INTEGERS = [storage for storage in FORMATS if storage.kind != "fp8"]


def one_row(weight: Quantized, x: Tensor) -> Tensor:
    out = torch.full((1, weight.outputs), float("nan"), dtype=x.dtype, device=DEVICE)
    packed = weight.packed
    assert packed is not None
    gemv(Source(x), None, packed, None, None, False, None, 1, 1.0, out, Gemv(2, 4, 256, 2), PDL)
    return out


@pytest.mark.parametrize("storage", INTEGERS, ids=lambda each: f"{each.kind}-{each.group}-{each.zero}")
def test_two_digits(monkeypatch: pytest.MonkeyPatch, storage: Storage) -> None:
    """What a row of bfloat16 becomes: numbers are off by half a step of their group, however large another group's."""
    monkeypatch.setattr("ladder.kernels.quantized.gemv.digits", lambda dtype: 2)
    draw = Draw(5, torch.float32)
    weight, x = some_quantized(draw, storage, 32, 512), draw(1, 512)
    weight.bias = None
    x[0, 3] = 1000.0  # those beside it are rounded to its steps
    dense = exactly(weight).weight.data
    group = storage.group or 128
    step = x.double().view(-1, group).abs().amax(1).repeat_interleave(group) / 32639
    bound = dense.abs() @ (step / 2)
    error = (one_row(weight, x)[0].double() - dense @ x[0].double()).abs()
    assert bool((error <= bound + 1e-5 * dense.norm(dim=1)).all()) and bool((error > 0.001 * bound).any())
    assert bound.max() < 0.02 * (dense @ x[0].double()).abs().mean()


@pytest.mark.parametrize("wrong", (float("nan"), float("inf"), float("-inf")))
@pytest.mark.parametrize("kind", ("int8", "int4"))
def test_what_is_not_finite_stays_so(kind: str, wrong: float) -> None:
    """Digits are always finite numbers."""
    draw = Draw(1, torch.float32)
    weight, x = some_quantized(draw, Storage(kind, "compressed", 0, 1), 16, 256), draw(1, 256)
    assert bool(one_row(weight, x).isfinite().all())
    x[0, 77] = wrong
    assert not bool(one_row(weight, x).isfinite().any())


def test_a_row_of_zeros() -> None:
    weight = some_quantized(Draw(1, torch.float32), Storage("int4", "compressed", 64, 1), 16, 256)
    weight.bias = None
    assert one_row(weight, torch.zeros(1, 256, device=DEVICE)).abs().max() == 0


def executed(instructions: str, registers: dict[str, int]) -> dict[str, int]:
    """The registers afterwards: enough of PTX for our kernels."""

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    def signed(word: int, byte: int) -> int:
        return ((word >> 8 * byte & 255) ^ 128) - 128

    def halves(word: int) -> Tensor:
        return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.uint16).view(torch.bfloat16).double()

    for line in filter(None, map(str.strip, instructions.split(";"))):
        if line.startswith("."):
            continue
        operation, operands = line.split(maxsplit=1)
        to, *names = (name.strip() for name in re.split(r",(?![^{]*})", operands))
        of = [value(name) for name in names]
        match operation:
            case "mov.b32":
                found = of[0]
            case "and.b32":
                found = of[0] & of[1]
            case "or.b32":
                found = of[0] | of[1]
            case "shr.b32":
                found = of[0] >> of[1]
            case "shl.b32":
                found = of[0] << of[1]
            case "xor.b32":
                found = of[0] ^ of[1]
            case "add.s32":
                found = of[0] + of[1]
            case "prmt.b32":
                both = of[0] | of[1] << 32
                found = sum((both >> 8 * (of[2] >> 4 * byte & 7) & 255) << 8 * byte for byte in range(4))
            case "fma.rn.bf16x2":
                one, other, more = map(halves, of)
                low, high = (one * other + more).bfloat16().view(torch.uint16).tolist()
                found = low | high << 16
            case "dp4a.s32.s32":
                found = sum(signed(of[0], byte) * signed(of[1], byte) for byte in range(4)) + of[2]
            case _:
                raise NotImplementedError(operation)
        if to.startswith("{"):  # a pair of registers of 16 bits
            one_half, other_half = to.strip("{}").split(",")
            registers[one_half.strip()], registers[other_half.strip()] = found & 0xFFFF, found >> 16
        else:
            registers[to] = found & 0xFFFFFFFF
    return registers


def instructions_of(module: ModuleType) -> list[str]:
    return re.findall(r'"""{(.*?) }"""', inspect.getsource(module), re.DOTALL)


def test_the_instructions_for_two_digits() -> None:
    """They are given four numbers of float32, whose lowest bits have the digits."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(20):
        numbers = torch.randint(-32639, 32640, (4,), generator=draw)
        given = (numbers.float() + 12583040.0).view(torch.int32).tolist()
        registers = executed(instructions_of(integers)[0], {f"${8 + n}": bits for n, bits in enumerate(given)})
        digits = torch.tensor([registers["$0"], registers["$4"]])[:, None] >> 8 * torch.arange(4) & 255
        low, high = (digits ^ 128) - 128
        assert torch.equal(low + 256 * high, numbers)
        assert not any(registers[f"${n}"] for n in (1, 2, 3, 5, 6, 7))


@pytest.mark.parametrize("bits", (4, 8))
def test_the_instructions_for_a_chunk_add_up(bits: int) -> None:
    """They are given the four words of codes, then those of the first digits, the second, the high halves' first..."""
    instructions = instructions_of(integers)[1 if bits == 4 else 2]
    draw = torch.Generator().manual_seed(bits)
    for _ in range(20):
        codes = torch.randint(0, 256, (16,), generator=draw)
        numbers = torch.randint(-32639, 32640, (32 if bits == 4 else 16,), generator=draw)
        low = ((numbers & 255) ^ 128) - 128
        digits = torch.cat([each.view(-1, 16) for each in (low, numbers - low >> 8)], dim=1).view(-1, 2, 16)
        given = torch.cat((codes[None], digits.flatten(0, 1) & 255)).view(-1, 4, 4)
        words = (given << 8 * torch.arange(4)).sum(-1).flatten().tolist()
        registers = executed(instructions, {f"${4 + n}": word for n, word in enumerate(words)})
        found = (registers["$0"] ^ 0x80000000) - 0x80000000
        halves = torch.stack((codes & 15, codes >> 4)) if bits == 4 else ((codes ^ 128) - 128)[None]
        assert found == int((halves.flatten() * (low + 256 * digits[:, 1].flatten())).sum())


@pytest.mark.parametrize("kind", ("low", "high", "fp8", "int8"))
def test_the_instructions_for_an_operand(kind: str) -> None:
    """Every code, in every byte of a word; of 4 bits with every zero."""
    index = ("high", "low", "fp8", "int8").index(kind)
    instructions = instructions_of(operand)[index]
    for code, zero in product(range(256), range(16) if index < 2 else (0,)):
        word = code | (code ^ 255) << 8 | (code ^ 90) << 16 | (code ^ 165) << 24
        less = torch.tensor(-128.0 - zero).bfloat16().view(torch.uint16).item() * 0x10001
        registers = executed(instructions, {"$2": word, "$3": less, "$4": less})
        pairs = torch.tensor([registers[f"${n}"] >> half & 0xFFFF for n in range(2) for half in (0, 16)])
        found = pairs.to(torch.uint16).view(torch.bfloat16).double()
        stored = torch.tensor([word >> 8 * byte & 255 for byte in range(4)], dtype=torch.uint8)
        if index < 2:
            expected = (stored >> 4 if kind == "high" else stored & 15).double() - zero
        else:
            expected = stored.view(torch.float8_e4m3fn if kind == "fp8" else torch.int8).double()
        finite = expected.isfinite()
        assert torch.equal(found[finite], expected[finite]), (code, zero)


@formats
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_small_gemm(storage: Storage, seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    splits = draw.pick(1, 2)
    rows = draw.pick(2, 3, 16) if seed == SEEDS[0] else draw.pick(17, 33, 64)  # by either way
    width = (storage.group or 32) * splits * draw.pick(1, 2, 3)
    outputs = draw.pick(16, 50, 136)
    activation, pair, divisor, alpha = some_product(draw, splits)
    x, weight = draw(rows, width), some_quantized(draw, storage, outputs * (1 + pair), width)
    plus = draw(rows, outputs) if splits == 1 and draw.pick(False, True) else None
    config = SmallGemm(draw.pick(32, 64), draw.pick(32, 64), splits, draw.pick(2, 3), 4, 0)
    kind = dtype if splits == 1 else torch.float32
    out = torch.full((splits, rows, outputs), float("nan"), dtype=kind, device=DEVICE)
    packed = weight.packed
    assert packed is not None
    small_gemm(x, packed, weight.bias, activation, pair, plus, divisor, alpha, out, config, PDL)
    expected = projected(exact(x), exactly(weight), activation, pair, exact(plus), divisor, alpha)
    assert_close(out.double().sum(0), expected, dtype)


@pytest.mark.parametrize("rows", (1, 5, 40))
def test_a_last_group_that_is_not_whole(rows: int, dtype: torch.dtype) -> None:
    draw = Draw(rows, dtype)
    weight, x = some_quantized(draw, Storage("fp8", "fp8", 128, 128), 50, 320), draw(rows, 320)
    packed = weight.packed
    assert packed is not None and packed.scales.shape[1] == 3
    out = torch.full((1, rows, 50), float("nan"), dtype=dtype, device=DEVICE)
    if rows == 1:
        gemv(Source(x), None, packed, weight.bias, None, False, None, 1, 1.0, out[0], Gemv(2, 4, 256, 2), PDL)
    else:
        config = SmallGemm(32, 64, 1, 2, 4, 0)
        small_gemm(x, packed, weight.bias, None, False, None, 1, 1.0, out, config, PDL)
    assert_close(out[0], projected(exact(x), exactly(weight), None, False, None, 1, 1.0), dtype)


@formats
def test_dequantize(storage: Storage, dtype: torch.dtype) -> None:
    draw = Draw(0, dtype)
    weight = some_quantized(draw, storage, 50, (storage.group or 32) * 3)
    packed = weight.packed
    assert packed is not None
    with poisoned():
        found = dequantize(packed, dtype)
    assert torch.equal(found, weight.dequantized())


@pytest.mark.parametrize("group", (0, 128))
def test_chips_that_do_not_convert_fp8(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    """They are given its bits."""
    monkeypatch.setattr("ladder.kernels.quantized.codes.converts_fp8", lambda device: False)
    draw = Draw(3, torch.float32)
    weight = some_quantized(draw, Storage("fp8", "fp8" if group else "compressed", group, group or 1), 128, 256)
    weight.bias, packed = None, weight.packed
    assert packed is not None and torch.equal(dequantize(packed, torch.float32), weight.dequantized())
    x, dense = draw(1, 256), exactly(weight).weight.data
    out = torch.full((1, 128), float("nan"), device=DEVICE)
    gemv(Source(x), None, packed, None, None, False, None, 1, 1.0, out, Gemv(2, 4, 256, 2), PDL)
    assert_close(out, x.double() @ dense.mT, torch.float32)
    x, out = draw(3, 256), torch.full((1, 3, 128), float("nan"), device=DEVICE)
    small_gemm(x, packed, None, None, False, None, 1, 1.0, out, SmallGemm(32, 64, 1, 2, 4, 0), PDL)
    assert_close(out[0], x.double() @ dense.mT, torch.float32)


def test_codes_that_kernels_do_not_read() -> None:
    """Four bits of a number of inputs that has no whole runs are torch's."""
    weight = Quantized(Storage("int4", "compressed", 0, 1), 8, 48, False, torch.float32, ())
    assert weight.run == 1 and weight.packed is None


@pytest.mark.parametrize("group", (16, 96))
def test_groups_that_kernels_do_not_read(group: int) -> None:
    """Blocks of any size are read; tiles of kernels are powers of two, and of one group."""
    draw = Draw(group, torch.float32)
    weight, x = some_quantized(draw, Storage("fp8", "fp8", group, group), 50, 192), draw(3, 192)
    assert weight.packed is None
    y = Kernels(Table("a chip"), False).project(x, weight, None, 1, 1.0)
    assert_close(y, projected(exact(x), exactly(weight), None, False, None, 1, 1.0), torch.float32)
    alone = some_quantized(draw, Storage("fp8", "fp8", 256, group), 50, 192)
    assert alone.packed is not None and alone.packed.group == 192  # one for a row


@pytest.mark.parametrize("bits, group", ((8, 0), (8, 128), (4, 0), (4, 32), (4, 64), (4, 128)))
def test_the_rule_suits_every_format(bits: int, group: int) -> None:
    sizes = ((1280, 8192), (7168, 8192), (8192, 3584), (6144, 4096), (96, 128), (576, 576), (192, 192), (4096, 10944))
    if bits == 8:
        sizes += ((1368, 1368), (960, 3696))
    for kernel, batch, (outputs, inputs) in product(("qkv", "gate_up", "row", "head"), (1, 2, 16, 64, 128), sizes):
        shape = Shape(kernel, batch, outputs, inputs, kernel == "gate_up", bits=bits, group=group)
        config = rule(shape)
        assert sound(shape, config) and (config is None) == (batch > 64)
        if isinstance(config, SmallGemm):  # no tile has inputs of two groups, no split a part of one
            assert config.early == 0 and (not group or group % config.depth == 0)
            assert config.splits == 1 or inputs // config.splits % (group or config.depth) == 0
            assert len(candidates(shape)) > 20 and all(sound(shape, each) for each in candidates(shape))


@pytest.mark.parametrize("shared", (91 * 1024, SHARED))  # of an L40S, of an H200, each less some
@pytest.mark.parametrize("size", (2, 4))
def test_tiles_fit_into_shared_memory(size: int, shared: int) -> None:
    for bits, group, batch in product((4, 8), (0, 32, 128), (2, 8, 16, 33, 64)):
        shape = Shape("row", batch, 4096, 4096, bits=bits, group=group)
        for config in (rule(shape), *candidates(shape)):
            if isinstance(config, SmallGemm):
                block, depth, stages = fitting(config, bits, group, batch, size, shared)
                codes = config.warps * depth * bits // 8
                tile = codes * config.rows + config.warps * depth * block * size
                operands = codes * (config.rows + block) * size if size == 4 else 0
                assert (stages - 1) * tile + operands <= shared or (block, stages, depth) == (8, 2, 32)
                assert 2 <= stages <= config.stages and depth <= config.depth and 8 <= block <= 64


@interpreter
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("name", ("fp8", "int4-32"))
def test_a_prompt_and_a_decode_step(name: str, batch: int) -> None:
    """All kernels of both against torch's products of the same codes."""
    config = replace(ModelConfig(32, 1, 2, 1, 64, 20).rewired("ladder"), weights=named_format(name))
    torch.manual_seed(3)
    model = Decoder(config, dtype=torch.float32)
    fill(model)
    found = []
    for launch in (References(), InTurns()):
        forward = Forward(model, model.new_cache(batch, 16), launch)  # type: ignore[arg-type]
        prompts, rows = torch.tensor([3, 17] * batch), torch.arange(batch)
        read = forward.prefill(prompts, [2] * batch, list(range(batch)), 2 * rows + 1)
        found.append((read, forward.decode(torch.full((batch,), 5), rows, torch.full((batch,), 2))))
    for one, other in zip(*found, strict=True):
        assert_close(other, one.double(), torch.float32)
