"""The residual stream: the only place in a decoder that communicates."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ladder.comm.base import Arrived, Comm, Pending
from ladder.wiring import Out


@dataclass(frozen=True)
class Terms:
    """What a reader of the stream has to add up: agreed + sums is what it hands back (`settle`), drifts come on top."""

    agreed: Tensor
    sums: tuple[Pending, ...]  # to be waited for, oldest first
    drifts: tuple[Tensor, ...]
    fresh: Tensor | None  # the newest term of this rank's own drift, not yet joined to the last of `drifts`


class Pieces:
    """A sum that travels in pieces along its rows."""

    def __init__(self, pieces: Sequence[Pending]) -> None:
        self._pieces = pieces

    def wait(self) -> Tensor:
        parts = [piece.wait() for piece in self._pieces]
        ends = [part.data_ptr() + part.numel() * part.element_size() for part in parts]
        one_behind_the_other = ends[:-1] == [part.data_ptr() for part in parts[1:]]
        storages = {part.untyped_storage().data_ptr() for part in parts}
        if one_behind_the_other and len(storages) == 1 and all(part.is_contiguous() for part in parts):
            rows = sum(len(part) for part in parts)  # they were summed where they lay
            return parts[0].as_strided((rows, *parts[0].shape[1:]), parts[0].stride())
        return torch.cat(parts)


class ResidualStream:
    """One rank's view of the residual stream during one forward pass.

        stream = agreed + drift

    `agreed` is the same on all ranks. `drift` is what this rank alone has added since the last sum was sent (`local`);
    the next sum carries drift / size along, so that once it has landed all ranks agree again:

        agreed <- agreed + sum over ranks ( partial + drift / size )

    Until then a reader still sees this rank's own drift. A sum on the wire is not in the stream; one that a reader has
    waited for stays in it.
    """

    def __init__(
        self, comm: Comm, agreed: Tensor, sums: Sequence[Tensor] = (), drifts: Sequence[Tensor | None] = ()
    ) -> None:
        """Starts from what all ranks agree on, [batch, tokens, hidden], and from `sums`, oldest first, that
        have arrived but that no reader has waited for. `drifts`: what each of these carries, and this rank's own at
        the end; empty: none.
        """
        self._comm = comm
        self._agreed = agreed
        *carried, own = drifts or (None,) * (len(sums) + 1)
        # oldest first: the sum, the drift it carries
        self._wire: deque[tuple[Pending, Tensor | None]] = deque(
            (Arrived(x), drift) for x, drift in zip(sums, carried, strict=True)
        )
        self._drift: Tensor | None = own
        self._fresh: Tensor | None = None  # what is to join the drift with the next read
        self._held: Tensor | None = None
        self._sums_to_come: int | None = None  # None: who knows

    @classmethod
    def from_partial(cls, comm: Comm, embedding: Tensor, sums: int | None = None) -> "ResidualStream":
        """Starts from the ranks' partial embeddings; every wiring waits for their sum. `sums` are to follow."""
        stream = cls(comm, comm.all_reduce(embedding).wait())
        stream._sums_to_come = sums
        return stream

    def read(self, lag: int, staleness: Tensor | None = None) -> Tensor:
        """The stream with at most the newest `lag` sums missing: waits for the older ones, oldest first.

        `staleness` (none: 1) is how much of those is missing; for training, since who asks for a part must wait.
        """
        self._join()
        terms = self.terms(lag)
        for pending in terms.sums:
            self._agreed = self._agreed + pending.wait()
        stream = self._agreed
        for drift in terms.drifts:
            stream = stream + drift
        if staleness is not None:
            self._wire = deque((Arrived(pending.wait()), carried) for pending, carried in self._wire)
            for pending, carried in self._wire:
                missing = pending.wait() if carried is None else pending.wait() - carried  # which was read instead
                stream = stream + (1 - staleness) * missing
        return stream

    def terms(self, lag: int) -> Terms:
        """`read` for a kernel that waits and adds by itself; it owes the stream a `settle` if there were sums."""
        sums = []
        while len(self._wire) > lag:
            sums.append(self._wire.popleft()[0])
        drifts = (*(carried for _, carried in self._wire), self._drift)
        return Terms(self._agreed, tuple(sums), tuple(drift for drift in drifts if drift is not None), self._fresh)

    def settle(self, agreed: Tensor) -> None:
        """What the ranks agree on, the sums of `terms` included."""
        self._agreed = agreed

    def settle_drift(self, drift: Tensor) -> None:
        """This rank's drift, the fresh term included."""
        self._drift, self._fresh = drift, None

    def _join(self) -> None:
        if self._fresh is not None:
            assert self._drift is not None
            self.settle_drift(self._drift + self._fresh)

    def write(self, partial: Tensor, out: Out) -> None:
        """Add a sub-block's partial sum to the stream, by the way of `out`. The tensor belongs to the stream now."""
        more, divisor = self.addend(out)
        if more is not None:
            partial = more / divisor + partial if divisor > 1 else more + partial
        self.write_joined(partial, out)

    def addend(self, out: Out) -> tuple[Tensor | None, int]:
        """What must join a partial sum before it is written by the way of `out`, and what that is divided by."""
        self._join()
        if out is Out.LOCAL and self._held is None:
            # alone, one agrees with oneself
            return (self._agreed if self._comm.size == 1 else self._drift), 1
        if out is Out.REDUCE and self._held is None:
            return self._drift, self._comm.size
        if out is Out.REDUCE and self._drift is not None:
            assert self._held is not None
            return self._held + self._drift / self._comm.size, 1
        assert out is not Out.LOCAL, "a row that holds a sum sends it with the next one"
        return self._held, 1

    def write_joined(self, partial: Tensor, out: Out) -> None:
        """`write` of a partial sum that its `addend` has joined."""
        self._held = None
        if out is Out.HOLD:
            self._held = partial
        elif out is Out.LOCAL and self._comm.size == 1:
            self._agreed = partial
        elif out is Out.LOCAL:
            self._drift = partial
        else:
            drift, self._drift = self._drift, None
            self._send(self._comm.all_reduce(partial), drift)

    def write_local(self, partial: Tensor) -> None:
        """`write` by the way of `local`, but it is left to the next reader, of lag 0, to join the partial sum to the
        drift; or to the stream itself, where no sum will ever need the drift.
        """
        if self._sums_to_come == 0 and self._drift is None:
            self._wire.append((Arrived(partial), None))
            return
        if self._drift is None or self._comm.size == 1:
            return self.write(partial, Out.LOCAL)
        self._join()
        self._fresh = partial

    def write_pieces(self, pieces: Iterable[Tensor]) -> None:
        """`write_joined` by way of `reduce` of a partial sum in pieces along its rows: each is sent when it is made."""
        self._held, drift, self._drift = None, self._drift, None
        self._send(Pieces([self._comm.all_reduce(piece) for piece in pieces]), drift)

    def _send(self, pending: Pending, drift: Tensor | None) -> None:
        self._wire.append((pending, drift))
        if self._sums_to_come is not None:
            self._sums_to_come -= 1

    def rest(self) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        """What the constructor needs to go on from here, in another layer's scope: waits for every sum."""
        assert self._held is None and self._fresh is None
        sums = [pending.wait() for pending, _ in self._wire]
        drifts = [carried for _, carried in self._wire]
        self._wire = deque((Arrived(x), drift) for x, drift in zip(sums, drifts, strict=True))
        return self._agreed, sums, [*drifts, self._drift]
