"""Products of fp8 activations and fp8 weights: what rows become, both products against float64, and who takes them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ladder.bench.model import fill
from ladder.config import ModelConfig
from ladder.config.quantization import HEADS, Quantization, Storage
from ladder.devices import converts_fp8
from ladder.engine.forward import Forward
from ladder.jit import PRESENT
from ladder.kernels import library
from ladder.kernels.launch import Kernels, References
from ladder.kernels.library import library_product
from ladder.kernels.prefill import Prefill
from ladder.kernels.quantized.fp8 import fp8_product, quantize_rows, takes_fp8
from ladder.kernels.stream import Source
from ladder.kernels.table import MOST, Table
from ladder.layers.formats import new_weight
from ladder.layers.quantized import Quantized
from ladder.layers.shard import Piece
from ladder.layers.weight import Packed
from ladder.model import Decoder
from tests.test_fused import interpreter
from tests.test_kernels import DEVICE, GPU, PDL, Draw, assert_close, poisoned
from tests.test_kernels_quantized import exactly, some_quantized
from tests.tolerance import summed

pytestmark = [
    pytest.mark.skipif(not PRESENT, reason="Triton is not installed"),
    pytest.mark.skipif(not converts_fp8(DEVICE), reason="the GPU has no fp8"),
    pytest.mark.usefixtures("without_onednn"),
]
real = pytest.mark.skipif(not GPU, reason="real tensor cores and real sizes need a GPU")
# the interpreter cuts bfloat16 off where it should round
KIND = torch.bfloat16 if GPU else torch.float32
CHANNEL = Storage("fp8", "compressed", 0, 1, activations=True)
TENSOR = Storage("fp8", "compressed", 0, 0, activations=True)
BLOCK = Storage("fp8", "fp8", 128, 128, activations=True)
GROUPED = Storage("fp8", "compressed", 128, 1, activations=True)  # no outputs share a scale
STORAGES = (CHANNEL, TENSOR, BLOCK, GROUPED)
storages = pytest.mark.parametrize("storage", STORAGES, ids=("channel", "tensor", "block", "group"))
HALF = 2.0**-4  # of a number is the most that rounding to three bits of mantissa changes it by
SMALLEST = 2.0**-10  # the same of numbers below the smallest that has all bits, in numbers of fp8


def marked(draw: Draw, storage: Storage, outputs: int, inputs: int, bias: bool | None = None) -> Quantized:
    weight = some_quantized(draw, storage, outputs, inputs)
    weight.pieces = (Piece("all", (outputs, inputs), slice(0, outputs), slice(0, inputs), 0),)
    if storage.rows > 1:
        shared = torch.arange(outputs, device=DEVICE) // storage.rows * storage.rows
        weight.scales.data = weight.scales.data[shared]
    if bias is not None:
        weight.bias = torch.nn.Parameter(draw(outputs), requires_grad=False) if bias else None
    return weight


def emulated(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes, and scales [groups, rows]; computed on the CPU, which divides by numbers as it is told to."""
    wide = torch.nn.functional.pad(x.float().cpu(), (0, -x.shape[1] % group if group else 0))
    parts = wide.unflatten(1, (-1, group or wide.shape[1]))
    most = parts.abs().amax(2, keepdim=True).clamp_min(1e-30)
    each = torch.full_like(most, 448) / most  # a number divided by a tensor is two roundings in torch
    codes = (parts * each).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, : x.shape[1]].to(x.device), (most / 448).squeeze(2).t().to(x.device)


def meaning(x: Tensor, group: int) -> Tensor:
    """Rows as their codes have them, in float64."""
    codes, scales = quantize_rows(x, group)
    wide = scales.double().t().repeat_interleave(group or x.shape[1], dim=1)
    return codes.double() * wide[:, : x.shape[1]]


def group_of(storage: Storage, inputs: int) -> int:
    return storage.group if inputs > storage.group else 0


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("inputs, group", ((64, 0), (1000, 0), (128, 128), (384, 128), (2500, 128)))
def test_rows_as_torch_rounds_them(inputs: int, group: int, dtype: torch.dtype) -> None:
    draw = Draw(inputs, dtype)
    x = draw(5, inputs)
    x[1] *= torch.randint(-14, 2, (inputs,), generator=draw._generator).to(DEVICE).float().exp2().to(dtype)
    x[2] = 0
    x[3] *= 1e-4
    wide = torch.cat([x, x + 1], dim=1)[:, :inputs]  # rows that are not one behind the other
    codes, scales = emulated(x, group)
    for rows in (x, wide, x.t().contiguous().t()):
        with poisoned():
            found, found_scales = quantize_rows(rows, group)
        assert torch.equal(found.float(), codes.float()) and torch.equal(found_scales, scales)
        assert found.dtype is torch.float8_e4m3fn and found_scales.dtype is torch.float32
    parts = scales.t().repeat_interleave(group or inputs, dim=1)[:, :inputs]
    off = (meaning(x, group) - x.double()).abs()
    bound = torch.maximum(x.double().abs() * HALF, parts.double() * SMALLEST) * (1 + 2**-20)
    assert bool((off <= bound).all()) and float((off / bound.clamp_min(1e-30)).max()) > 0.9
    assert float(meaning(x, group)[2].abs().max()) == 0


@pytest.mark.parametrize("wrong", (float("nan"), float("inf"), float("-inf")))
@storages
def test_what_is_not_finite_stays_so(storage: Storage, wrong: float) -> None:
    """Its row is NaN, and no other."""
    draw = Draw(1, KIND)
    weight, x = marked(draw, storage, 32, 256, bias=False).packed, draw(70, 256)
    x[3, 200] = wrong
    assert weight is not None
    y = fp8_product(x, weight)
    assert bool(y[3].isnan().all()) and bool(y[:3].isfinite().all()) and bool(y[4:].isfinite().all())


# --- products -------------------------------------------------------------------------------------------------------


def check(storage: Storage, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Against the same codes in float64, and against the product of the rows as they are."""
    draw = Draw(rows + outputs, dtype)
    weight, x = marked(draw, storage, outputs, inputs, bias=False), draw(rows, inputs)
    packed, dense = weight.packed, exactly(weight).weight.data
    assert packed is not None
    with poisoned():
        y = fp8_product(x, packed)
    assert y.dtype is dtype
    assert_close(y, meaning(x, group_of(storage, inputs)) @ dense.t(), dtype)
    into = torch.full_like(y, float("nan"))
    assert fp8_product(x, packed, into) is into and torch.equal(into, y)
    exact = x.double() @ dense.t()
    scales = emulated(x, group_of(storage, inputs))[1].t().double()
    step = scales.repeat_interleave(group_of(storage, inputs) or inputs, dim=1)[:, :inputs] * SMALLEST
    size = x.double().abs() @ dense.abs().t()
    # the last: the result's own rounding, and that of its sum; that in a tensor core has 14 bits
    bound = torch.maximum(x.double().abs() * HALF, step) @ dense.abs().t()
    bound += size * (2.0**-8 + summed(inputs, torch.float32) + (2.0**-12 if GPU else 0))
    assert bool(((y.double() - exact).abs() <= bound).all())
    assert float((y.double() - exact).norm() / exact.norm()) > 0.01  # it is fp8 indeed


@storages
@pytest.mark.parametrize("rows, outputs, inputs", ((65, 48, 64), (130, 144, 256), (70, 16, 400)))
def test_products(storage: Storage, rows: int, outputs: int, inputs: int) -> None:
    """Ragged rows, outputs and groups; fewer rows than a tile, and more."""
    check(storage, rows, outputs, inputs, KIND)


@real
@storages
@pytest.mark.parametrize("rows", (65, 100, 128, 129, 1000, 2048))
@pytest.mark.parametrize("outputs, inputs", ((6144, 4096), (4096, 14336), (1280, 1040)))
def test_products_of_real_sizes(storage: Storage, rows: int, outputs: int, inputs: int) -> None:
    check(storage, rows, outputs, inputs, torch.bfloat16)


@real
@storages
def test_products_in_a_graph(storage: Storage) -> None:
    """Nothing is waited for; other rows give other results."""
    draw = Draw(7, torch.bfloat16)
    kernels, weight, x = Kernels.on(DEVICE), marked(draw, storage, 1024, 512, bias=True), draw(300, 512)
    assert kernels.fp8 and isinstance(kernels.library_matrix(x, weight), Packed)

    def product() -> Tensor:
        return kernels.project(x, weight, None, 1, 1.0)

    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        product()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = product()
        for _ in range(2):
            x.copy_(draw(300, 512))
            found.fill_(float("nan"))
            graph.replay()
            stream.synchronize()
            assert torch.equal(found, product())


# --- who takes them -------------------------------------------------------------------------------------------------


class Counted:
    """Calls of the product."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        monkeypatch.setattr(library, "fp8_product", self)

    def __call__(self, *given: Tensor) -> Tensor:
        self.calls += 1
        return fp8_product(*given)  # type: ignore[arg-type]


def kernels_with_fp8() -> Kernels:
    return Kernels(Table("any"), PDL, cores=132, fp8=True)


@storages
def test_all_ways_to_a_product(monkeypatch: pytest.MonkeyPatch, storage: Storage) -> None:
    """Of many rows: by the operations of decode, and in the pieces of a prompt's; with a bias."""
    counted, draw, kernels = Counted(monkeypatch), Draw(2, torch.bfloat16), kernels_with_fp8()
    weight, x, plus = marked(draw, storage, 96, 256, bias=True), draw(MOST + 6, 256), draw(MOST + 6, 96)
    assert weight.packed is not None and weight.bias is not None
    expected = (fp8_product(x, weight.packed) + weight.bias).double()
    with poisoned():
        assert_close(kernels.norm_project(Source(x), None, weight, "qkv")[0][0], expected, x.dtype)
        assert_close(kernels.project(x, weight, plus, 4, 1.0), expected + plus.double() / 4, x.dtype)
        pieces = [each.clone() for each in Prefill(kernels, 2)._pieces(x, weight, 1.0)]
    assert_close(torch.cat(pieces), expected, x.dtype)
    assert counted.calls == 4


def test_what_it_is_given_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and dequantized matrices, and weights that have a product of their own, into memory that is given."""
    counted, draw = Counted(monkeypatch), Draw(2, torch.float32)
    weight, x = marked(draw, CHANNEL, 96, 256, bias=True), draw(70, 256)
    expected = weight.multiply(x)
    for matrix in (None, weight.dequantized()):
        assert_close(library_product(x, weight, matrix), expected.double(), torch.float32)
        out = torch.full_like(expected, float("nan"))
        assert library_product(x, weight, matrix, out) is out
        assert_close(out, expected.double(), torch.float32)
    assert not counted.calls


NOT: dict[str, Callable[[], tuple[bool, torch.dtype, int, Storage, tuple[int, int]]]] = {
    "few rows": lambda: (True, torch.bfloat16, MOST, CHANNEL, (96, 256)),
    "few rows, blocks": lambda: (True, torch.bfloat16, MOST, BLOCK, (96, 256)),
    "float32": lambda: (True, torch.float32, 100, CHANNEL, (96, 256)),
    "float16": lambda: (True, torch.float16, 100, BLOCK, (96, 256)),
    "a chip without": lambda: (False, torch.bfloat16, 100, CHANNEL, (96, 256)),
    "a checkpoint without": lambda: (True, torch.bfloat16, 100, replace(BLOCK, activations=False), (96, 256)),
    "odd outputs": lambda: (True, torch.bfloat16, 100, CHANNEL, (90, 256)),
    "odd inputs": lambda: (True, torch.bfloat16, 100, CHANNEL, (96, 248)),
    "other groups": lambda: (True, torch.bfloat16, 100, replace(BLOCK, group=64), (96, 256)),
}


@pytest.mark.parametrize("why", NOT)
def test_who_does_not_take_them(why: str) -> None:
    fp8, dtype, rows, storage, shape = NOT[why]()
    weight, kernels = marked(Draw(0, dtype), storage, *shape), Kernels(Table("any"), PDL, fp8=fp8)
    x = torch.zeros(rows, shape[1], dtype=dtype, device=DEVICE)
    assert isinstance(kernels.library_matrix(x, weight), Tensor) and References().library_matrix(x, weight) is None
    for lanes in (1, 2):
        assert kernels.scheduled(lanes, False, False).fp8 is fp8


@storages
def test_decode_steps_take_activations_as_they_are(monkeypatch: pytest.MonkeyPatch, storage: Storage) -> None:
    """Rows that our kernels multiply, and those whose shape has none."""
    counted, draw, kernels = Counted(monkeypatch), Draw(3, KIND), kernels_with_fp8()
    weight, plain = marked(draw, storage, 96, 256), marked(Draw(3, KIND), replace(storage, activations=False), 96, 256)
    plain.load_state_dict(weight.state_dict())
    monkeypatch.setattr("ladder.kernels.table.WAVE", 4)
    for rows in (1, 3):
        x = draw(rows, 256)
        assert torch.equal(kernels.project(x, weight, None, 1, 1.0), kernels.project(x, plain, None, 1, 1.0))
    x = draw(MOST, 256)
    monkeypatch.setattr(Kernels, "_config", lambda *_: None)
    assert torch.equal(kernels.project(x, weight, None, 1, 1.0), kernels.project(x, plain, None, 1, 1.0))
    assert not counted.calls and not takes_fp8(x.bfloat16(), weight.packed)  # type: ignore[arg-type]
    assert takes_fp8(draw(MOST + 1, 256).bfloat16(), weight.packed)  # type: ignore[arg-type]


def test_fused_matrices_take_them_together() -> None:
    """Only if all pieces of a matrix are from a checkpoint, or a part of one, that was made for it."""
    pieces = [Piece(f"model.{name}", (32, 64), slice(0, 32), slice(0, 64), 32 * n) for n, name in enumerate("qk")]
    plain = replace(CHANNEL, activations=False)
    for others, allowed in ((CHANNEL, True), (plain, False)):
        weights = Quantization(((("Linear",), CHANNEL), (("model.k",), others)))
        for order in (pieces, pieces[::-1]):
            weight = new_weight(weights, 64, 64, False, torch.bfloat16, order)
            assert isinstance(weight, Quantized) and weight.storage == CHANNEL
            assert weight.packed is not None and weight.packed.activations is allowed
    assert plain == CHANNEL  # stored alike


def test_outputs_that_share_their_scales() -> None:
    """Those of a block, unless a piece of the matrix begins within one: here or in its checkpoint."""
    for at, first, alike in ((0, 0, 128), (256, 128, 128), (64, 0, 1), (0, 64, 1)):
        pieces = [Piece("a", (512, 256), slice(first, first + 128), slice(0, 256), at)]
        for storage, expected in ((BLOCK, alike), (GROUPED, 1), (TENSOR, 1)):
            packed = Quantized(storage, 512, 256, False, torch.bfloat16, pieces).packed
            assert packed is not None and packed.rows == expected
    packed = marked(Draw(0, torch.float32), BLOCK, 256, 256).packed
    assert packed is not None and packed.rows == 128


@pytest.mark.parametrize("rows", (64, 48))
def test_blocks_that_are_no_tiles(rows: int) -> None:
    check(replace(BLOCK, rows=rows), 70, 144, 256, KIND)


# The interpreter takes seconds for a model, and the kernels are tested above.
@interpreter
@pytest.mark.parametrize("storage", (CHANNEL, BLOCK), ids=("channel", "block"))
def test_a_prompt(monkeypatch: pytest.MonkeyPatch, storage: Storage) -> None:
    """A whole prefill. Errors of independent roundings: each changes a number by HALF of it at most, a third of that
    squared in the mean; a layer has four products, one on top of the other.
    """
    counted = Counted(monkeypatch)
    config = ModelConfig(160, 1, 2, 1, 256, 20, head_dim=32)
    tokens, found = torch.arange(MOST + 6) * 7 % 20, {}
    for allowed in (False, True):
        own = replace(storage, activations=allowed)
        model = Decoder(replace(config, weights=Quantization(((("Linear",), own),), HEADS)), dtype=torch.bfloat16)
        torch.manual_seed(3)
        fill(model)
        forward = Forward(model, model.new_cache(1, 128), kernels_with_fp8())
        with torch.inference_mode():
            found[allowed] = forward.prefill(tokens, [len(tokens)], [0], torch.tensor([MOST - 1, MOST + 5])).double()
        assert counted.calls == (4 if allowed else 0)
    distance = (found[True] - found[False]).norm() / found[False].norm()
    assert 1e-3 < distance < 2 * HALF * (4 / 3) ** 0.5
