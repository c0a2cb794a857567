"""An emulated link: makes any communicator as slow as a link, so that a wiring can be measured without that link."""

import time

import torch
from torch import Tensor

from ladder.comm.base import PRIORITY, Comm, Pending
from ladder.comm.link import Link


class Timed:
    """`inner`, but an all-reduce is complete no earlier than the link's time after its start.

    A link carries one message after another, so an all-reduce that is started while another is in flight begins when
    that one is complete. On the CPU a reader that is too early sleeps, which uses no core. On the GPU one thread block
    of a stream of its own waits for the time to pass, and the reader's stream waits for that stream.
    """

    def __init__(self, inner: Comm, link: Link) -> None:
        self._inner = inner
        self._link = link
        self._free_at = 0.0  # CPU: when the link has carried everything sent so far, on time.monotonic's clock
        self._clock: _GpuClock | None = None  # made with the first message on a GPU
        self.size = inner.size
        self.rank = inner.rank

    def all_reduce(self, x: Tensor) -> Pending:
        arrival = self._send(x)
        return _TimedPending(self._inner.all_reduce(x), arrival)

    def all_gather(self, x: Tensor) -> Tensor:
        arrival = self._send(x)
        joined = self._inner.all_gather(x)
        arrival.wait()
        return joined

    def _send(self, x: Tensor) -> "_Moment | _GpuMoment":
        seconds = self._link.seconds(x.numel() * x.element_size())
        if x.is_cuda:
            self._clock = self._clock or _GpuClock(x.device)
            return self._clock.after(seconds)
        self._free_at = max(time.monotonic(), self._free_at) + seconds
        return _Moment(self._free_at)


class _TimedPending:
    def __init__(self, inner: Pending, arrival: "_Moment | _GpuMoment") -> None:
        self._inner = inner
        self._arrival = arrival

    def wait(self) -> Tensor:
        x = self._inner.wait()
        self._arrival.wait()
        return x


class _Moment:
    def __init__(self, at: float) -> None:
        self._at = at

    def wait(self) -> None:
        left = self._at - time.monotonic()
        if left > 0:
            time.sleep(left)


class _GpuClock:
    """A stream whose only work is to let time pass, one message after another. Safe to capture in a CUDA graph."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=PRIORITY)  # high: waits must not queue behind the compute
        self._cycles_per_second = _spin_rate(device)

    def after(self, seconds: float) -> "_GpuMoment":
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(seconds * self._cycles_per_second))
            return _GpuMoment(self._stream.record_event())


class _GpuMoment:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


def _spin_rate(device: torch.device, cycles: int = 20_000_000) -> float:
    """Cycles of torch's waiting kernel per second, measured now, on a stream of its own."""
    stream = torch.cuda.Stream(device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)  # wake the clocks
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
    end.synchronize()
    return float(cycles / (begin.elapsed_time(end) * 1e-3))
