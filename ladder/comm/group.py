"""The tensor-parallel group of another engine as the backend: vLLM's, whose own all-reduce is used."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm.base import PRIORITY, Completed, Pending
from ladder.comm.distributed import Distributed


class Coordinator(Protocol):
    """What is needed of the other engine's group, by the names that vLLM has for it."""

    world_size: int
    rank_in_group: int
    device_group: dist.ProcessGroup

    def all_reduce(self, input_: Tensor) -> Tensor:
        """In the current stream."""
        ...

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor: ...


class CudaStreams:
    """Streams of a GPU, and events in them."""

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream()

    def new(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(priority=PRIORITY)

    def entered(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream) -> Any:
        return stream.record_event()

    def wait(self, stream: torch.cuda.Stream, event: Any) -> None:
        stream.wait_event(event)


class Group:
    """The ranks of another engine's group. Its all-reduces run beside what computes:

        on a GPU   by the group's own all-reduce, on a communication stream; a reader's stream waits for its event
        on a CPU   by torch.distributed, asynchronously

    `overlap` False is the reference: every all-reduce is waited for where it begins. The numbers are the same.

    Each stream that all-reduces begin on has a communication stream of its own, since memory of a stream is given again
    to whatever comes later on it: what an all-reduce writes is given again on the communication stream only behind a
    wait for the stream that has read it. All-reduces run one after the other all the same, in the order in which they
    began: all ranks must have one order.
    """

    capturable = True

    def __init__(self, group: Coordinator, overlap: bool = True, streams: CudaStreams | None = None) -> None:
        self._group = group
        self._overlap = overlap
        self._streams = streams or CudaStreams()
        self._beside: dict[Any, Any] = {}  # the communication stream of each stream
        self._newest: Any = None  # behind the all-reduce that began last
        self._joined = 0  # how often all were
        self.size = group.world_size
        self.rank = group.rank_in_group
        self._by_processes: Distributed | None = None

    def all_reduce(self, x: Tensor) -> Pending:
        if not self._overlap or self.size == 1:
            return Completed(self._group.all_reduce(x))
        if x.device.type != "cpu":
            return self._on_stream(x)
        if self._by_processes is None:
            self._by_processes = Distributed(self._group.device_group)
        return self._by_processes.all_reduce(x)

    def _on_stream(self, x: Tensor) -> Pending:
        streams, reader = self._streams, self._streams.current()
        if reader not in self._beside:
            self._beside[reader] = streams.new()
        side = self._beside[reader]
        streams.wait(side, streams.record(reader))
        if self._newest is not None:
            streams.wait(side, self._newest)  # which may be on another communication stream
        with streams.entered(side):
            y = self._group.all_reduce(x)
        self._newest = streams.record(side)
        return _InFlight(self, y, x, self._newest)

    def join(self) -> None:
        """The current stream waits for every all-reduce that has begun: before a CUDA graph ends, or a part of one. An
        event of one graph must not be waited for in another, so nobody waits for them from here on.
        """
        if self._newest is not None:
            self._streams.wait(self._streams.current(), self._newest)
            self._newest = None
            self._joined += 1

    def all_gather(self, x: Tensor) -> Tensor:
        """In the current stream, after every all-reduce."""
        self.join()
        return self._group.all_gather(x, -1)


class _InFlight:
    """An all-reduce on a communication stream; keeps what it reads and what it writes."""

    def __init__(self, group: Group, y: Tensor, x: Tensor, event: Any) -> None:
        self._group = group
        self._y = y
        self._sent = x  # another stream reads it: kept until the reader has waited
        self._event = event
        self._began = group._joined

    def wait(self) -> Tensor:
        if self._began == self._group._joined:
            streams = self._group._streams
            streams.wait(streams.current(), self._event)
        return self._y
