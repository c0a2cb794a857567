"""All-reduces on a communication stream that set a flag when done: a kernel polls it, so its launch need not wait."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ladder.comm.base import PRIORITY, Comm, Pending


@runtime_checkable
class Signals(Protocol):
    """A communicator whose all-reduces can set a flag, by kernels with few enough blocks to run beside any of ours."""

    def all_reduce_and_signal(self, x: Tensor, flag: Tensor) -> tuple[Tensor, int] | None:
        """The all-reduce in the current stream, and what it counts `flag` up to; None: not for this message."""
        ...


class Flagged:
    """An all-reduce in flight. Where it has a flag, it is complete when that has counted up to `need`. Kernels that
    poll it leave it `multiprocessors` to itself.
    """

    def __init__(
        self,
        x: Tensor,
        sent: Tensor,
        event: torch.cuda.Event,
        flag: Tensor | None,
        need: int,
        multiprocessors: int = 0,
    ) -> None:
        self.x = x
        self._sent = sent  # kept until it is waited for: another stream reads it
        self._event = event
        self.flag = flag
        self.need = need
        self.multiprocessors = multiprocessors

    def wait(self) -> Tensor:
        torch.cuda.current_stream().wait_event(self._event)
        return self.x

    def for_kernel(self) -> Tensor:
        """For a kernel that waits for the flag by itself, which it does in a CUDA graph only. Outside of one, the
        driver may have to load a kernel meanwhile: it then waits for the kernels that run, and starts no others. The
        kernel that waits for the all-reduce, and the all-reduce itself, would deadlock.
        """
        return self.x if torch.cuda.is_current_stream_capturing() else self.wait()


class Signalled:
    """`inner`'s all-reduces on a GPU's communication stream of high priority, one after the other.

    Between `begin` and `end` an all-reduce also sets a flag: by itself if `inner` can (`Signals`), or a small kernel
    behind it does, if `inner` says how many multiprocessors it needs for itself (NCCL). A kernel that waits for the
    flag by itself can be launched before the all-reduce is complete, and load its weights meanwhile; waiting for the
    stream's event would delay the launch. There must be a flag for every all-reduce of a pass. With several `inners`,
    which must not share state, they take turns: as many are in flight at once.
    """

    def __init__(self, inners: Sequence[Comm], device: torch.device, sums: int) -> None:
        self._inners = list(inners)
        self._streams = [torch.cuda.Stream(device, priority=PRIORITY) for _ in self._inners]
        self._used: list[torch.cuda.Stream] = []  # since the pass began: a capture must not wait for any other
        self.flags = torch.zeros(sums, dtype=torch.int32, device=device)
        self._cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
        self._count: int | None = None
        self.size = self._inners[0].size
        self.rank = self._inners[0].rank

    @property
    def library(self) -> bool:
        """Whether flags are set behind all-reduces, by which these need some of the chip for themselves."""
        return any(getattr(x, "multiprocessors", 0) and not getattr(x, "signals", False) for x in self._inners)

    def begin(self, polled: bool = True) -> None:
        """A pass begins. The caller has set `flags` to zero. `polled`: kernels will poll them."""
        self._count = 0 if polled else None
        self._used.clear()

    def end(self) -> None:
        """The current stream waits for all-reduces still in flight; later ones set no flags."""
        self._count = None
        self._join()

    def all_reduce(self, x: Tensor) -> Pending:
        number = self._count or 0
        inner, stream = self._inners[number % len(self._inners)], self._streams[number % len(self._inners)]
        flag = None
        if self._count is not None:
            if number >= len(self.flags):
                raise RuntimeError(f"all-reduce {number} of a pass has no flag: there are {len(self.flags)}")
            flag = self.flags[number : number + 1]
            self._count += 1
        if stream not in self._used:
            self._used.append(stream)
        need = own = 0
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            done = inner.all_reduce_and_signal(x, flag) if flag is not None and isinstance(inner, Signals) else None
            if done is not None:
                y, need = done
            else:
                y, own = inner.all_reduce(x).wait(), self._own(inner, len(x))
            event = stream.record_event()  # before a flag is filled: who waits for the event need not wait for that
            if done is None:
                flag = flag if own else None
                if flag is not None:
                    need = 1
                    flag.fill_(need)
        if not torch.cuda.is_current_stream_capturing():
            x.record_stream(stream)
            y.record_stream(torch.cuda.current_stream())
        return Flagged(y, x, event, flag, need, own)

    def _own(self, inner: Comm, rows: int) -> int:
        """The multiprocessors that the all-reduces of `inner` have to themselves while a kernel of up to a thread block
        per row polls their flag; 0: too few are left.
        """
        own: int = getattr(inner, "multiprocessors", 0)
        return own if rows <= self._cores - own else 0

    def all_gather(self, x: Tensor) -> Tensor:
        """In the current stream, after every all-reduce."""
        self._join()
        return self._inners[0].all_gather(x)

    def _join(self) -> None:
        for stream in self._used:
            torch.cuda.current_stream().wait_stream(stream)
