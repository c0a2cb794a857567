"""Gradients over the wire: any communicator made one that a backward pass can go through.

Each rank runs the backward pass of its own loss, and what all of them together find are the gradients of the sum of
the ranks' losses. A sum is its own transpose: what one rank sent is read by all, so its gradient is the sum of theirs.

    forward     y[r] = sum over s ( x[s] )          sent with all_reduce, read with wait
    backward    dx[s] = sum over r ( dy[r] )        sent where y was read, read where x was sent

So a sum that travelled beside a sub-block on the way forward does so on the way back, and a wiring that has fewer sums
has fewer on both ways. (Megatron's pair of identity and sum has one on the way back for every read of the stream.)

What is made of gathered numbers (`all_gather`) is taken to be the same on all ranks, a loss for one, and counts once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.autograd.graph import increment_version

from ladder.comm.base import Comm, Pending


class Differentiable:
    """`inner`, with gradients. The ranks must agree on which parameters have some: else one waits for a sum that
    another never sends.
    """

    def __init__(self, inner: Comm) -> None:
        self._inner = inner
        self.size = inner.size
        self.rank = inner.rank

    def all_reduce(self, x: Tensor) -> Pending:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return self._inner.all_reduce(x)
        journey = _Journey(self._inner)
        sent: Tensor = _Send.apply(x, journey)  # type: ignore[no-untyped-call]
        return _Sum(sent, journey)

    def all_gather(self, x: Tensor) -> Tensor:
        joined: Tensor = _Gather.apply(x, self._inner)  # type: ignore[no-untyped-call]
        return joined


def summed(comm: Comm, terms: Sequence[Tensor]) -> list[Tensor]:
    """The sum over the ranks of each of these, all on the wire at once. They belong to the communicator now."""
    return [pending.wait() for pending in [comm.all_reduce(term) for term in terms]]


def gathered(comm: Comm, x: Tensor) -> Tensor:
    """Every rank's `x` [..., n], as [..., ranks, n]."""
    joined = comm.all_gather(x)
    return joined.view(*x.shape[:-1], comm.size, x.shape[-1])


class _Journey:
    """A sum on its way forward, later its gradient on its way back."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.pending: Pending | None = None

    def send(self, x: Tensor) -> None:
        self.pending = self.comm.all_reduce(x)

    def wait(self) -> Tensor:
        assert self.pending is not None
        pending, self.pending = self.pending, None
        return pending.wait()


class _Sum:
    def __init__(self, sent: Tensor, journey: _Journey) -> None:
        self._sent = sent
        self._journey = journey

    def wait(self) -> Tensor:
        total: Tensor = _Arrive.apply(self._sent, self._journey)  # type: ignore[no-untyped-call]
        return total


class _Send(Function):
    """Where a sum leaves, and where its gradient comes home. The tensor between the two nodes is a mere thread that
    autograd goes along: what travels is in the journey.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        journey.send(x.detach())
        increment_version(x)  # it may be overwritten: autograd refuses to go back through whoever kept it
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, thread: Tensor) -> tuple[Tensor, None]:
        return ctx.journey.wait(), None


class _Arrive(Function):
    """Where a sum is waited for, and where its gradient leaves."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        return journey.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # a copy: autograd hands the same tensor to everybody who was added to the sum
        ctx.journey.send(gradient.clone(memory_format=torch.contiguous_format))
        return gradient.new_zeros(()), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.mine = slice(comm.rank * x.shape[-1], (comm.rank + 1) * x.shape[-1])
        return comm.all_gather(x.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[..., ctx.mine], None
