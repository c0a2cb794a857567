"""Device functions shared by kernels: early start, waiting for other kernels and for all-reduces; activations, norms.

A kernel is launched while the one before it still runs (programmatic dependent launch): it loads its weights, which
no kernel writes, and only then waits. What was written two kernels ago may be read before that wait, too: the kernel
before this one lets it start only after its own wait. `PDL` false leaves all of that out, for Triton's interpreter and
for older chips.

The grid of a kernel that waits for an all-reduce must not be larger than what the chip can hold at once, or it keeps
out the kernel that does it. Of two lanes only one has such kernels (see lanes.py); the other's end by themselves.
"""

from ladder.jit import cuda, tl, triton

# numbers of the activations, by their names in config.json
ACTIVATIONS: dict[str | None, int] = {None: 0, "silu": 1, "gelu": 2, "gelu_pytorch_tanh": 3, "gelu_new": 3, "relu": 4}
RMS, LAYER = 1, 2  # kinds of norm; 0: none


@triton.jit
def wait_for_others(PDL: tl.constexpr):
    """Go on when everything launched before has finished and can be read."""
    if PDL:
        cuda.gdc_wait()


@triton.jit
def let_others_start(PDL: tl.constexpr):
    """The next kernel may be launched now."""
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_flag(flag, need):
    """Go on when the communication stream has counted `flag` up to `need`: what it wrote before can be read."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; AGAIN: ld.acquire.gpu.global.s32 $0, [$1]; setp.lt.s32 p, $0, $2; @p bra AGAIN; }",
        "=&r,l,r",
        [flag.to(tl.int64), need],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def cache_line(table, position, inside, BLOCK: tl.constexpr):
    """The line of the KV cache that holds a position of the sequence whose blocks `table` lists."""
    block = tl.load(table + position // BLOCK, mask=inside, other=0)
    return block.to(tl.int64) * BLOCK + position % BLOCK


@triton.jit
def cached(x, KIND: tl.constexpr):
    """x as a KV cache of this type holds it, in x's own type. Of fp8 (e4m3) that is the number nearest to x, the even
    one of two, and at most 448. It is found in float32: a cast may do anything with numbers that fp8 does not have, and
    what was cast to fp8 must not be cast back (ptxas 12.8 then reads a register that nothing has written).
    """
    if tl.float8e4nv == KIND:
        kept = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        power = (kept.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # 2^e, e rounded down
        # fp8's numbers are 2^(e - 3) apart, as are those of float32 around 1.5 * 2^(e + 20); below 2^-6 as above it
        large = tl.maximum(power, 0.015625) * 1572864.0
        return ((kept + large) - large).to(x.dtype)
    else:
        return x


@triton.jit
def product(a, b, c, IEEE: tl.constexpr):
    """a b + c; float32 operands are multiplied as such where IEEE says so."""
    if IEEE:
        return tl.dot(a, b, c, input_precision="ieee")
    else:
        return tl.dot(a, b, c)


@triton.jit
def activated(x, ACT: tl.constexpr):
    """The activation of this number (see `ACTIVATIONS`); 0: none."""
    if ACT == 1:
        return x * tl.sigmoid(x)
    elif ACT == 2:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == 3:  # 0.5 (1 + tanh(u)) is sigmoid(2 u)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == 4:
        return tl.maximum(x, 0.0)
    else:
        return x


@triton.jit
def write_products(y, bias, plus, out, scale, alpha, tile, split, first, M, N, PAIR: tl.constexpr, ACT: tl.constexpr,
                   BIAS: tl.constexpr, PLUS: tl.constexpr, ALPHA: tl.constexpr):  # fmt: skip
    """What is left of `small_gemm` when y has the products [rows of a tile, rows of x]; the first half of a pair's rows
    are the gate's. `first`: the first of those rows of x.
    """
    outputs: tl.constexpr = y.shape[0] // (1 + PAIR)
    r = tile * outputs + tl.arange(0, outputs)
    m = first + tl.arange(0, y.shape[1])
    if BIAS:
        if split == 0:
            j = tl.arange(0, y.shape[0])
            line = tile * outputs + j % outputs
            y += tl.load(bias + line + j // outputs * N, mask=line < N, other=0.0).to(tl.float32)[:, None]
    if PAIR:
        gate, up = y.reshape(2, outputs, y.shape[1]).permute(1, 2, 0).split()
        y = activated(gate, ACT) * up
    else:
        y = activated(y, ACT)
    if ALPHA:
        y = y * alpha
    kept = (r < N)[:, None] & (m < M)[None, :]
    there = (split * M + m)[None, :] * N + r[:, None]
    if PLUS:
        y += scale * tl.load(plus + there, mask=kept, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(out + there, y.to(out.dtype.element_ty), mask=kept)


@triton.jit
def added(x, more):
    """x + more, rounded to the stream's type as torch does."""
    return (x + more.to(tl.float32)).to(more.dtype).to(tl.float32)


@triton.jit
def wait_for_all(flag1, flag2, need, FLAGS: tl.constexpr, PDL: tl.constexpr):
    """Go on when the all-reduces are complete and everything launched before has finished.

    In this order: under a lag the all-reduces are complete first, and asking for their flags costs no time of its own.
    The flags were reset by the step's first kernel, which has finished when the second one after it starts.
    """
    if FLAGS >= 1:
        wait_for_flag(flag1, need)
    if FLAGS >= 2:
        wait_for_flag(flag2, need)
    wait_for_others(PDL)


@triton.jit
def asked_for(base, first, second, drift1, drift2, at, inside, SUMS: tl.constexpr, DRIFTS: tl.constexpr):
    """The terms of the stream, all of which are complete by now: base, sums, drifts; base itself where there is none.

    What other kernels or the communication stream have written is read past the first-level cache, which may be stale.
    """
    x = tl.load(base + at, mask=inside, other=0.0, cache_modifier=".cg")
    local, newer, one, other = x, x, x, x
    if DRIFTS >= 1:
        local = tl.load(drift1 + at, mask=inside, other=0.0, cache_modifier=".cg")
    if DRIFTS >= 2:
        newer = tl.load(drift2 + at, mask=inside, other=0.0, cache_modifier=".cg")
    if SUMS >= 1:
        one = tl.load(first + at, mask=inside, other=0.0, cache_modifier=".cg")
    if SUMS >= 2:
        other = tl.load(second + at, mask=inside, other=0.0, cache_modifier=".cg")
    return x, one, other, local, newer


@triton.jit
def added_up(terms, saved, at, inside, save, SUMS: tl.constexpr, DRIFTS: tl.constexpr):
    """base + sums + drifts. base + sums is kept where `save` says so: no other terms should be asked for after that,
    since a load is made to wait for a store that it might have to see.
    """
    x, one, other, local, newer = terms
    x = x.to(tl.float32)
    if SUMS >= 1:
        x = added(x, one)
    if SUMS >= 2:
        x = added(x, other)
    agreed = x
    if DRIFTS >= 1:
        x = added(x, local)
    if DRIFTS >= 2:
        x = added(x, newer)
    if SUMS >= 1:
        tl.store(saved + at, agreed.to(saved.dtype.element_ty), mask=inside & save)
    return x


@triton.jit
def gathered(base, first, second, drift1, drift2, saved, at, inside, save, SUMS: tl.constexpr, DRIFTS: tl.constexpr):
    """`added_up`, of what is asked for here."""
    terms = asked_for(base, first, second, drift1, drift2, at, inside, SUMS, DRIFTS)
    return added_up(terms, saved, at, inside, save, SUMS, DRIFTS)


@triton.jit
def normalized(x, g, norm_bias, cols, inside, eps, K: tl.constexpr, NORM: tl.constexpr):
    """x * g, and the factor that a root-mean-square norm multiplies it by; of a centered norm, the whole norm and 1."""
    if NORM == 2:
        x = tl.where(inside, x - tl.sum(x) / K, 0.0)
        x = x * tl.rsqrt(tl.sum(x * x) / K + eps) * g
        return x + tl.load(norm_bias + cols, mask=inside, other=0.0).to(tl.float32), 1.0
    else:
        return x * g, tl.rsqrt(tl.sum(x * x) / K + eps)


@triton.jit
def normalized_halves(x, y, g, h, norm_bias, at, other, inside, eps, K: tl.constexpr, NORM: tl.constexpr):
    """`normalized` of a row whose numbers are in x and y, with the gains g and h, at two places."""
    if NORM == 2:
        mean = tl.sum(x + y) / K
        x, y = tl.where(inside, x - mean, 0.0), tl.where(inside, y - mean, 0.0)
        factor = tl.rsqrt(tl.sum(x * x + y * y) / K + eps)
        x = x * factor * g + tl.load(norm_bias + at, mask=inside, other=0.0).to(tl.float32)
        return x, y * factor * h + tl.load(norm_bias + other, mask=inside, other=0.0).to(tl.float32), 1.0
    else:
        return x * g, y * h, tl.rsqrt(tl.sum(x * x + y * y) / K + eps)
