"""Sums on a stream of their own whose arrival a kernel can see: no reader's launch has to wait for them."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ladder.comm.base import Comm, Pending


@runtime_checkable
class Signals(Protocol):
    """A communicator whose sums can set a flag, by kernels so light that they find room beside any of ours."""

    def all_reduce_and_signal(self, x: Tensor, flag: Tensor) -> tuple[Tensor, int] | None:
        """The sum in the current stream, and what it counts `flag` up to; None: not for this message."""
        ...


class Flagged:
    """A sum on its way. Where it has a flag, it has arrived when that has counted up to `need`."""

    def __init__(self, x: Tensor, sent: Tensor, event: torch.cuda.Event, flag: Tensor | None, need: int) -> None:
        self.x = x
        self._sent = sent  # kept until somebody waits: it is read on another stream
        self._event = event
        self.flag = flag
        self.need = need

    def wait(self) -> Tensor:
        torch.cuda.current_stream().wait_event(self._event)
        return self.x

    def for_kernel(self) -> Tensor:
        """For a kernel that waits for the flag by itself, which it does in a CUDA graph only. Outside of one, the
        driver may have to load a kernel meanwhile: it waits for those that run, and holds back those that do not yet
        run. The kernel that waits for the sum, and the one that brings it, would stand still for ever.
        """
        return self.x if torch.cuda.is_current_stream_capturing() else self.wait()


class Signalled:
    """`inner`'s sums on a communication stream of high priority, one after the other; a GPU's.

    Between `begin` and `end` a sum also sets a flag, if `inner` can (`Signals`; NCCL's kernels need too much room). A
    kernel that waits for the flag by itself can be launched before the sum has arrived, and load its weights meanwhile;
    the stream's event, which everybody else waits for, would hold up the launch. There must be a flag for every sum of
    a pass. With several `inners`, which must not share a wire's state, sums take turns: as many travel at once.
    """

    def __init__(self, inners: Sequence[Comm], device: torch.device, sums: int) -> None:
        self._inners = list(inners)
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in self._inners]
        self.flags = torch.zeros(sums, dtype=torch.int32, device=device)
        self._count: int | None = None
        self.size = self._inners[0].size
        self.rank = self._inners[0].rank

    def begin(self) -> None:
        """A pass begins, with `flags` all zero from here on: whoever calls this sees to that."""
        self._count = 0

    def end(self) -> None:
        """The current stream waits for whatever is still on the wire; later sums set no flags."""
        self._count = None
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)

    def all_reduce(self, x: Tensor) -> Pending:
        number = self._count or 0
        inner, stream = self._inners[number % len(self._inners)], self._streams[number % len(self._inners)]
        flag = None
        if self._count is not None:
            flag = self.flags[number : number + 1]
            self._count += 1
        need = 0
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            done = inner.all_reduce_and_signal(x, flag) if flag is not None and isinstance(inner, Signals) else None
            if done is not None:
                y, need = done
            else:
                y, flag = inner.all_reduce(x).wait(), None
            event = stream.record_event()
        if not torch.cuda.is_current_stream_capturing():
            x.record_stream(stream)
            y.record_stream(torch.cuda.current_stream())
        return Flagged(y, x, event, flag, need)

    def all_gather(self, x: Tensor) -> Tensor:
        """In the current stream, after every sum."""
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)
        return self._inners[0].all_gather(x)
