"""The protocol of all communicators, the communicator of a single rank, and one for layouts."""

from typing import Protocol

from torch import Tensor

PRIORITY = -2  # of communication streams on a GPU: before all that compute


class Pending(Protocol):
    """An all-reduce in flight."""

    def wait(self) -> Tensor:
        """The result, once it is complete. Called once, or once by each of several lanes."""
        ...


class Comm(Protocol):
    """One rank's communicator. All ranks make the same calls in the same order."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    # Three attributes are optional, and false where they are missing. `capturable`: its all-reduces can be part of a
    # CUDA graph. `signals`: they can set a flag, see comm/signalled.py. `multiprocessors`: how many of a GPU's they may
    # need for themselves.

    def all_reduce(self, x: Tensor) -> Pending:
        """Start adding up `x` over the ranks. `x` belongs to the communicator from here on; it may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' `x`, all of one shape, joined in rank order along the last dimension."""
        ...


class RankOnly:
    """A rank that cannot communicate: enough to lay out its shard and to load it, not to compute with it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Pending:
        raise RuntimeError(f"rank {self.rank} of {self.size} has no communicator")

    def all_gather(self, x: Tensor) -> Tensor:
        raise RuntimeError(f"rank {self.rank} of {self.size} has no communicator")


class Completed:
    """An all-reduce that is complete from the start."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def wait(self) -> Tensor:
        return self._x


class Solo:
    """One rank: nothing has to be added up."""

    capturable = True  # its all-reduces can be part of a CUDA graph
    size = 1
    rank = 0

    def all_reduce(self, x: Tensor) -> Pending:
        return Completed(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return x
