"""The residual stream of post-norm models, whose norm stands on the stream itself.

    standard   r[i] = norm[i]( r[i-1] + h[i]( r[i-1] ) )
    ladder     r[i] = norm[i]( r[i-1] + h[i]( r[i-2] ) )

A norm needs the whole sum, so that every sub-block must reduce its partial sum at once: a sum that is held has no norm
of its own, and of a stream that differs from rank to rank there is no norm. A lag is possible: the norm of a result
waits for its all-reduce, and only those who read behind it wait for the norm.
"""

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor


class NormedStream:
    """The stream after each all-reduce that no reader has waited for; nothing is held, and no rank drifts."""

    def __init__(self, agreed: Tensor, later: Sequence[Tensor] = ()) -> None:
        """`later`: the streams behind `agreed`, oldest first."""
        self._streams = deque((agreed, *later))

    def read(self, lag: int, staleness: Tensor | None = None) -> Tensor:
        """The stream without the newest `lag` results. What is older has been waited for, and stays.

        `staleness` (none: 1): how much of the way to the newest stream is missing.
        """
        while len(self._streams) - 1 > lag:
            self._streams.popleft()
        stream, newest = self._streams[0], self._streams[-1]
        return stream if staleness is None else stream + (1 - staleness) * (newest - stream)

    def write(self, partial: Tensor, norm: Callable[[Tensor], Tensor]) -> None:
        """Add a sub-block's result to the newest stream, and put the norm on it."""
        self._streams.append(norm(partial + self._streams[-1]))

    def rest(self) -> tuple[Tensor, list[Tensor]]:
        """What the constructor needs to go on from here, in another layer's scope."""
        agreed, *later = self._streams
        return agreed, later
