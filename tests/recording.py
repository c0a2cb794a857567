"""What happens when: a communicator that writes down its all-reduces, and a model that writes down its sub-blocks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ladder.comm.base import Comm, Pending
from ladder.model import Decoder

Event = tuple[str, int]


class Recording:
    """`inner`, with ("send", i) and ("wait", i) in `log` for all-reduce number i; the embedding's is 0."""

    def __init__(self, inner: Comm, log: list[Event]) -> None:
        self._inner = inner
        self._log = log
        self._sent = 0
        self.size = inner.size
        self.rank = inner.rank

    def all_reduce(self, x: Tensor) -> Pending:
        number, self._sent = self._sent, self._sent + 1
        self._log.append(("send", number))
        return _RecordedSum(self._inner.all_reduce(x), number, self._log)

    def all_gather(self, x: Tensor) -> Tensor:
        self._log.append(("gather", 0))
        return self._inner.all_gather(x)


class _RecordedSum:
    def __init__(self, inner: Pending, number: int, log: list[Event]) -> None:
        self._inner = inner
        self._number = number
        self._log = log

    def wait(self) -> Tensor:
        """Logged once it is complete."""
        x = self._inner.wait()
        self._log.append(("wait", self._number))
        return x


def record_sub_blocks(model: Decoder, log: list[Event]) -> None:
    """("compute", i) in `log` when sub-block i is computed, counted from 1, as its all-reduce is where all reduce."""
    outputs = [weight for layer in model.layers for weight in (layer.attention.o_proj, layer.mlp.down_proj)]
    for number, weight in enumerate(outputs, 1):
        weight.multiply = _Recorded(weight.multiply, log, number)


class _Recorded:
    def __init__(self, multiply: Callable[..., Tensor], log: list[Event], number: int) -> None:
        self._multiply = multiply
        self._log = log
        self._number = number

    def __call__(self, *arguments: Any) -> Tensor:
        y = self._multiply(*arguments)
        self._log.append(("compute", self._number))
        return y
