"""Any communicator made to behave like a slower link, so that the effect of a wiring can be seen without the link."""

import time

from torch import Tensor

from ladder.comm.base import Comm, Pending
from ladder.comm.link import Link


class Timed:
    """`inner`, but a sum arrives no earlier than the link's time after it was sent. CPU ranks only.

    A real link carries one message after another, so a sum that is sent while another travels starts when that one
    has arrived.
    """

    def __init__(self, inner: Comm, link: Link) -> None:
        self._inner = inner
        self._link = link
        self._free_at = 0.0  # when the wire has delivered everything sent so far, on time.monotonic's clock
        self.size = inner.size
        self.rank = inner.rank

    def _deliver_at(self, x: Tensor) -> float:
        begin = max(time.monotonic(), self._free_at)
        self._free_at = begin + self._link.seconds(x.numel() * x.element_size())
        return self._free_at

    def all_reduce(self, x: Tensor) -> Pending:
        at = self._deliver_at(x)
        return _TimedSum(self._inner.all_reduce(x), at)

    def all_gather(self, x: Tensor) -> Tensor:
        at = self._deliver_at(x)
        joined = self._inner.all_gather(x)
        _sleep_until(at)
        return joined


class _TimedSum:
    def __init__(self, inner: Pending, at: float) -> None:
        self._inner = inner
        self._at = at

    def wait(self) -> Tensor:
        x = self._inner.wait()
        _sleep_until(self._at)
        return x


def _sleep_until(at: float) -> None:
    left = at - time.monotonic()
    if left > 0:
        time.sleep(left)
