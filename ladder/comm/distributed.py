"""torch.distributed as the backend: gloo between CPU processes, NCCL between GPUs."""

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm.base import Pending

SMALL = 4 << 20  # bytes of a message that is sent in the limited group: any of a decode step by kernels


class Distributed:
    """The ranks of a process group (by default: of all processes), which the caller has set up."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        limited: dist.ProcessGroup | None = None,
        multiprocessors: int = 0,
    ) -> None:
        """`limited`: another group of the same ranks, in which NCCL was told to use at most so many `multiprocessors`:
        for all-reduces of a decode step, beside which kernels poll flags. See `Comm`.
        """
        self._group = group
        self._limited = limited
        self.multiprocessors = 0 if limited is None else multiprocessors
        self.capturable = dist.get_backend(group) == "nccl"  # its all-reduces can be part of a CUDA graph
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def all_reduce(self, x: Tensor) -> Pending:
        x = x.contiguous()
        small = self._limited is not None and x.numel() * x.element_size() <= SMALL
        work = dist.all_reduce(x, group=self._limited if small else self._group, async_op=True)
        assert work is not None  # async_op always returns one to a member of the group
        return _Pending(x, work)

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self._group)
        return torch.cat(parts, dim=-1)


class _Pending:
    """An all-reduce in flight; keeps its buffer alive."""

    def __init__(self, x: Tensor, work: dist.Work) -> None:
        self._x = x
        self._work = work

    def wait(self) -> Tensor:
        self._work.wait()
        return self._x
