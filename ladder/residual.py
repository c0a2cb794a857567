"""The residual stream: the only place in a decoder that communicates."""

from collections import deque

from torch import Tensor

from ladder.comm.base import Comm, Pending
from ladder.wiring import Out


class ResidualStream:
    """One rank's view of the residual stream during one forward pass.

        stream = agreed + drift

    `agreed` is the same on all ranks. `drift` is what this rank alone has added since the last sum was sent (`local`);
    the next sum carries drift / size along, so that once it has landed all ranks agree again:

        agreed <- agreed + sum over ranks ( partial + drift / size )

    Until then a reader still sees this rank's own drift. A sum on the wire is not in the stream; one that a reader has
    waited for stays in it.
    """

    def __init__(self, comm: Comm, embedding: Tensor) -> None:
        """Starts from the ranks' partial embeddings, [batch, tokens, hidden]; every wiring waits for their sum."""
        self._comm = comm
        self._agreed = comm.all_reduce(embedding).wait()
        self._wire: deque[tuple[Pending, Tensor | None]] = deque()  # oldest first: the sum, the drift it carries
        self._drift: Tensor | None = None
        self._held: Tensor | None = None

    def read(self, lag: int) -> Tensor:
        """The stream with at most the newest `lag` sums missing: waits for the older ones, oldest first."""
        while len(self._wire) > lag:
            pending, _ = self._wire.popleft()
            self._agreed = self._agreed + pending.wait()
        stream = self._agreed
        for drift in (*(carried for _, carried in self._wire), self._drift):
            if drift is not None:
                stream = stream + drift
        return stream

    def write(self, partial: Tensor, out: Out) -> None:
        """Add a sub-block's partial sum to the stream, by the way of `out`. The tensor belongs to the stream now."""
        if self._held is not None:
            partial, self._held = self._held + partial, None
        if out is Out.HOLD:
            self._held = partial
        elif out is Out.LOCAL:
            self._drift = partial if self._drift is None else self._drift + partial
        else:
            drift, self._drift = self._drift, None
            if drift is not None:
                partial = partial + drift / self._comm.size
            self._wire.append((self._comm.all_reduce(partial), drift))
