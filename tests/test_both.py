"""QKV and gate/up as one product: where a layer's attention and MLP read the same stream through the same norm."""

import copy
import logging
import os
import platform
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.config.quantization import named_format
from ladder.engine.forward import Forward
from ladder.jit import PRESENT
from ladder.kernels.activation import activate_rows
from ladder.kernels.both import both_reference, gemv_both, small_gemm_both
from ladder.kernels.launch import Kernels, References
from ladder.kernels.norm import add_norm_reference
from ladder.kernels.table import Config, Gemv, Shape, SmallGemm, Split, Table, candidates, same_bits, sound
from ladder.layers.activation import activate
from ladder.layers.formats import Dense, lay_together
from ladder.layers.weight import AsOne, as_one
from ladder.model import Decoder
from ladder.wiring import Wiring, read_together
from tests import oracle, test_parity_families
from tests.races import RaceDetector, WatchedLanes
from tests.test_fused import PROMPT, InTurns, check, forward_logits, interpreter
from tests.test_kernels import ACTIVATIONS, DEVICE, PDL, Draw, assert_close, exact, poisoned, some_norm, some_source
from tests.test_kernels import dtype as dtype
from tests.test_lanes import check as check_lanes
from tests.test_parity import HYBRIDS, WIRINGS
from tests.tolerance import apart
from tests.weights import decoder, draw, tiny

kernels_present = pytest.mark.skipif(not PRESENT, reason="Triton is not installed")


SENDING = ("ladder-0-1", "ladder-1-2")  # both read the same stream, but attention begins an all-reduce in between


def two(draw: Draw, first: int, second: int, width: int, bias: bool = False) -> tuple[Dense, Dense]:
    one, other = (Dense(outputs, width, bias, draw.dtype, ()) for outputs in (first, second))
    one, other = one.to(DEVICE), other.to(DEVICE)
    assert lay_together(one, other)
    for parameter in (*one.parameters(), *other.parameters()):
        parameter.data.copy_(draw(*parameter.shape, scale=width**-0.5 if parameter.dim() > 1 else 1.0))
    return one, other


# --- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", (*WIRINGS, *(" ".join(f"{row}:1" for row in hybrid) for hybrid in HYBRIDS)))
def test_which_layers_read_one_stream(pattern: str) -> None:
    """By the oracle's streams, whose reads are compared in numbers; at a model's start more may be the same."""
    layers = 9 if ":" not in pattern else 4
    table = Wiring.parse(pattern, layers).sub_blocks()
    streams, generator = oracle.Streams(torch.zeros(3, dtype=torch.float64), 2), torch.Generator().manual_seed(0)
    for number, (attention, mlp) in enumerate(table):
        read = [x.clone() for x in streams.read(attention.lag)]
        streams.write([torch.randn(3, generator=generator).double() for _ in range(2)], attention.out.value)
        same = all(torch.equal(x, y) for x, y in zip(read, streams.read(mlp.lag), strict=True))
        streams.write([torch.randn(3, generator=generator).double() for _ in range(2)], mlp.out.value)
        assert same or not read_together(attention, mlp)
        if ":" not in pattern and number == layers - 1:
            assert same == (read_together(attention, mlp) or pattern in SENDING)


def test_rows_of_which_layers_read_one_stream() -> None:
    names = ("standard", "parallel", "parallel-2", "ladder", "ladder-2", "ladder-0-1", "ladder-1-2", "ladder-1-3")
    names += ("desync-2x", "desync-2x-1", "none")
    found = [name for name in names if read_together(*Wiring.parse(name, 3).sub_blocks()[1])]
    assert found == ["parallel", "parallel-2"]


def test_one_matrix_where_they_lie_together() -> None:
    one, other = two(Draw(0, torch.float32), 6, 10, 4, bias=True)
    both = as_one(one, other)
    assert both is not None and both.bias is not None and both.first == 6
    assert torch.equal(both.matrix, torch.cat([one.weight, other.weight]))
    assert torch.equal(both.bias, torch.cat([one.bias, other.bias]))  # type: ignore[list-item]
    one.weight.data.zero_()  # it is no copy
    assert not both.matrix[:6].any() and both.matrix[6:].all()
    assert as_one(other, one) is None and as_one(one, copy.deepcopy(other)) is None
    apart_, plain = Dense(6, 4, False, torch.float32, ()), Dense(6, 4, True, torch.float32, ())
    assert as_one(apart_, other) is None and not lay_together(apart_, plain)


def test_a_shared_norm_alone_joins_them(caplog: pytest.LogCaptureFixture) -> None:
    """Two norms: two products. Quantized weights: two products, and a line of the log says so, once."""
    shared = Decoder(tiny(2, shared_norm=True).rewired("parallel"))
    assert all(as_one(layer.attention.qkv_proj, layer.mlp.up_proj) is not None for layer in shared.layers)
    assert not any(layer.shares_norm for layer in Decoder(tiny(2).rewired("parallel")).layers)
    with caplog.at_level(logging.INFO, "ladder"):
        quantized = Decoder(replace(tiny(3, shared_norm=True), weights=named_format("fp8")).rewired("parallel"))
    assert [record.message for record in caplog.records] == [
        "parallel layers have two products: their weights are quantized, or only one has a bias"
    ]
    assert all(as_one(layer.attention.qkv_proj, layer.mlp.up_proj) is None for layer in quantized.layers)


# --- kernels ---------------------------------------------------------------------------------------------------------


def case(draw: Draw, width: int) -> tuple[AsOne, Any, str, bool]:
    pair, activation = draw.pick(False, True), draw.pick(*ACTIVATIONS[1:])
    outputs, inner = draw.pick(8, 20, 36), draw.pick(6, 16, 50)
    one, other = two(draw, outputs, inner * (1 + pair), width, draw.pick(False, True))
    both = as_one(one, other)
    assert both is not None
    return both, draw.pick(None, some_norm(draw, width)), activation, pair


def expected_of(x: Tensor, both: AsOne, activation: str, pair: bool) -> tuple[Tensor, Tensor]:
    """As two products."""
    exactly = AsOne(exact(both.matrix), None if both.bias is None else exact(both.bias), both.first)
    (one, other), (first, second) = (
        (each[: both.first], each[both.first :])
        for each in (exactly.matrix, torch.zeros_like(exactly.matrix[:, 0]) if exactly.bias is None else exactly.bias)
    )
    return x @ one.T + first, activate(x @ other.T + second, activation, pair)


@kernels_present
@pytest.mark.parametrize("seed", range(6))
def test_one_row(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    width = draw.pick(16, 96, 200)
    both, norm, activation, pair = case(draw, width)
    source = some_source(draw, 1, width)
    config = Gemv(draw.pick(2, 4, 8), draw.pick(4, 8), draw.pick(2, 3, 7, 256), draw.pick(2, 4))
    with poisoned():
        qkv, y, agreed = gemv_both(source, norm, both, activation, pair, config, PDL, 132)
    x, expected_agreed = add_norm_reference(exact(source), exact(norm))
    for found, wanted in zip((qkv, y), expected_of(x, both, activation, pair), strict=True):
        assert_close(found, wanted, dtype)
    for found, wanted in zip((qkv, y), both_reference(x, as_exact(both), activation, pair), strict=True):
        assert_close(found, wanted, dtype)
    assert_close(agreed, expected_agreed, dtype)


def as_exact(both: AsOne) -> AsOne:
    return AsOne(exact(both.matrix), None if both.bias is None else exact(both.bias), both.first)


@kernels_present
@pytest.mark.parametrize("seed", range(6))
def test_a_few_rows(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    rows, width = draw.pick(1, 3, 16, 33, 64), draw.pick(32, 96, 160)
    both, _, activation, pair = case(draw, width)
    config = SmallGemm(draw.pick(32, 64), draw.pick(16, 32), 1, draw.pick(2, 4), 4, draw.pick(0, 16))
    x = draw(rows, width)
    with poisoned():
        qkv, y = small_gemm_both(x, both, activation, pair, config, PDL)
    for found, wanted in zip((qkv, y), expected_of(exact(x), both, activation, pair), strict=True):
        assert_close(found, wanted, dtype)


@kernels_present
def test_activations_of_parts_of_rows(dtype: torch.dtype) -> None:
    """Prefill's product has QKV and gate/up in one row."""
    x = Draw(0, dtype)(5, 96)
    for pair, cut in ((True, 32), (False, 40)):
        assert_close(activate_rows(x[:, cut:], "silu", pair), activate(exact(x)[:, cut:], "silu", pair), dtype)


# --- configurations --------------------------------------------------------------------------------------------------

GEMV, SMALL = Gemv(2, 4, 5, 2), SmallGemm(32, 16, 1, 2, 4, 0)
ATTEND: dict[Shape, Config] = {Shape("attend", count, 2, 2048, False, 4): Split(1, 16, 1, 3, 0) for count in (1, 2)}
ROWS: dict[int, Config] = {1: GEMV, 4: SMALL}


def tuned(config: Config) -> Table:
    """A table with a row for one sequence and a tiny model with one norm; attention as the interpreter likes it."""
    layer = Decoder(tiny(1, shared_norm=True)).layers[0]
    outputs = layer.attention.qkv_proj.outputs + layer.mlp.up_proj.outputs // 2
    return Table("any", {Shape("both", 1, outputs, 16, True, 4): config, **ATTEND})


def test_without_a_tuned_row_there_are_two_products() -> None:
    shape = Shape("both", 1, 48, 16, True, 4)
    assert Table("any")[shape] is None and sound(shape, None)
    found = candidates(shape)
    assert found[0] is None and any(isinstance(config, Gemv) for config in found)
    several = candidates(Shape("both", 16, 10240, 4096, True))
    assert several[0] is None and all(config is None or config.splits == 1 for config in several)  # type: ignore[union-attr]
    assert not sound(shape, SmallGemm(32, 16, 2, 2, 4, 0))
    table = tuned(GEMV)
    assert table[replace(next(iter(table.rows)), lanes=2, flags=True)] == GEMV  # the bits of one lane
    assert Table.read(table.lines())["any"] == table.rows and same_bits(None, Table("any")[replace(shape, lanes=2)])


class Counting(InTurns):
    """The kernels with tuned rows; counts what they are asked for."""

    found: dict[str, int]

    def __init__(self, table: Table) -> None:
        self._kernels = Kernels(table, pdl=False)
        self.found = {}

    def __getattr__(self, name: str) -> Any:
        self.found[name] = self.found.get(name, 0) + 1
        return super().__getattr__(name)


@interpreter
@pytest.mark.parametrize("config, product", ((GEMV, "norm_project_both"), (None, "norm_project")))
def test_a_model_by_kernels(config: Any, product: str) -> None:
    """Prompts, whose rows of QKV are parts of the product's, also beside sequences that are decoded; and a decode step,
    by one product or by two.
    """
    own = tiny(1, shared_norm=True).rewired("parallel")
    weights, found = draw(own), []
    launches = Counting(tuned(config)), References()
    for launch in launches:
        model = decoder(own, weights)
        forward = Forward(model, model.new_cache(3, 4), launch)  # type: ignore[arg-type]
        prompts = forward.prefill(torch.tensor([5, 1, 7]), [2, 1], [0, 1], torch.tensor([1, 2]))
        forward.cache.advance([2, 1], [0, 1])
        mixed = forward.prefill(torch.tensor([3, 8, 4, 2]), [1, 1, 2], [0, 1, 2], torch.tensor([0, 1, 3]), decoded=2)
        found.append((prompts, mixed, forward.decode(torch.tensor([3]), torch.tensor([0]), torch.tensor([3]))))
    for ours, wanted in zip(*found, strict=True):
        assert_close(ours, wanted, torch.float32)
    assert {name: count for name, count in launches[0].found.items() if "norm_project" in name} == (
        {"norm_project_both": 1, "norm_project": 1} if product == "norm_project_both" else {"norm_project": 3}
    )


@kernels_present
@pytest.mark.parametrize("rows", (1, 3, 4))
def test_launches(rows: int, dtype: torch.dtype) -> None:
    """As a decode step asks for them: the kernel for one row, the one for a few, and neither without a tuned row."""
    draw = Draw(rows, dtype)
    both = as_one(*two(draw, 32, 32, 16))
    assert both is not None
    table = Table("any", {Shape("both", count, 48, 16, True, dtype.itemsize): config for count, config in ROWS.items()})
    kernels, references = Kernels(table, PDL, cores=132), References()
    source, norm = some_source(draw, rows, 16), some_norm(draw, 16)
    with poisoned():
        found = kernels.norm_project_both(source, norm, both, "silu", True)
    expected = references.norm_project_both(exact(source), exact(norm), as_exact(both), "silu", True)
    for ours, wanted in zip(found, expected, strict=True):
        assert_close(ours, wanted, dtype)
    assert kernels.takes_both(both, rows, True) and not Kernels(Table("any"), PDL).takes_both(both, rows, True)
    assert not kernels.takes_both(both, 8, True) and not kernels.takes_both(both, 65, True)


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from ladder.kernels.both import _gemv_both, _small_gemm_both

def check(kernel, warps, **fixed):
    fixed |= {"K": 1024, "PAIR": 1, "ACT": 1, "BIAS": 0, "STAGES": 4, "PDL": True}
    kinds = {"flag1": "*i32", "flag2": "*i32", "eps": "fp32"}
    kinds |= dict.fromkeys(("need", "HALF", "INNER", "OWN", "M"), "i32")
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "*bf16") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    aligned = {(n,): [["tt.divisibility", 16]] for n, kind in enumerate(signature.values()) if kind[0] in "*i"}
    built = compile(ASTSource(kernel, signature, values, aligned), target=GPUTarget("cuda", 90, 32),
                    options={"num_warps": warps, "launch_pdl": True})
    text = built.asm["ptx"]
    assert "griddepcontrol.wait" in text and text.count("cp.async.commit_group") > 2, kernel
    return text

text = check(_gemv_both, 8, BK=1024, BN=2, TILES=4, SUMS=1, FLAGS=1, DRIFTS=1, NORM=1, OFFSET=0)
assert text.index("cp.async") < text.index("ld.acquire") < text.index("griddepcontrol.wait")
assert "mma" in check(_small_gemm_both, 4, MB=16, BN=64, BK=128, EARLY=0, IEEE=False)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64") or not PRESENT, reason="no compiler here")
def test_compiled_for_a_gpu() -> None:
    """Both load weights in a pipeline; one row's kernel asks for them before it waits for others."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


# --- models ----------------------------------------------------------------------------------------------------------


class Noting(References):
    """Counts the products of decode steps."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def norm_project(self, source: Any, norm: Any, weight: Any, kernel: str, *rest: Any, **named: Any) -> Any:
        self.found.append(kernel)
        return super().norm_project(source, norm, weight, kernel, *rest, **named)

    def norm_project_both(self, *arguments: Any) -> Any:
        self.found.append("both")
        return super().norm_project_both(*arguments)


@pytest.mark.parametrize("wiring, products", (
    ("parallel", "bb"), ("parallel-1", "bb"), ("ladder-0-1", "qgqg"), ("ladder-1-2", "qgqg"), ("standard", "qgqg"),
    ("ladder", "qgqg"), ("desync-3x", "qgqg"), ("standard:1 parallel:1", "qgb"), ("desync-3x-1:1 parallel-1:1", "qgb"),
))  # fmt: skip
def test_any_wiring_over_one_norm(wiring: str, products: str) -> None:
    """Prompts and decode steps of three sequences by two ranks, against the oracle; and which products they are."""
    made: list[Noting] = []

    def launch() -> Noting:
        made.append(Noting())
        return made[-1]

    check(tiny(2, shared_norm=True).rewired(wiring), 2, launch, 3, steps=1)
    for each in made:
        assert "".join(name[0] for name in each.found) == products + "h"


@pytest.mark.parametrize("size, batch", ((1, 1), (2, 3)))
@pytest.mark.parametrize("wiring", ("parallel", "parallel-1", "standard:1 parallel-1:3"))
def test_two_lanes(wiring: str, size: int, batch: int) -> None:
    """The same bits as on one, and no race: the product is one lane's, attention reads it on the other."""
    config = tiny(4, shared_norm=True).rewired(wiring)
    check_lanes(config, draw(config), size, batch)


def test_a_race_of_two_lanes_is_noticed() -> None:
    """Attention that does not wait for the product of the other lane."""
    config = tiny(2, shared_norm=True).rewired("parallel")
    weights, lanes = draw(config), WatchedLanes(2)
    lanes.made = lambda x: Free(x)  # type: ignore[method-assign, assignment, return-value]
    model = decoder(config, weights)
    forward = Forward(model, model.new_cache(1, 4), References(), lanes)
    with pytest.raises(AssertionError), RaceDetector(lanes):
        forward.decode(torch.tensor([1]), torch.tensor([0]), torch.tensor([0]))


class Free:
    """Nobody has to wait for it."""

    mark = None

    def __init__(self, x: Any) -> None:
        self.x = x


@pytest.mark.parametrize("name", ("falcon-one-norm", "olmo2"))
def test_families_whose_norm_is_shared(worlds: Any, name: str) -> None:
    """Falcon's MLP reads through the attention's norm, both of OLMo 2's read the stream as it is."""
    config, weights, ids = test_parity_families.model(name)
    config = config.rewired("parallel")
    expected = oracle.logits(config, weights, ids, config.wiring.layers, 2)[:, PROMPT - 1 :]
    launches = [Noting(), Noting()]
    for found in worlds[2].run(lambda comm: forward_logits(config, weights, ids, launches[comm.rank], comm)):
        assert apart(found, expected) <= test_parity_families.tolerance(config)
    assert all("both" in each.found and "qkv" not in each.found for each in launches)
