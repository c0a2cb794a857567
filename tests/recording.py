"""What happens when: a communicator that writes down its sums, and a model that writes down its sub-blocks."""

from torch import Tensor, nn

from ladder.comm.base import Comm, Pending
from ladder.model import Decoder

Event = tuple[str, int]


class Recording:
    """`inner`, with ("send", i) and ("wait", i) in `log` for sum number i, counted from the embedding's, which is 0."""

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
        """Logged once the sum is there."""
        x = self._inner.wait()
        self._log.append(("wait", self._number))
        return x


def record_sub_blocks(model: Decoder, log: list[Event]) -> None:
    """("compute", i) in `log` when sub-block i is done, counted from 1: so where all reduce, sum i is its own."""
    number = 0
    for layer in model.layers:
        for name in ("self_attn", "mlp"):
            number += 1
            layer.get_submodule(name).register_forward_hook(_Hook(log, number))


class _Hook:
    def __init__(self, log: list[Event], number: int) -> None:
        self._log = log
        self._number = number

    def __call__(self, module: nn.Module, inputs: object, output: object) -> None:
        self._log.append(("compute", self._number))
