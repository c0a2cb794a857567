"""Every kernel against its twin in float64: random shapes and inputs, outputs poisoned.

On a GPU the kernels are compiled and launched as in the product; without one they run in Triton's interpreter.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.jit import PRESENT
from ladder.kernels.attend import Scratch, attend, attend_twin
from ladder.kernels.best import best, best_twin
from ladder.kernels.gemv import beside_sums, gemv, gemv_twin
from ladder.kernels.many import gate, rotate_write, rotate_write_twin
from ladder.kernels.norm import add_norm, add_norm_twin
from ladder.kernels.ops import Kernels, Twins
from ladder.kernels.place import Steps
from ladder.kernels.skinny import skinny
from ladder.kernels.start import start, start_twin
from ladder.kernels.stream import Source
from ladder.kernels.table import SHARED, Gemv, Skinny, Split, Table

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
        drift = None if value.drift is None else exact(value.drift)
        return Source(exact(value.base), tuple(map(exact, value.sums)), drift=drift)
    if isinstance(value, Steps):
        return Steps(value.slots, value.positions, exact(value.cos), exact(value.sin))
    return type(value)(map(exact, value)) if isinstance(value, tuple) else value


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == expected.shape
    distance = ((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()
    assert distance <= TOLERANCE[dtype], f"{distance:.1e} apart"  # also refuses NaN


def some_source(draw: Draw, rows: int, width: int) -> Source:
    sums = tuple(draw(rows, width) for _ in range(draw.pick(0, 1, 2)))
    flags = tuple(torch.full((1,), 3, dtype=torch.int32, device=DEVICE) for _ in sums) if PDL else ()
    return Source(draw(rows, width), sums, flags, 3, draw.pick(None, draw(rows, width)))


@pytest.mark.parametrize("seed", SEEDS)
def test_gemv(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    width, outputs = draw.pick(16, 96, 512, 1000), draw.pick(16, 50, 136)
    pair = draw.pick(False, True)
    source = some_source(draw, 1, width)
    norm = draw.pick(None, (draw(width), 1e-5))
    weight, bias = draw(outputs * (1 + pair), width, scale=width**-0.5), draw.pick(None, draw(outputs * (1 + pair)))
    plus, divisor = draw.pick(None, draw(1, outputs)), draw.pick(1, 4)
    config = Gemv(draw.pick(1, 2, 8), draw.pick(4, 8), draw.pick(3, 256), draw.pick(2, 4))
    out = torch.full((1, outputs), float("nan"), dtype=dtype, device=DEVICE)
    with poisoned():
        agreed = gemv(source, norm, weight, bias, pair, plus, divisor, out, config, PDL, cores=132)
    expected = torch.empty(1, outputs, dtype=torch.float64, device=DEVICE)
    arguments = map(exact, (source, norm, weight, bias, pair, plus, divisor))
    expected_agreed = gemv_twin(*arguments, expected)  # type: ignore[arg-type]
    assert_close(out, expected, dtype)
    assert_close(agreed, expected_agreed, dtype)


@pytest.mark.parametrize("seed", SEEDS)
def test_skinny(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    rows, width, outputs = draw.pick(2, 3, 16, 33, 64), draw.pick(64, 256, 320), draw.pick(16, 50, 136)
    splits = draw.pick(1, 2)
    pair = splits == 1 and draw.pick(False, True)
    x, weight = draw(rows, width), draw(outputs * (1 + pair), width, scale=width**-0.5)
    bias = draw.pick(None, draw(outputs * (1 + pair)))
    plus = draw(rows, outputs) if splits == 1 and draw.pick(False, True) else None
    divisor = draw.pick(1, 4)
    config = Skinny(draw.pick(32, 64), draw.pick(16, 32), splits, draw.pick(2, 3), 4, draw.pick(0, 16, 32))
    out = torch.full(
        (splits, rows, outputs), float("nan"), dtype=dtype if splits == 1 else torch.float32, device=DEVICE
    )
    skinny(x, weight, bias, pair, plus, divisor, out, config, PDL)
    expected = torch.empty(rows, outputs, dtype=torch.float64, device=DEVICE)
    arguments = map(exact, (Source(x), None, weight, bias, pair, plus, divisor))
    gemv_twin(*arguments, expected)  # type: ignore[arg-type]
    assert_close(out.double().sum(0), expected, dtype)


@pytest.mark.parametrize("seed", SEEDS)
def test_add_norm(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    rows, width = draw.pick(1, 7, 80), draw.pick(16, 96, 1000)
    source, gain = some_source(draw, rows, width), draw(width)
    with poisoned():
        found = add_norm(source, gain, 1e-5, PDL)
    for one, other in zip(found, add_norm_twin(exact(source), exact(gain), 1e-5), strict=True):
        assert_close(one, other, dtype)


def some_place(draw: Draw, rows: int, slots: int, capacity: int, d: int, distinct: bool) -> Steps:
    picked = (
        torch.randperm(slots, generator=draw._generator)[:rows] if distinct else torch.zeros(rows, dtype=torch.long)
    )
    positions = torch.randint(capacity, (rows,), generator=draw._generator) if distinct else torch.arange(rows)
    angle = torch.rand(rows, d // 2, generator=draw._generator) * 6
    return Steps(*(x.to(DEVICE) for x in (picked, positions, angle.cos(), angle.sin())))


@pytest.mark.parametrize("seed", SEEDS)
def test_attend(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    batch, kv_heads, group, d = draw.pick(1, 3), draw.pick(1, 2), draw.pick(1, 3, 8), draw.pick(16, 20, 64)
    capacity, heads = draw.pick(5, 70, 200), kv_heads * group
    place = some_place(draw, batch, 4, capacity, d, distinct=True)
    keys, values = draw(4, capacity, kv_heads, d), draw(4, capacity, kv_heads, d)
    qkv = draw(draw.pick(1, 3), batch, (heads + 2 * kv_heads) * d)
    gains = draw.pick(None, (draw(d), draw(d), 1e-5))
    window = draw.pick(None, 1, 17)
    config = Split(draw.pick(1, 2, 4), draw.pick(16, 32), 4)
    expected_keys, expected_values = exact(keys), exact(values)
    expected = attend_twin(exact(qkv), exact(place), exact(gains), expected_keys, expected_values, heads, window)
    scratch = Scratch.of(batch, heads, d, config.splits, DEVICE)
    for _ in range(2):  # the second finds what the first has left in the scratch
        with poisoned():
            found = attend(qkv, place, gains, keys, values, heads, window, config, scratch, PDL)
        assert_close(found, expected, dtype)
        assert_close(keys, expected_keys, dtype)
        assert_close(values, expected_values, dtype)


@pytest.mark.parametrize("seed", SEEDS)
def test_rotate_write(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    rows, kv_heads, group, d = draw.pick(1, 9), draw.pick(1, 2), draw.pick(1, 3), draw.pick(16, 20)
    heads = kv_heads * group
    place = some_place(draw, rows, 2, 12, d, distinct=False)
    keys, values = draw(2, 12, kv_heads, d), draw(2, 12, kv_heads, d)
    qkv, gains = draw(rows, (heads + 2 * kv_heads) * d), draw.pick(None, (draw(d), draw(d), 1e-5))
    expected_keys, expected_values = exact(keys), exact(values)
    expected = rotate_write_twin(exact(qkv), exact(place), exact(gains), expected_keys, expected_values, heads)
    with poisoned():
        found = rotate_write(qkv, place, gains, keys, values, heads)
    assert_close(found, expected, dtype)
    assert_close(keys, expected_keys, dtype)
    assert_close(values, expected_values, dtype)


@pytest.mark.parametrize("seed", SEEDS)
def test_gate(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    x = draw(draw.pick(1, 5), 2 * draw.pick(7, 1024, 1500))
    with poisoned():
        found = gate(x)
    assert_close(found, Twins().gate(exact(x)), dtype)


@pytest.mark.parametrize("seed", SEEDS)
def test_start(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    batch, rows, hidden, half = draw.pick(1, 5), 11, draw.pick(16, 100), draw.pick(2, 10)
    tokens = torch.randint(33, (batch,), device=DEVICE)
    positions = torch.randint(100_000, (batch,), device=DEVICE)
    frequencies = torch.rand(half, device=DEVICE)
    flags = torch.full((draw.pick(1, 9),), 7, dtype=torch.int32, device=DEVICE)
    table, first = draw(rows, hidden), draw.pick(0, 11, 22)
    with poisoned():
        x, cos, sin = start(tokens, positions, frequencies, table, first, flags)
    assert not flags.any()
    expected, expected_cos, expected_sin = start_twin(tokens, positions, frequencies, table, first, flags)
    assert torch.equal(x, expected)
    for found, other in ((cos, expected_cos), (sin, expected_sin)):
        assert (found - other).abs().max() < 1e-5


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", ("plain", "ties", "nan", "infinite", "empty"))
def test_best(case: str, seed: int) -> None:
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
        found = best(logits, 100, count, PDL)
    torch.testing.assert_close(found[:, 0], best_twin(logits, 100, count)[:, 0], rtol=0, atol=0, equal_nan=True)
    sane = found[:, 0].isfinite()
    assert torch.equal(found[sane, 1], best_twin(logits, 100, count)[sane, 1])


@pytest.mark.parametrize("rows", (1, 2, 5, 64, 65))
def test_every_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    """As the forward pass asks for them, configurations chosen by rule."""
    draw = Draw(rows, dtype)
    kernels, twins = Kernels(Table("any"), PDL, cores=132), Twins()
    source, norm = some_source(draw, rows, 64), (draw(64), 1e-5)
    for kernel, outputs in (("qkv", 96), ("gate_up", 160), ("head", 77)):
        weight, bias = draw(outputs, 64, scale=0.125), draw(outputs)
        with poisoned():
            y, agreed = kernels.norm_project(source, norm, weight, bias, kernel)
        expected, expected_agreed = twins.norm_project(*map(exact, (source, norm, weight, bias)), kernel)  # type: ignore
        assert_close(y.double().sum(0), expected[0], dtype)
        assert_close(agreed, expected_agreed, dtype)
    x, weight, plus = draw(rows, 160), draw(64, 160, scale=0.08), draw(rows, 64)
    with poisoned():
        y = kernels.project(x, weight, None, plus, 4)
    assert_close(y, twins.project(exact(x), exact(weight), None, exact(plus), 4), dtype)


def test_who_waits_for_a_sum_leaves_room_for_it() -> None:
    for programs, warps, ring, cores in product(
        (3, 128, 256, 1000), (4, 8, 16), (1 << 14, 1 << 16, 1 << 17), (108, 132)
    ):
        fitted, registers = beside_sums(programs, warps, ring, cores)
        each = -(-fitted // cores)  # on the fullest multiprocessor
        assert 1 <= fitted <= programs and fitted < each * cores
        assert each * registers * warps * 32 <= 65536 * 7 // 8 and each * ring <= SHARED


def test_the_comparison_can_fail(dtype: torch.dtype) -> None:
    draw = Draw(0, dtype)
    source, gain = some_source(draw, 2, 64), draw(64)
    found, _ = add_norm(source, gain, 1e-5, PDL)
    spoil: list[Callable[[Tensor], Tensor]] = [lambda x: x * 1.05, lambda x: x.flip(-1), lambda x: x * float("nan")]
    for how in spoil:
        with pytest.raises(AssertionError):
            assert_close(how(found), add_norm_twin(exact(source), exact(gain), 1e-5)[0], dtype)


COMPILED = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from ladder.kernels.gemv import _gemv

def groups(plus):
    fixed = {"K": 1024, "BK": 1024, "BN": 8, "TILES": 4, "SUMS": 0, "FLAGS": 0, "DRIFT": 0, "NORM": 0, "PAIR": 0}
    fixed |= {"BIAS": 0, "PLUS": plus, "TP": 4, "STAGES": 4, "PDL": True}
    kinds = {"flag1": "*i32", "flag2": "*i32", "need": "i32", "eps": "fp32", "scale": "fp32", "N": "i32"}
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "*bf16") for name in _gemv.arg_names}
    values = {(_gemv.arg_names.index(name),): value for name, value in fixed.items()}
    aligned = {(n,): [["tt.divisibility", 16]] for n, kind in enumerate(signature.values()) if kind.startswith("*")}
    built = compile(ASTSource(_gemv, signature, values, aligned), target=GPUTarget("cuda", 90, 32),
                    options={"num_warps": 4, "launch_pdl": True})
    text = built.asm["ptx"]
    assert "griddepcontrol.wait" in text
    return len(re.findall("cp.async.commit_group", text))

without, with_plus = groups(0), groups(1)
assert without == with_plus > 1, (without, with_plus)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="Triton brings no compiler here")
def test_what_others_write_is_not_read_before_the_wait() -> None:
    """Compiled for a GPU: `plus` takes no part in the pipeline of the weight, whose loads are made before the wait."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
