"""The kernel that emulates an all-reduce with ranks that do not exist."""

import torch
from torch import Tensor

from ladder.comm.one_shot import WARPS
from ladder.jit import cuda, tl, triton

_WORD = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


@triton.jit
def _emulate_all_reduce(x, n, flag, nanoseconds, FLAG: tl.constexpr, BLOCK: tl.constexpr):
    begun = cuda.globaltimer()
    block = tl.program_id(0)
    for at in range(block * BLOCK, n, tl.num_programs(0) * BLOCK):
        here = at + tl.arange(0, BLOCK)
        tl.store(x + here, tl.load(x + here, mask=here < n), mask=here < n)
    while cuda.globaltimer() - begun < nanoseconds:
        # asleep: a real all-reduce waits for its link, it does not compete for the core's arithmetic
        tl.inline_asm_elementwise(
            "nanosleep.u32 32; mov.u32 $0, 0;", "=r,r", [block], dtype=tl.int32, is_pure=False, pack=1
        )
    if FLAG:
        tl.debug_barrier()
        tl.atomic_add(flag, 1, sem="release", scope="gpu")


def emulate_all_reduce(x: Tensor, flag: Tensor | None, nanoseconds: int, blocks: int, warps: int = WARPS) -> None:
    """x <- x, no sooner than after `nanoseconds`; then flag <- flag + 1 from each of the blocks.

    Messages of megabytes are moved by more threads in each block: that must not take longer than their link.
    """
    words = x.view(-1).view(_WORD[x.element_size()])
    large = words.numel() >= 1 << 19
    _emulate_all_reduce[(blocks,)](
        words,
        words.numel(),
        flag,
        nanoseconds,
        FLAG=flag is not None,
        BLOCK=16384 if large else 1024,
        num_warps=16 if large else warps,
    )
