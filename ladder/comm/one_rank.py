"""One rank of many, measured alone: an all-reduce takes the time of the link, and adds nothing."""

import torch
from torch import Tensor

from ladder.comm.base import Completed, Pending
from ladder.comm.link import Link
from ladder.comm.one_shot import BLOCKS, WARPS


class OneRank:
    """Rank 0 of `size` ranks of which only this one exists.

    The result of an all-reduce is this rank's own partial sum. On a GPU a kernel in the current stream moves the
    message through memory and occupies `blocks` thread blocks for alpha + bytes / beta by the GPU's own clock, as
    a real all-reduce would. Without a link it takes no time. The output is not the model's: use it to measure.
    """

    capturable = True
    WARPS = WARPS  # of each of its thread blocks

    def __init__(self, size: int, link: Link | None = None, blocks: int = BLOCKS) -> None:
        self.size = size
        self.rank = 0
        self.blocks = blocks
        self._link = link

    def all_reduce(self, x: Tensor) -> Pending:
        self._emulate(x, None)
        return Completed(x)

    def all_reduce_and_signal(self, x: Tensor, flag: Tensor) -> tuple[Tensor, int] | None:
        """The all-reduce, in the current stream, and what it counts `flag` up to."""
        if not self._emulate(x, flag):
            flag.fill_(self.blocks)
        return x, self.blocks

    def all_gather(self, x: Tensor) -> Tensor:
        self._emulate(x, None)
        return torch.cat([x] * self.size, dim=-1)

    def _emulate(self, x: Tensor, flag: Tensor | None) -> bool:
        if self._link is None or not x.is_cuda:
            return False
        from ladder.comm.link_kernel import emulate_all_reduce

        nanoseconds = int(self._link.seconds(x.numel() * x.element_size()) * 1e9)
        emulate_all_reduce(x, flag, nanoseconds, self.blocks, self.WARPS)
        return True


class LibraryRank(OneRank):
    """The same where a library adds up, as NCCL does: an all-reduce sets no flag, and each of its thread blocks has as
    many threads as a multiprocessor gives to one (512 for messages of a megabyte and more). `multiprocessors`: see
    `Comm`; 0: it does not say.
    """

    WARPS = 32

    def __init__(self, size: int, link: Link | None = None, multiprocessors: int = 0) -> None:
        super().__init__(size, link)
        self.multiprocessors = multiprocessors

    def all_reduce_and_signal(self, x: Tensor, flag: Tensor) -> None:
        return None
