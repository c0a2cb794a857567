"""What every kernel needs of the chip: an early start, the wait for what came before, and the wait for a sum.

A kernel is launched while the one before it still runs (programmatic dependent launch): it asks for its weights, which
nobody writes, and only then waits. What was written two kernels ago may be read before that wait, too: the kernel
before this one lets it start only after its own wait. `PDL` false leaves all of that out, for Triton's interpreter and
for older chips.

The grid of a kernel that waits for a sum must not be larger than what the chip can hold at once, or it keeps out the
kernel that brings it.
"""

from ladder.jit import cuda, tl, triton


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
def product(a, b, c, IEEE: tl.constexpr):
    """a b + c; float32 operands are multiplied as such where IEEE says so."""
    if IEEE:
        return tl.dot(a, b, c, input_precision="ieee")
    else:
        return tl.dot(a, b, c)


@triton.jit
def added(x, more):
    """x + more, rounded to the stream's type as torch does."""
    return (x + more.to(tl.float32)).to(more.dtype).to(tl.float32)


@triton.jit
def wait_for_all(flag1, flag2, need, FLAGS: tl.constexpr, PDL: tl.constexpr):
    """Go on when the sums have arrived and everything launched before has finished.

    In this order: under a lag the sums are there first, and asking for their flags costs no time of its own. The flags
    were put down by the step's first kernel, which has finished when the second after it, or any later one, starts.
    """
    if FLAGS >= 1:
        wait_for_flag(flag1, need)
    if FLAGS >= 2:
        wait_for_flag(flag2, need)
    wait_for_others(PDL)


@triton.jit
def gathered(base, first, second, drift, saved, at, inside, save, SUMS: tl.constexpr, DRIFT: tl.constexpr):
    """base + sums + drift, all of which are there by now. base + sums is kept where `save` says so.

    What other kernels or the communication stream have written is read past the first-level cache, which may be stale.
    Everything is asked for before anything is kept: no load is made to wait for a store it might have to see.
    """
    x = tl.load(base + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if DRIFT:
        local = tl.load(drift + at, mask=inside, other=0.0, cache_modifier=".cg")
    if SUMS >= 1:
        one = tl.load(first + at, mask=inside, other=0.0, cache_modifier=".cg")
    if SUMS >= 2:
        other = tl.load(second + at, mask=inside, other=0.0, cache_modifier=".cg")
    if SUMS >= 1:
        x = added(x, one)
    if SUMS >= 2:
        x = added(x, other)
    agreed = x
    if DRIFT:
        x = added(x, local)
    if SUMS >= 1:
        tl.store(saved + at, agreed.to(saved.dtype.element_ty), mask=inside & save)
    return x
