"""Decoding with experts: up to 64 rows, and only the weights of chosen experts are read, each once.

    one row        logits, up, down                    every program of up and down makes the choice by itself
    several rows   logits, choose, up, down, combine   a program takes one expert, for all rows that chose it

No grid depends on the choice, and nothing is kept between launches: a CUDA graph can hold all of it. With `pdl` the
order of launches above matters (see device.py): up reads x, and down reads the choice, before the kernel between has
finished.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ladder.jit import tl, triton
from ladder.kernels.device import ACTIVATIONS, activated, let_others_start, product, wait_for_others
from ladder.kernels.experts.router import ExpertConfig, Routing, expert_config, local_choice
from ladder.layers.activation import activate


@triton.jit
def _up_one(x, weight, logits, numbers, weights, out, first, local, N,
            K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
            CHOICES: tl.constexpr, KP: tl.constexpr, NORMALIZE: tl.constexpr, CHOSEN: tl.constexpr,
            ACT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    k = tl.arange(0, BK)
    inside = k < K
    line = tl.load(x + k, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    wait_for_others(PDL)
    let_others_start(PDL)
    experts, _, order, count = local_choice(logits, numbers, weights, first, local, E, EP, CHOICES, KP, NORMALIZE,
                                             CHOSEN)  # fmt: skip
    # the programs are dealt out to this rank's choices in equal numbers
    programs = tl.num_programs(0) // tl.maximum(count, 1)
    mine = tl.program_id(0) // programs
    begin = tl.program_id(0) % programs
    it = order == mine
    expert = tl.sum(tl.where(it, experts, 0), axis=0)
    choice = tl.sum(tl.where(it, tl.arange(0, KP), 0), axis=0)
    turns = tl.where(mine < count, tl.cdiv(tl.cdiv(N, BN) - begin, programs), 0)
    matrix = weight + expert.to(tl.int64) * 2 * N * K
    j = tl.arange(0, 2 * BN)  # a tile's first half has rows of the gate, the second those of up
    for turn in tl.range(0, turns, num_stages=STAGES):
        tile = begin + turn * programs
        r = tile * BN + j % BN
        at = (r + j // BN * N).to(tl.int64)[:, None] * K + k[None, :]
        w = tl.load(matrix + at, mask=(r < N)[:, None] & inside[None, :], other=0.0)
        gate, up = tl.sum(w.to(tl.float32) * line[None, :], axis=1).reshape(2, BN).permute(1, 0).split()
        r = tile * BN + tl.arange(0, BN)
        tl.store(out + choice * N + r, (activated(gate, ACT) * up).to(out.dtype.element_ty), mask=r < N)


@triton.jit
def _ask_ahead(pointers):
    """Ask for the cache lines of `pointers` into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _down_one(hidden, weight, logits, numbers, weights, plus, out, first, local, scale, share, N,
              K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, LINE: tl.constexpr, E: tl.constexpr,
              EP: tl.constexpr, CHOICES: tl.constexpr, KP: tl.constexpr, NORMALIZE: tl.constexpr, CHOSEN: tl.constexpr,
              PLUS: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    r = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    choices = tl.arange(0, KP)
    tiles: tl.constexpr = (K + BK - 1) // BK  # of one choice
    experts, shares, order, count = local_choice(logits, numbers, weights, first, local, E, EP, CHOICES, KP, NORMALIZE,
                                                  CHOSEN)  # fmt: skip
    if PDL:
        for tile in tl.static_range(AHEAD):
            if tile < count * tiles:
                expert = tl.sum(tl.where(order == tile // tiles, experts, 0), axis=0)
                rows = expert.to(tl.int64) * N + tl.minimum(r, N - 1)
                columns = tl.minimum(tile % tiles * BK + tl.arange(0, BK // LINE) * LINE, K - 1)
                _ask_ahead(weight + rows[:, None] * K + columns[None, :])
    wait_for_others(PDL)
    let_others_start(PDL)
    y = tl.zeros([BN, BK], tl.float32)
    for tile in tl.range(0, count * tiles, num_stages=STAGES):
        it = order == tile // tiles
        expert = tl.sum(tl.where(it, experts, 0), axis=0)
        choice = tl.sum(tl.where(it, choices, 0), axis=0)
        at = tile % tiles * BK + k
        inside = at < K
        rows = expert.to(tl.int64) * N + r
        w = tl.load(weight + rows[:, None] * K + at[None, :], mask=(r < N)[:, None] & inside[None, :], other=0.0)
        x = tl.load(hidden + choice * K + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        y += w.to(tl.float32) * (x * tl.sum(tl.where(it, shares, 0.0), axis=0))[None, :]
    out_r = scale * tl.sum(y, axis=1)
    if PLUS:
        out_r += share * tl.load(plus + r, mask=r < N, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(out + r, out_r.to(out.dtype.element_ty), mask=r < N)


@triton.jit
def _grouped(x, weight, numbers, out, first, M, N, K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
             MB: tl.constexpr, CHOICES: tl.constexpr, KP: tl.constexpr, UP: tl.constexpr, ACT: tl.constexpr,
             STAGES: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    expert = tl.program_id(1)
    m = tl.arange(0, MB)
    choice = tl.arange(0, KP)
    there = (m < M)[:, None] & (choice < CHOICES)[None, :]
    if UP:  # the kernel before this one made the choice; for down it was the one before that
        wait_for_others(PDL)
    entries = m[:, None] * CHOICES + choice[None, :]
    number = tl.load(numbers + entries, mask=there, other=-1, cache_modifier=".cg")
    it = number == first + expert
    live = tl.max(it.to(tl.int32), axis=1) > 0  # the rows that chose this expert
    entry = m * CHOICES + tl.sum(tl.where(it, choice[None, :], 0), axis=1)
    if not UP:
        wait_for_others(PDL)
    let_others_start(PDL)
    if tl.sum(live.to(tl.int32), axis=0) > 0:
        outputs: tl.constexpr = BN // 2 if UP else BN
        j = tl.arange(0, BN)
        k = tl.arange(0, BK)
        r = tl.program_id(0) * outputs + j % outputs
        here = (r < N)[:, None]
        # of a pair, the tile's first half has rows of the gate, the second those of up
        line = expert.to(tl.int64) * ((1 + UP) * N) + r + j // outputs * N
        rows = weight + line[:, None] * K
        lines = x + (m if UP else entry)[None, :] * K
        y = tl.zeros([BN, MB], tl.float32)
        for at in tl.range(0, K, BK, num_stages=STAGES):
            inside = at + k < K
            xs = tl.load(lines + (at + k)[:, None], mask=inside[:, None] & live[None, :], other=0.0)
            w = tl.load(rows + (at + k)[None, :], mask=here & inside[None, :], other=0.0)
            y = product(w, xs, y, IEEE)
        if UP:
            gate, up = y.reshape(2, outputs, MB).permute(1, 2, 0).split()
            y = activated(gate, ACT) * up
            r = tl.program_id(0) * outputs + tl.arange(0, outputs)
            here = (r < N)[:, None]
        tl.store(out + entry[None, :] * N + r[:, None], y.to(out.dtype.element_ty), mask=here & live[None, :])


@triton.jit
def _combine(parts, numbers, weights, plus, out, first, local, scale, share, N, BN: tl.constexpr,
             CHOICES: tl.constexpr, KP: tl.constexpr, PLUS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    m = tl.program_id(1)
    r = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, KP)
    expert = tl.load(numbers + m * CHOICES + k, mask=k < CHOICES, other=-1) - first
    here = (k < CHOICES) & (expert >= 0) & (expert < local)
    p = tl.load(weights + m * CHOICES + k, mask=here, other=0.0)
    wait_for_others(PDL)
    let_others_start(PDL)
    at = (m * CHOICES + k)[:, None] * N + r[None, :]
    part = tl.load(parts + at, mask=here[:, None] & (r < N)[None, :], other=0.0, cache_modifier=".cg")
    y = scale * tl.sum(part * p[:, None], axis=0)
    if PLUS:
        y += share * tl.load(plus + m * N + r, mask=r < N, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(out + m * N + r, y.to(out.dtype.element_ty), mask=r < N)


def expert_up(
    x: Tensor, up: Tensor, routing: Routing, first: int, local: int, activation: str, pdl: bool,
    config: ExpertConfig | None = None,
) -> Tensor:  # fmt: skip
    """[rows, top_k, ffn]: activation(G_e x) * U_e x of every row's choices e that are in [first, first + local).

    `up` [local * 2 * ffn, hidden] has G and then U of one expert after the other. What belongs to other experts is not
    written.
    """
    (rows, width), ffn, top_k = x.shape, up.shape[0] // (2 * local), routing.top_k
    most = top_k if rows == 1 else min(local, rows * top_k)
    c = config or expert_config("up", rows, ffn, width, x.element_size(), most)
    out = x.new_empty(rows, top_k, ffn)
    if rows == 1:
        _up_one[(max(c.programs, top_k),)](
            x, up, routing.logits, routing.numbers, routing.weights, out, first, local, ffn,
            K=width, BK=triton.next_power_of_2(width), BN=c.rows, **routing.modes(), ACT=ACTIVATIONS[activation],
            STAGES=c.stages, PDL=pdl, num_warps=c.warps, launch_pdl=pdl,
        )  # fmt: skip
    else:
        _launch_grouped(x, up, routing, out, first, local, ffn, width, activation, c, pdl)
    return out


def expert_down(
    hidden: Tensor, down: Tensor, routing: Routing, first: int, local: int, plus: Tensor | None, divisor: int,
    scale: float, pdl: bool, config: ExpertConfig | None = None,
) -> Tensor:  # fmt: skip
    """[rows, hidden]: scale * sum over the row's choices e in [first, first + local) of p_e D_e h_e, + plus / divisor.

    `hidden` [rows, top_k, ffn] is what `expert_up` gave; `down` [local * hidden, ffn] has D of one expert after the
    other. The terms are added in the same order every time.
    """
    (rows, top_k, width), outputs = hidden.shape, down.shape[0] // local
    most = top_k if rows == 1 else min(local, rows * top_k)
    c = config or expert_config("down", rows, outputs, width, hidden.element_size(), most)
    out = hidden.new_empty(rows, outputs)
    if rows == 1:
        _down_one[(-(-outputs // c.rows),)](
            hidden, down, routing.logits, routing.numbers, routing.weights, plus, out, first, local, scale, 1 / divisor,
            outputs, K=width, BK=c.depth, BN=c.rows, LINE=min(c.depth, 128 // hidden.element_size()),
            **routing.modes(), PLUS=plus is not None, AHEAD=c.ahead, STAGES=c.stages, PDL=pdl, num_warps=c.warps,
            launch_pdl=pdl,
        )  # fmt: skip
        return out
    parts = torch.empty(rows, top_k, outputs, dtype=torch.float32, device=hidden.device)
    _launch_grouped(hidden, down, routing, parts, first, local, outputs, width, None, c, pdl)
    block = min(512, triton.next_power_of_2(outputs))
    _combine[(-(-outputs // block), rows)](
        parts, routing.numbers, routing.weights, plus, out, first, local, scale, 1 / divisor, outputs, BN=block,
        CHOICES=top_k, KP=triton.next_power_of_2(top_k), PLUS=plus is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _launch_grouped(
    x: Tensor, weight: Tensor, routing: Routing, out: Tensor, first: int, local: int, outputs: int, width: int,
    activation: str | None, config: ExpertConfig, pdl: bool,
) -> None:  # fmt: skip
    up, rows = activation is not None, len(out)
    _grouped[(-(-outputs * (1 + up) // config.rows), local)](
        x, weight, routing.numbers, out, first, rows, outputs, K=width, BK=config.depth, BN=config.rows,
        MB=max(16, triton.next_power_of_2(rows)), CHOICES=routing.top_k, KP=triton.next_power_of_2(routing.top_k),
        UP=up, ACT=ACTIVATIONS[activation], STAGES=config.stages, IEEE=x.dtype is torch.float32, PDL=pdl,
        num_warps=config.warps, launch_pdl=pdl,
    )  # fmt: skip


def expert_up_reference(
    x: Tensor, up: Tensor, routing: Routing, first: int, local: int, activation: str
) -> Tensor:  # fmt: skip
    """The same with torch; zero for experts of other ranks."""
    assert routing.numbers is not None
    matrices = up.view(local, -1, up.shape[1])
    out = x.new_zeros(len(x), routing.top_k, matrices.shape[1] // 2)
    for expert in range(local):
        rows, choices = torch.where(routing.numbers == first + expert)
        out[rows, choices] = activate(F.linear(x[rows], matrices[expert]), activation, gated=True)
    return out


def expert_down_reference(
    hidden: Tensor, down: Tensor, routing: Routing, first: int, local: int, plus: Tensor | None, divisor: int,
    scale: float,
) -> Tensor:  # fmt: skip
    assert routing.numbers is not None and routing.weights is not None
    matrices = down.view(local, -1, down.shape[1])
    out = hidden.new_zeros(len(hidden), matrices.shape[1])
    for expert in range(local):
        rows, choices = torch.where(routing.numbers == first + expert)
        term = F.linear(hidden[rows, choices], matrices[expert]) * routing.weights[rows, choices, None]
        out = out.index_add(0, rows, term.to(out.dtype))
    return scale * out if plus is None else scale * out + plus / divisor
