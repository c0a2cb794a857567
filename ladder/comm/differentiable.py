"""Gradients through a communicator: wraps any communicator for a backward pass.

Each rank runs the backward pass of its own loss, and what all of them together find are the gradients of the sum of
the ranks' losses. An all-reduce is its own transpose: what one rank contributed is read by all, so its gradient is the
sum of theirs.

    forward     y[r] = sum over s ( x[s] )          started with all_reduce, read with wait
    backward    dx[s] = sum over r ( dy[r] )        started where y was read, read where x was handed over

So an all-reduce that ran beside a sub-block in the forward pass does so in the backward pass, and a wiring that has
fewer of them has fewer in both. (Megatron's pair of identity and all-reduce has one in the backward pass for every
read of the stream.)

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
    """`inner`, with gradients. The ranks must agree on which parameters have some: else one rank waits for an
    all-reduce that another never starts.
    """

    def __init__(self, inner: Comm) -> None:
        self._inner = inner
        self.size = inner.size
        self.rank = inner.rank

    def all_reduce(self, x: Tensor) -> Pending:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return self._inner.all_reduce(x)
        in_flight = _InFlight(self._inner)
        link: Tensor = _Start.apply(x, in_flight)  # type: ignore[no-untyped-call]
        return _DifferentiablePending(link, in_flight)

    def all_gather(self, x: Tensor) -> Tensor:
        joined: Tensor = _Gather.apply(x, self._inner)  # type: ignore[no-untyped-call]
        return joined


def all_reduced(comm: Comm, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sum over the ranks of each of these, all in flight at once. They belong to the communicator now."""
    return [pending.wait() for pending in [comm.all_reduce(tensor) for tensor in tensors]]


def all_gathered(comm: Comm, x: Tensor) -> Tensor:
    """Every rank's `x` [..., n], as [..., ranks, n]."""
    joined = comm.all_gather(x)
    return joined.view(*x.shape[:-1], comm.size, x.shape[-1])


class _InFlight:
    """One all-reduce of the forward pass, later that of its gradient."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.pending: Pending | None = None

    def start(self, x: Tensor) -> None:
        self.pending = self.comm.all_reduce(x)

    def wait(self) -> Tensor:
        assert self.pending is not None
        pending, self.pending = self.pending, None
        return pending.wait()


class _DifferentiablePending:
    def __init__(self, link: Tensor, in_flight: _InFlight) -> None:
        self._link = link
        self._in_flight = in_flight

    def wait(self) -> Tensor:
        total: Tensor = _Wait.apply(self._link, self._in_flight)  # type: ignore[no-untyped-call]
        return total


class _Start(Function):
    """Starts the all-reduce; in the backward pass waits for that of the gradient. The scalar between the two nodes only
    orders them for autograd: the data is in `_InFlight`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_flight: _InFlight) -> Tensor:
        ctx.in_flight = in_flight
        in_flight.start(x.detach())
        increment_version(
            x
        )  # it may be overwritten: autograd refuses a backward pass through an operation that kept it
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, link: Tensor) -> tuple[Tensor, None]:
        return ctx.in_flight.wait(), None


class _Wait(Function):
    """Waits for the all-reduce; in the backward pass starts that of the gradient."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, in_flight: _InFlight) -> Tensor:
        ctx.in_flight = in_flight
        return in_flight.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # a copy: autograd gives the same tensor to every operand of an addition
        ctx.in_flight.start(gradient.clone(memory_format=torch.contiguous_format))
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
