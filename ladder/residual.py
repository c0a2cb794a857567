"""The residual stream: the only place in a decoder that communicates."""

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from ladder.comm.base import Arrived, Comm, Pending
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

    def __init__(self, comm: Comm, agreed: Tensor, sums: Sequence[Tensor] = ()) -> None:
        """Starts from what all ranks agree on, [batch, tokens, hidden], and from `sums`, oldest first, that
        have arrived but that no reader has waited for.
        """
        self._comm = comm
        self._agreed = agreed
        # oldest first: the sum, the drift it carries
        self._wire: deque[tuple[Pending, Tensor | None]] = deque((Arrived(x), None) for x in sums)
        self._drift: Tensor | None = None
        self._held: Tensor | None = None

    @classmethod
    def from_partial(cls, comm: Comm, embedding: Tensor) -> "ResidualStream":
        """Starts from the ranks' partial embeddings; every wiring waits for their sum."""
        return cls(comm, comm.all_reduce(embedding).wait())

    def read(self, lag: int, staleness: Tensor | None = None) -> Tensor:
        """The stream with at most the newest `lag` sums missing: waits for the older ones, oldest first.

        `staleness` (none: 1) is how much of those is missing; for training, since who asks for a part must wait.
        """
        while len(self._wire) > lag:
            pending, _ = self._wire.popleft()
            self._agreed = self._agreed + pending.wait()
        stream = self._agreed
        for drift in (*(carried for _, carried in self._wire), self._drift):
            if drift is not None:
                stream = stream + drift
        if staleness is not None:
            self._wire = deque((Arrived(pending.wait()), carried) for pending, carried in self._wire)
            for pending, _ in self._wire:
                stream = stream + (1 - staleness) * pending.wait()
        return stream

    def write(self, partial: Tensor, out: Out) -> None:
        """Add a sub-block's partial sum to the stream, by the way of `out`. The tensor belongs to the stream now."""
        if self._held is not None:
            partial, self._held = self._held + partial, None
        if out is Out.HOLD:
            self._held = partial
        elif out is Out.LOCAL and self._comm.size == 1:
            self._agreed = self._agreed + partial  # alone, one agrees with oneself
        elif out is Out.LOCAL:
            self._drift = partial if self._drift is None else self._drift + partial
        else:
            drift, self._drift = self._drift, None
            if drift is not None:
                partial = partial + drift / self._comm.size
            self._wire.append((self._comm.all_reduce(partial), drift))

    def rest(self) -> tuple[Tensor, list[Tensor]]:
        """What the constructor needs to go on from here, in another layer's scope; for one rank alone."""
        assert self._comm.size == 1 and self._held is None
        return self._agreed, [pending.wait() for pending, _ in self._wire]
