"""The kernels for experts against their reference implementations in float64: outputs poisoned, odd sizes.

On a GPU the kernels are compiled and launched as in the product; without one they run in Triton's interpreter.
"""

import pytest
import torch
from torch import Tensor

from ladder.jit import PRESENT
from ladder.kernels.experts.products import expert_down, expert_down_reference, expert_up, expert_up_reference
from ladder.kernels.experts.router import (
    FEW,
    ExpertConfig,
    Routing,
    choose,
    choose_reference,
    expert_config,
    route,
    route_reference,
    router_logits,
)
from tests.test_kernels import DEVICE, PDL, dtype, poisoned

assert dtype  # a fixture
pytestmark = pytest.mark.skipif(not PRESENT, reason="Triton is not installed")

BATCHES = (1, 3, 17)
# rows choose among experts, `local` of which, from `first` on, are this rank's
SHARES = {"all": (0, 6), "some": (3, 2)}
EXPERTS = 6


def drawn(seed: int, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def assert_near(found: Tensor, expected: Tensor, terms: int) -> None:
    """As far apart, in norm, as `terms` roundings in float32 and one to the type of `found` can bring them."""
    assert found.shape == expected.shape
    eps = torch.finfo(found.dtype).eps + terms * torch.finfo(torch.float32).eps
    distance = (found.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert distance.item() <= eps, f"{distance.item():.1e} apart, more than {eps:.1e}"  # also refuses NaN


def some_routing(rows: int, top_k: int, made: bool = True, normalize: bool = True) -> Routing:
    """A choice in which some rows choose the same experts; `made`: before the next kernels, not by them."""
    logits = drawn(rows + top_k, torch.float32, rows, EXPERTS)
    logits[: rows // 2, 1] += 4
    routing = Routing(logits, top_k, normalize, *choose_reference(logits, top_k, normalize))
    return routing if made else Routing(logits, top_k, normalize)


def exact(routing: Routing) -> Routing:
    """The same with weights in float64."""
    logits = routing.logits.double()
    return Routing(
        logits, routing.top_k, routing.normalize, *choose_reference(logits, routing.top_k, routing.normalize)
    )


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize(("experts", "hidden"), [(6, 40), (8, 96), (37, 16)])
def test_router_logits(rows: int, experts: int, hidden: int, dtype: torch.dtype) -> None:
    x, router = drawn(1, dtype, rows, hidden), drawn(2, dtype, experts, hidden)
    with poisoned():
        found = router_logits(x, router, PDL)
    assert found.dtype is torch.float32
    assert_near(found, route_reference(x.double(), router.double(), 1, False).logits, hidden)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
@pytest.mark.parametrize("experts", [8, 37])
def test_choose(experts: int, top_k: int, normalize: bool) -> None:
    logits = drawn(3, torch.float32, 5, experts)
    with poisoned():
        numbers, weights = choose(logits, top_k, normalize, PDL)
    expected, expected_weights = choose_reference(logits.double(), top_k, normalize)
    assert torch.equal(numbers, expected)
    assert_near(weights, expected_weights, experts + top_k)


def test_of_equal_logits_the_lower_number_is_chosen() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0], [3.0, 3.0, 3.0, 3.0, 3.0]], device=DEVICE)
    numbers, weights = choose(logits, 2, True, PDL)
    assert numbers.tolist() == [[1, 3], [0, 1]] == choose_reference(logits, 2, True)[0].tolist()
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_nan_logits_give_experts_that_exist_and_nan_weights() -> None:
    logits = torch.tensor([[0.0, float("nan"), 1.0], [float("nan")] * 3], device=DEVICE)
    numbers, weights = choose(logits, 2, True, PDL)
    assert numbers.tolist() == [[1, 2], [0, 1]]
    assert weights.isnan().all()


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("rows", BATCHES)
def test_expert_up(rows: int, top_k: int, share: str, dtype: torch.dtype) -> None:
    (first, local), hidden, ffn = SHARES[share], 72, 50
    config = ExpertConfig(2, 128, programs=5) if rows == 1 else None
    x, up = drawn(4, dtype, rows, hidden), drawn(5, dtype, local * 2 * ffn, hidden, scale=hidden**-0.5)
    for routing in (some_routing(rows, top_k), some_routing(rows, top_k, made=False))[: 2 if rows == 1 else 1]:
        with poisoned():
            found = expert_up(x, up, routing, first, local, "silu", PDL, config)
        known = exact(routing)
        assert known.numbers is not None
        expected = expert_up_reference(x.double(), up.double(), known, first, local, "silu")
        mine = (known.numbers >= first) & (known.numbers < first + local)
        assert found.dtype is dtype and found[~mine].isnan().all()
        if mine.any():
            assert_near(found[mine], expected[mine], 2 * hidden)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_new", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("rows", [1, 3])
def test_activations(rows: int, activation: str) -> None:
    hidden, ffn, routing = 16, 20, some_routing(rows, 2)
    config = ExpertConfig(8, 16, programs=3) if rows == 1 else None
    x, up = drawn(6, torch.float32, rows, hidden), drawn(7, torch.float32, EXPERTS * 2 * ffn, hidden)
    with poisoned():
        found = expert_up(x, up, routing, 0, EXPERTS, activation, PDL, config)
    expected = expert_up_reference(x.double(), up.double(), exact(routing), 0, EXPERTS, activation)
    assert_near(found, expected, 2 * hidden)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("rows", BATCHES)
def test_expert_down(rows: int, top_k: int, share: str, dtype: torch.dtype) -> None:
    (first, local), outputs, ffn = SHARES[share], 72, 50
    config = ExpertConfig(16, 32, ahead=2) if rows == 1 else None
    down = drawn(8, dtype, local * outputs, ffn, scale=ffn**-0.5)
    for made, plus in ((True, None), (True, drawn(9, dtype, rows, outputs)), (False, None))[: 3 if rows == 1 else 2]:
        routing = some_routing(rows, top_k, made, normalize=made)
        known = exact(routing)
        assert known.numbers is not None
        mine = (known.numbers >= first) & (known.numbers < first + local)
        hidden = drawn(10, dtype, rows, top_k, ffn)
        expected = expert_down_reference(
            hidden.double(), down.double(), known, first, local, None if plus is None else plus.double(), 4, 0.5
        )
        hidden[~mine] = float("nan")  # what expert_up left unwritten
        with poisoned():
            found = expert_down(hidden, down, routing, first, local, plus, 4, 0.5, PDL, config)
            again = expert_down(hidden, down, routing, first, local, plus, 4, 0.5, PDL, config)
        assert found.dtype is dtype and torch.equal(found, again)
        if plus is None and not mine.any():
            assert not found.any()
        else:
            assert_near(found, expected, ffn * top_k + EXPERTS)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_tiles_that_do_not_fit(rows: int) -> None:
    """Several tiles along both sides of each matrix, the last ones cut off, and more programs than tiles."""
    hidden, ffn, routing = 72, 100, some_routing(rows, 2, made=rows > 1)
    known = exact(routing)
    x, up = drawn(11, torch.float32, rows, hidden), drawn(12, torch.float32, EXPERTS * 2 * ffn, hidden, scale=0.1)
    down = drawn(13, torch.float32, EXPERTS * hidden, ffn, scale=0.1)
    for config in (ExpertConfig(32, 16, 2, 4, programs=3), ExpertConfig(64, 32, 3, 8, ahead=3, programs=12)):
        with poisoned():
            inner = expert_up(x, up, routing, 0, EXPERTS, "silu", PDL, config)
            found = expert_down(inner, down, routing, 0, EXPERTS, None, 1, 1.0, PDL, config)
        expected = expert_up_reference(x.double(), up.double(), known, 0, EXPERTS, "silu")
        assert_near(inner, expected, 2 * hidden)
        expected = expert_down_reference(expected, down.double(), known, 0, EXPERTS, None, 1, 1.0)
        assert_near(found, expected, 2 * hidden + 2 * ffn + EXPERTS)


@pytest.mark.parametrize("rows", BATCHES)
def test_routed_experts(rows: int) -> None:
    """All kernels in a row, the choice made wherever `route` leaves it, on two ranks that have half of the experts."""
    hidden, ffn, top_k = 24, 20, 2
    config = ExpertConfig(2, 32, programs=9) if rows == 1 else None
    x, router = drawn(14, torch.float32, rows, hidden), drawn(15, torch.float32, EXPERTS, hidden)
    up, down = drawn(16, torch.float32, EXPERTS * 2 * ffn, hidden), drawn(17, torch.float32, EXPERTS * hidden, ffn)
    terms = []
    for first in (0, 3):
        with poisoned():
            routing = route(x, router, top_k, True, PDL)
            mine = slice(first * 2 * ffn, (first + 3) * 2 * ffn)
            inner = expert_up(x, up[mine], routing, first, 3, "silu", PDL, config)
            mine = slice(first * hidden, (first + 3) * hidden)
            terms.append(expert_down(inner, down[mine], routing, first, 3, None, 1, 1.0, PDL))
    known = route_reference(x.double(), router.double(), top_k, True)
    inner = expert_up_reference(x.double(), up.double(), known, 0, EXPERTS, "silu")
    expected = expert_down_reference(inner, down.double(), known, 0, EXPERTS, None, 1, 1.0)
    assert_near(terms[0] + terms[1], expected, 4 * hidden + 2 * ffn)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("batch", [1, 2, 16, 64])
@pytest.mark.parametrize(
    ("hidden", "ffn", "experts", "top_k"),
    [(4096, 14336, 8, 2), (4096, 1792, 8, 2), (2048, 768, 128, 8), (2048, 96, 128, 8), (72, 50, 6, 1)],
)
def test_configurations(hidden: int, ffn: int, experts: int, top_k: int, batch: int, size: int) -> None:
    """Tiles are powers of two, wide enough for a matrix product, and two programs' tiles fit a multiprocessor."""
    most = min(experts, batch * top_k)
    for kernel, outputs, inputs in (("router", experts, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
        config = expert_config(kernel, batch, outputs, inputs, size, most)
        for n in (config.rows, config.depth, config.warps):
            assert n >= 1 and n & (n - 1) == 0
        assert config.stages >= 2
        if batch == 1:
            pair = 1 + (kernel == "up")
            assert kernel == "router" or config.rows * config.depth * size * pair * (config.stages - 1) <= 113 * 1024
            assert kernel == "down" or config.depth >= inputs
        else:
            assert config.rows >= 16 * (1 + (kernel == "up")) and config.depth >= 16


def test_one_row_of_very_many_experts_is_routed_by_a_kernel_of_its_own() -> None:
    x, router = drawn(18, torch.float32, 1, 24), drawn(19, torch.float32, FEW + 3, 24)
    found, expected = route(x, router, 3, False, PDL), route_reference(x.double(), router.double(), 3, False)
    assert found.numbers is not None and found.weights is not None and expected.weights is not None
    assert torch.equal(found.numbers, expected.numbers)
    assert_near(found.weights, expected.weights, 4 * 24)
