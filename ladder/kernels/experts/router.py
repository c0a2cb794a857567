"""The router: which experts each row of activations uses, and with what weights. The tiles of all expert kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ladder.jit import tl, triton
from ladder.kernels.device import let_others_start, product, wait_for_others

FEW = 16  # experts up to which every program makes the choice by itself: cheaper than another launch
PROGRAMS = 256  # two on each multiprocessor
SHARED = 100 * 1024  # bytes of shared memory for one program's tiles under way, so that two programs find room


@dataclass(frozen=True)
class ExpertConfig:
    """The tiles of one kernel."""

    rows: int  # of the weight; of up's pairs with several rows of activations, half of them are the gate's
    depth: int  # columns
    stages: int = 4
    warps: int = 4
    ahead: int = 0  # tiles that are asked into the L2 cache before the wait: down, one row
    programs: int = PROGRAMS  # dealt out to the choices: up, one row


def expert_config(kernel: str, batch: int, outputs: int, inputs: int, size: int, experts: int) -> ExpertConfig:
    """A configuration by rule, for `kernel` router, up or down.

    The matrix of one expert is [outputs, inputs] (for up: of the gate, and of up again) of `size` bytes an element. Not
    more than `experts` of them are chosen.
    """
    width = _power(2 * inputs - 1)
    if batch > 1:
        pair, depth = kernel == "up", max(16, min(width, 256 // size))
        if kernel == "router":
            return ExpertConfig(16, max(16, min(width, 512 // size)))
        rows = 64
        while rows > 16 * (1 + pair) and -(-outputs * (1 + pair) // rows) * experts < PROGRAMS:
            rows //= 2
        return ExpertConfig(rows, depth, stages=5 if batch <= 16 else 4)
    if kernel == "router":
        rows = max(1, min(_power(outputs // 64), _power((1 << 14) // width)))
        return ExpertConfig(rows, width)
    if kernel == "up":
        line = 2 * width * size
        rows = max(1, min(_power((24 << 10) // line), _power(outputs * experts // (2 * PROGRAMS))))
        stages = max(2, min(4, 1 + SHARED // (rows * line)))
        return ExpertConfig(rows, width, stages, 8 if line >= 1 << 14 else 4)
    rows = max(1, min(_power(outputs // PROGRAMS), 16))
    depth = min(width, (16 << 10) // size // rows)
    return ExpertConfig(rows, depth, warps=8 if rows * depth >= 1 << 13 else 4, ahead=2)


def _power(n: int) -> int:
    """The largest power of two that is not more than n, and one at least."""
    return 1 << (max(n, 1).bit_length() - 1)


@dataclass(frozen=True)
class Routing:
    """Which experts each row uses: the router's logits [rows, experts] in float32, and the choice where it is made."""

    logits: Tensor
    top_k: int
    normalize: bool
    numbers: Tensor | None = None  # int32 [rows, top_k]; None: every program of the next kernels makes the choice
    weights: Tensor | None = None  # float32 [rows, top_k]

    def modes(self) -> dict[str, object]:
        """What the kernels for one row are compiled for."""
        experts = self.logits.shape[1]
        return {
            "E": experts, "EP": triton.next_power_of_2(experts), "CHOICES": self.top_k,
            "KP": triton.next_power_of_2(self.top_k), "NORMALIZE": self.normalize, "CHOSEN": self.numbers is not None,
        }  # fmt: skip


@triton.jit
def _logits(x, router, out, M, E, K: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, MB: tl.constexpr,
            ONE: tl.constexpr, STAGES: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    k = tl.arange(0, BK)
    here = (e < E)[:, None]
    rows = router + e[:, None] * K
    if ONE:  # all columns at once, asked for before the wait
        inside = k < K
        w = tl.load(rows + k[None, :], mask=here & inside[None, :], other=0.0)
        wait_for_others(PDL)
        let_others_start(PDL)
        line = tl.load(x + k, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(out + e, tl.sum(w.to(tl.float32) * line[None, :], axis=1), mask=e < E)
    else:
        m = tl.program_id(1) * MB + tl.arange(0, MB)
        live = (m < M)[None, :]
        y = tl.zeros([BE, MB], tl.float32)
        wait_for_others(PDL)
        let_others_start(PDL)
        for at in tl.range(0, K, BK, num_stages=STAGES):
            inside = at + k < K
            w = tl.load(rows + (at + k)[None, :], mask=here & inside[None, :], other=0.0)
            xs = tl.load(x + m[None, :] * K + (at + k)[:, None], mask=inside[:, None] & live, other=0.0)
            y = product(w, xs, y, IEEE)
        tl.store(out + m[None, :] * E + e[:, None], y, mask=here & live)


@triton.jit
def _choice(logits, E: tl.constexpr, EP: tl.constexpr, CHOICES: tl.constexpr, KP: tl.constexpr,
            NORMALIZE: tl.constexpr):  # fmt: skip
    """Of one row: the chosen experts' numbers and weights, [KP] each, the likeliest first.

    A key has the logit in its upper half, as an integer of the same order, and in its lower half what makes the lower
    number the larger of equals. NaN counts as the largest logit: the numbers are always of experts, the weights NaN.
    """
    e = tl.arange(0, EP)
    k = tl.arange(0, KP)
    x = tl.load(logits + e, mask=e < E, other=float("-inf"), cache_modifier=".cg")
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - e).to(tl.int64)
    key = tl.where(e < E, key, -0x7FFFFFFFFFFFFFFF)
    numbers = tl.zeros([KP], tl.int32)
    for choice in tl.static_range(CHOICES):
        best = tl.max(key, axis=0)
        numbers = tl.where(k == choice, (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32), numbers)
        key = tl.where(key == best, -0x7FFFFFFFFFFFFFFF, key)
    share = tl.exp(x - tl.max(tl.where(x == x, x, float("inf")), axis=0))
    share = share / tl.sum(share, axis=0)
    it = (numbers[:, None] == e[None, :]) & (k < CHOICES)[:, None]
    weights = tl.sum(tl.where(it, share[None, :], 0.0), axis=1)
    if NORMALIZE:
        weights = weights / tl.sum(weights, axis=0)
    return numbers, weights


@triton.jit
def _choose(logits, numbers, weights, E: tl.constexpr, EP: tl.constexpr, CHOICES: tl.constexpr, KP: tl.constexpr,
            NORMALIZE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    k = tl.arange(0, KP)
    wait_for_others(PDL)
    let_others_start(PDL)
    number, weight = _choice(logits + row * E, E, EP, CHOICES, KP, NORMALIZE)
    tl.store(numbers + row * CHOICES + k, number, mask=k < CHOICES)
    tl.store(weights + row * CHOICES + k, weight, mask=k < CHOICES)


@triton.jit
def local_choice(logits, numbers, weights, first, local, E: tl.constexpr, EP: tl.constexpr, CHOICES: tl.constexpr,
                  KP: tl.constexpr, NORMALIZE: tl.constexpr, CHOSEN: tl.constexpr):  # fmt: skip
    """Of one row: the choices' experts and weights, their order among this rank's choices (else -1), how many."""
    k = tl.arange(0, KP)
    if CHOSEN:
        number = tl.load(numbers + k, mask=k < CHOICES, other=0, cache_modifier=".cg")
        weight = tl.load(weights + k, mask=k < CHOICES, other=0.0, cache_modifier=".cg")
    else:
        number, weight = _choice(logits, E, EP, CHOICES, KP, NORMALIZE)
    expert = number - first
    here = (k < CHOICES) & (expert >= 0) & (expert < local)
    order = tl.where(here, tl.cumsum(here.to(tl.int32), axis=0) - 1, -1)
    return expert, weight, order, tl.sum(here.to(tl.int32), axis=0)


def router_logits(x: Tensor, router: Tensor, pdl: bool, config: ExpertConfig | None = None) -> Tensor:
    """x R^T in float32: x [rows, hidden], R [experts, hidden]."""
    rows, width = x.shape
    experts = router.shape[0]
    c = config or expert_config("router", rows, experts, width, x.element_size(), experts)
    out = torch.empty(rows, experts, dtype=torch.float32, device=x.device)
    _logits[(-(-experts // c.rows), -(-rows // 16))](
        x, router, out, rows, experts, K=width, BK=c.depth, BE=c.rows, MB=16, ONE=rows == 1, STAGES=c.stages,
        IEEE=x.dtype is torch.float32, PDL=pdl, num_warps=c.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def choose(logits: Tensor, top_k: int, normalize: bool, pdl: bool) -> tuple[Tensor, Tensor]:
    """The numbers and weights of the `top_k` largest of p = softmax(logits), [rows, top_k] each; of equals the lower
    number comes first. `normalize`: the weights are divided by their sum.
    """
    rows, experts = logits.shape
    numbers = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    _choose[(rows,)](
        logits, numbers, weights, E=experts, EP=triton.next_power_of_2(experts), CHOICES=top_k,
        KP=triton.next_power_of_2(top_k), NORMALIZE=normalize, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return numbers, weights


def route(x: Tensor, router: Tensor, top_k: int, normalize: bool, pdl: bool) -> Routing:
    """The router's logits, and the choice where the next kernels do not make it themselves."""
    logits = router_logits(x, router, pdl)
    if len(x) == 1 and logits.shape[1] <= FEW:
        return Routing(logits, top_k, normalize)
    return Routing(logits, top_k, normalize, *choose(logits, top_k, normalize, pdl))


def choose_reference(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    shares, numbers = F.softmax(logits, dim=-1).sort(dim=-1, descending=True, stable=True)
    weights = shares[:, :top_k]
    return numbers[:, :top_k].int(), weights / weights.sum(-1, keepdim=True) if normalize else weights


def route_reference(x: Tensor, router: Tensor, top_k: int, normalize: bool) -> Routing:
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x.to(wide), router.to(wide))
    return Routing(logits, top_k, normalize, *choose_reference(logits, top_k, normalize))
