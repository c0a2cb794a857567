"""The residual stream: the only place in a decoder that communicates."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ladder.comm.base import Comm, Completed, Pending
from ladder.wiring import Out

# makes a partial sum: called with what must be added to it, or None, and what that is divided by first. Pieces along
# the rows are sent one by one, each as soon as it is made.
Producer = Callable[[Tensor | None, int], Tensor | Iterable[Tensor]]
Post = Callable[[Tensor], Tensor]  # what an all-reduced output goes through before it joins the stream: a norm


@dataclass(frozen=True)
class Terms:
    """What a fused reader adds up: base + pending, which it hands back to `end_read`; and on top of that `more`."""

    base: Tensor
    pending: tuple[Pending, ...]  # to be waited for, oldest first
    more: tuple[Tensor, ...]
    local: bool = False  # base + pending is this rank's drift, and `more` what the ranks agree on


class Pieces:
    """An all-reduce in pieces along the rows."""

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


class Processed:
    """An all-reduce of several outputs at once, each of which goes through its `post` before they are added up."""

    def __init__(self, pending: Pending, posts: Sequence[Post | None]) -> None:
        self._pending = pending
        self._posts = posts

    def wait(self) -> Tensor:
        parts = self._pending.wait().unflatten(0, (len(self._posts), -1))
        done = [x if post is None else post(x) for x, post in zip(parts, self._posts, strict=True)]
        return done[0] if len(done) == 1 else torch.stack(done).sum(0)


class ResidualStream:
    """One rank's view of the residual stream during one forward pass.

        stream = agreed + drift

    `agreed` is the same on all ranks. `drift` is what this rank alone has added since the last all-reduce (`local`);
    the next all-reduce carries drift / size along, so that once it is complete all ranks agree again:

        agreed <- agreed + sum over ranks ( partial + drift / size )

    Until then a reader still sees this rank's own drift. An all-reduce in flight is not in the stream; one that a
    reader has waited for stays in it.
    """

    def __init__(
        self, comm: Comm, agreed: Tensor, sums: Sequence[Tensor] = (), drifts: Sequence[Tensor | None] = ()
    ) -> None:
        """Starts from what all ranks agree on, [rows, hidden], and from `sums`, oldest first: all-reduces that are
        complete but that no reader has waited for. `drifts`: what each of these carries, and this rank's own at the
        end; empty: none.
        """
        self._comm = comm
        self._agreed = agreed
        *carried, own = drifts or (None,) * (len(sums) + 1)
        # oldest first: the all-reduce, the drift it carries
        self._in_flight: deque[tuple[Pending, Tensor | None]] = deque(
            (Completed(x), drift) for x, drift in zip(sums, carried, strict=True)
        )
        self._drift: Tensor | None = own
        self._fresh: Tensor | None = None  # what is to join the drift with the next read
        self._held: Tensor | None = None
        self._held_outputs: list[tuple[Tensor, Post]] = []  # held, and still to go through their norms
        self._reduces_to_come: int | None = None  # None: unknown

    @classmethod
    def from_partial(cls, comm: Comm, embedding: Tensor, reduces: int | None = None) -> "ResidualStream":
        """Starts from the ranks' partial embeddings, whose all-reduce every wiring waits for. `reduces` will follow."""
        stream = cls(comm, comm.all_reduce(embedding).wait())
        stream._reduces_to_come = reduces
        return stream

    def read(self, lag: int, staleness: Tensor | None = None) -> Tensor:
        """The stream with at most the newest `lag` all-reduces missing: waits for the older ones, oldest first.

        `staleness` (none: 1) is how much of those is missing; for training, since reading a part of them means waiting.
        """
        self._join()
        while len(self._in_flight) > lag:
            self._agreed = self._agreed + self._in_flight.popleft()[0].wait()
        stream = self._agreed
        for drift in self._drifts():
            stream = stream + drift
        if staleness is not None:
            self._in_flight = deque((Completed(pending.wait()), carried) for pending, carried in self._in_flight)
            for pending, carried in self._in_flight:
                missing = pending.wait() if carried is None else pending.wait() - carried  # which was read instead
                stream = stream + (1 - staleness) * missing
        return stream

    def begin_read(self, lag: int) -> Terms:
        """`read` for a kernel that waits and adds by itself. Afterwards it must call `end_read`."""
        pending = []
        while len(self._in_flight) > lag:
            pending.append(self._in_flight.popleft()[0])
        drifts, fresh = self._drifts(), self._fresh
        if fresh is None:
            return Terms(self._agreed, tuple(pending), drifts)
        if not pending and len(drifts) == 1:
            # the reader joins the fresh term to the drift, as it would an all-reduce to what the ranks agree on
            return Terms(drifts[0], (Completed(fresh),), (self._agreed,), local=True)
        return Terms(self._agreed, tuple(pending), (*drifts, fresh))

    def end_read(self, terms: Terms, total: Tensor) -> None:
        """`total` is base + pending of the terms."""
        if terms.local:
            self._drift, self._fresh = total, None
        else:
            self._agreed = total

    def total(self, x: Tensor) -> Tensor:
        """The sum of `x` over the ranks, waited for: for the few numbers that all ranks need at once."""
        return self._comm.all_reduce(x).wait()

    def _drifts(self) -> tuple[Tensor, ...]:
        drifts = (*(carried for _, carried in self._in_flight), self._drift)
        return tuple(drift for drift in drifts if drift is not None)

    def _join(self) -> None:
        if self._fresh is not None:
            assert self._drift is not None
            self._drift, self._fresh = self._drift + self._fresh, None

    def write(self, partial: Tensor | Producer, out: Out, post: Post | None = None) -> None:
        """Add a sub-block's partial sum to the stream, as `out` says; the tensor belongs to the stream now.

        With `post`, what joins the stream is post( sum over ranks ( partial )); `local`: post( partial ).
        """
        if post is not None:
            return self._write_output(partial if isinstance(partial, Tensor) else _whole(partial(None, 1)), out, post)
        if not isinstance(partial, Tensor) and out is Out.LOCAL and self._comm.size > 1:
            return self._write_fresh(_whole(partial(None, 1)))
        more, divisor = self._addend(out)
        if not isinstance(partial, Tensor):
            self._put(partial(more, divisor), out)
        elif more is None:
            self._put(partial, out)
        else:
            self._put(more / divisor + partial if divisor > 1 else more + partial, out)

    def _addend(self, out: Out) -> tuple[Tensor | None, int]:
        """What must join a partial sum before it is put where `out` says, and what that is divided by."""
        self._join()
        if out is Out.LOCAL and self._held is None:
            # alone, one agrees with oneself
            return (self._agreed if self._comm.size == 1 else self._drift), 1
        if out is Out.REDUCE and self._held is None:
            return self._drift, self._comm.size
        if out is Out.REDUCE and self._drift is not None:
            assert self._held is not None
            return self._held + self._drift / self._comm.size, 1
        assert out is not Out.LOCAL, "a row that holds a partial sum reduces it with the next one"
        return self._held, 1

    def _put(self, partial: Tensor | Iterable[Tensor], out: Out) -> None:
        """`write` of a partial sum that its addend has joined."""
        self._held = None
        if out is Out.HOLD:
            self._held = _whole(partial)
        elif out is Out.LOCAL and self._comm.size == 1:
            self._agreed = _whole(partial)
        elif out is Out.LOCAL:
            self._drift = _whole(partial)
        elif isinstance(partial, Tensor):
            self._send(self._comm.all_reduce(partial))
        else:
            self._send(Pieces([self._comm.all_reduce(piece) for piece in partial]))

    def _write_fresh(self, partial: Tensor) -> None:
        """`write` by the way of `local`, but it is left to the next reader, of lag 0, to join the partial sum to the
        drift; or to the stream itself, where no all-reduce will ever need the drift.
        """
        if self._reduces_to_come == 0 and self._drift is None:
            self._in_flight.append((Completed(partial), None))
        elif self._drift is None:
            self._drift = partial
        else:
            self._join()
            self._fresh = partial

    def _write_output(self, output: Tensor, out: Out, post: Post) -> None:
        if out is Out.LOCAL:
            return self.write(post(output), out)
        self._held_outputs.append((output, post))
        if out is Out.REDUCE:
            self._join()
            outputs, self._held_outputs = self._held_outputs, []
            terms: list[tuple[Tensor, Post | None]] = [*outputs]
            if self._drift is not None:
                terms.append((self._drift / self._comm.size, None))
            together = terms[0][0] if len(terms) == 1 else torch.cat([x for x, _ in terms])
            self._send(Processed(self._comm.all_reduce(together), [each for _, each in terms]))

    def _send(self, pending: Pending) -> None:
        """An all-reduce has begun, and carries the drift."""
        drift, self._drift = self._drift, None
        self._in_flight.append((pending, drift))
        if self._reduces_to_come is not None:
            self._reduces_to_come -= 1

    def rest(self) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        """What the constructor needs to go on from here, in another layer's scope: waits for every all-reduce."""
        assert self._held is None and self._fresh is None and not self._held_outputs
        sums = [pending.wait() for pending, _ in self._in_flight]
        drifts = [carried for _, carried in self._in_flight]
        self._in_flight = deque((Completed(x), drift) for x, drift in zip(sums, drifts, strict=True))
        return self._agreed, sums, [*drifts, self._drift]


def _whole(partial: Tensor | Iterable[Tensor]) -> Tensor:
    return partial if isinstance(partial, Tensor) else torch.cat(list(partial))
