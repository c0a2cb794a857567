"""A communicator without overlap: each all-reduce is waited for where it begins, as the standard wiring does."""

from torch import Tensor

from ladder.comm.base import Comm, Completed, Pending


class AtOnce:
    """`inner`, but an all-reduce is complete when `all_reduce` returns.

    A model of any wiring computes the same on it, bit for bit, with the schedule of the standard wiring: nothing
    computes while an all-reduce runs. So one model shows what the overlap is worth.
    """

    def __init__(self, inner: Comm) -> None:
        self._inner = inner
        self.size = inner.size
        self.rank = inner.rank

    def all_reduce(self, x: Tensor) -> Pending:
        return Completed(self._inner.all_reduce(x).wait())

    def all_gather(self, x: Tensor) -> Tensor:
        return self._inner.all_gather(x)
