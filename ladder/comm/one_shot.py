"""Our own one-shot all-reduce kernel over symmetric memory: few enough blocks to run beside any other kernel, and it
sets a flag.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ladder.jit import tl, triton

BLOCKS = 8  # thread blocks of an all-reduce, the same for every message: each waits for the same block of its peers
WARPS = 4
LARGEST = 256 * 1024  # bytes of a message; beyond, reading every peer's message takes longer than is saved
_SIGNS = 2 * LARGEST  # where in a rank's memory the signals of its peers begin


@triton.jit
def _at(base, offset, like):
    """An address in a rank's memory as a pointer of the type of `like`."""
    return (base + offset).to(like.dtype, bitcast=True)


@triton.jit
def _one_shot(x, signs, n, peers, epochs, flag, RANK: tl.constexpr, SIZE: tl.constexpr, ROOM: tl.constexpr,
              SIGNS: tl.constexpr, FLAG: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    i = tl.arange(0, BLOCK)
    epoch = tl.load(epochs + block) + 1
    tl.debug_barrier()  # all have read it before one writes
    tl.store(epochs + block, epoch)
    # two buffers in turn: a rank that writes one has waited, for the other, for all that read this one
    room = (epoch & 1).to(tl.int64) * ROOM
    mine = tl.load(peers + RANK)
    own = _at(mine, room, x)
    for at in range(block * BLOCK, n, blocks * BLOCK):
        tl.store(own + at + i, tl.load(x + at + i, mask=at + i < n), mask=at + i < n)
    tl.debug_barrier()
    for peer in range(SIZE):
        sign = _at(tl.load(peers + peer), SIGNS, signs)
        tl.atomic_xchg(sign + block * SIZE + RANK, epoch, sem="release", scope="sys")
    seen = _at(mine, SIGNS, signs) + block * SIZE
    for peer in range(SIZE):
        tl.inline_asm_elementwise(
            # by their difference: the count of all-reduces wraps around after some hours
            "{ .reg .pred p; MEET: ld.acquire.sys.global.s32 $0, [$1]; sub.s32 $0, $0, $2; setp.lt.s32 p, $0, 0;"
            " @p bra MEET; }",
            "=&r,l,r",
            [(seen + peer).to(tl.int64), epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()
    for at in range(block * BLOCK, n, blocks * BLOCK):
        total = tl.zeros([BLOCK], tl.float32)
        for peer in range(SIZE):  # in rank order: all ranks get the same bits
            there = _at(tl.load(peers + peer), room, x)
            total += tl.load(there + at + i, mask=at + i < n, other=0.0, volatile=True).to(tl.float32)
        tl.store(x + at + i, total.to(x.dtype.element_ty), mask=at + i < n)
    if FLAG:
        tl.debug_barrier()
        tl.atomic_add(flag, 1, sem="release", scope="gpu")


class OneShot:
    """All-reduces of messages up to LARGEST bytes; they follow each other in one stream.

    Each rank's memory holds two buffers for messages and, for each of BLOCKS blocks, a signal from every rank: the
    number of the last all-reduce for which it has written its message.
    """

    def __init__(self, memory: Tensor, addresses: Sequence[int], rank: int, size: int) -> None:
        """`memory` as made by `room`; `addresses`: where this process has mapped each rank's."""
        device = memory.device
        self._memory = memory
        self._peers = torch.tensor(addresses, dtype=torch.long, device=device)
        self._epochs = torch.zeros(BLOCKS, dtype=torch.int32, device=device)
        self._signs = torch.zeros(1, dtype=torch.int32, device=device)  # a pointer's type
        self._rank, self._size = rank, size

    @staticmethod
    def room(symm: Any, size: int, device: torch.device) -> Tensor:
        """One rank's memory, all zero; `symm` is torch's module of symmetric memory."""
        memory: Tensor = symm.empty((_SIGNS + BLOCKS * size * 4,), dtype=torch.uint8, device=device)
        memory.zero_()
        torch.cuda.synchronize(device)  # before a peer maps it
        return memory

    @staticmethod
    def fits(x: Tensor) -> bool:
        return x.numel() * x.element_size() <= LARGEST and x.dtype in (torch.float32, torch.bfloat16, torch.float16)

    def add(self, x: Tensor, flag: Tensor | None) -> None:
        """x <- sum over the ranks of x, in the current stream; then flag <- flag + 1 from each of the BLOCKS."""
        _one_shot[(BLOCKS,)](
            x, self._signs, x.numel(), self._peers, self._epochs, flag, RANK=self._rank, SIZE=self._size,
            ROOM=LARGEST, SIGNS=_SIGNS, FLAG=flag is not None, BLOCK=1024, num_warps=WARPS,
        )  # fmt: skip
