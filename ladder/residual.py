"""The residual stream: the only place in a decoder that communicates."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ladder.comm.base import Comm, Completed, Pending
from ladder.lanes import Lanes, Made, OneLane
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
    polls: bool = True  # a kernel may poll the flags of `pending`: those of two lanes at once could fill the chip


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


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce that has begun: its partial sum was made on a lane, and carries this rank's drift."""

    pending: Made[Pending]
    drift: Made[Tensor] | None


class Once:
    """An all-reduce that one reader waits for, on whatever lane; the others read its result."""

    def __init__(self, pending: Pending, lanes: Lanes) -> None:
        self._pending = pending
        self._lanes = lanes
        self._result: Made[Tensor] | None = None

    def prepare(self) -> Made[Tensor]:
        if self._result is None:
            self._result = self._lanes.made(self._pending.wait())
        return self._result

    def wait(self) -> Tensor:
        return self._lanes.use(self.prepare())


class ResidualStream:
    """One rank's view of the residual stream during one forward pass.

        stream = agreed + drift

    `agreed` is the same on all ranks. `drift` is what this rank alone has added since the last all-reduce (`local`);
    the next all-reduce carries drift / size along, so that once it is complete all ranks agree again:

        agreed <- agreed + sum over ranks ( partial + drift / size )

    Until then a reader still sees this rank's own drift. An all-reduce in flight is not in the stream; one that a
    reader has waited for stays in it.

    On several lanes each lane adds up `agreed` for itself, in the same order and so with the same bits: a reader waits
    for the partial sums that it reads, not for readers on other lanes.
    """

    def __init__(
        self,
        comm: Comm,
        agreed: Tensor,
        sums: Sequence[Tensor] = (),
        drifts: Sequence[Tensor | None] = (),
        lanes: Lanes | None = None,
    ) -> None:
        """Starts from what all ranks agree on, [rows, hidden], and from `sums`, oldest first: all-reduces that are
        complete but that no reader has waited for. `drifts`: what each of these carries, and this rank's own at the
        end; empty: none.
        """
        self._comm = comm
        self._lanes = lanes or OneLane()
        made = self._lanes.made
        *carried, own = [None if drift is None else made(drift) for drift in drifts or (None,) * (len(sums) + 1)]
        # those that some lane has not joined to its `agreed` yet, oldest first; `_gone` others came before them
        self._all_reduces = deque(AllReduce(made(Completed(x)), drift) for x, drift in zip(sums, carried, strict=True))
        self._gone = 0
        self._read = 0  # so many a reader has waited for
        self._agreed = [(made(agreed), 0)] * self._lanes.count  # of each lane, and how many have joined it
        self._base: Made[Tensor] | None = None  # of the terms that are being read
        self._drift: Made[Tensor] | None = own
        self._fresh: Made[Tensor] | None = None  # what is to join the drift with the next read
        self._held: Made[Tensor] | None = None
        self._held_outputs: list[tuple[Made[Tensor], Post]] = []  # held, and still to go through their norms
        self._reduces_to_come: int | None = None  # None: unknown

    @classmethod
    def from_partial(
        cls, comm: Comm, embedding: Tensor, reduces: int | None = None, lanes: Lanes | None = None
    ) -> "ResidualStream":
        """Starts from the ranks' partial embeddings, whose all-reduce every wiring waits for. `reduces` will follow."""
        stream = cls(comm, comm.all_reduce(embedding).wait(), lanes=lanes)
        stream._reduces_to_come = reduces
        return stream

    def read(self, lag: int, staleness: Tensor | None = None, held: bool = True) -> Tensor:
        """The stream with at most the newest `lag` all-reduces missing: waits for the older ones, oldest first.

        `staleness` (none: 1) is how much is missing of those and, if `held`, of a partial sum that is held; for
        training, on one lane, since reading a part of them means waiting.
        """
        self._join()
        terms = self.begin_read(lag)
        stream = terms.base
        for pending in terms.pending:
            stream = stream + pending.wait()
        self.end_read(terms, stream)
        for drift in terms.more:
            stream = stream + drift
        if staleness is not None:
            assert self._lanes.count == 1
            self._all_reduces = deque(
                AllReduce(self._lanes.made(Completed(each.pending.x.wait())), each.drift) for each in self._all_reduces
            )
            for each in self._all_reduces:
                missing = each.pending.x.wait()
                missing = missing if each.drift is None else missing - each.drift.x  # which was read instead
                stream = stream + (1 - staleness) * missing
            if held and self._held is not None:
                stream = stream + (1 - staleness) * self.total(self._held.x.clone())
        return stream

    def begin_read(self, lag: int) -> Terms:
        """`read` for a kernel that waits and adds by itself. Afterwards it must call `end_read`."""
        lanes = self._lanes
        self._read = max(self._read, self._begun - lag)
        agreed, joined = self._agreed[lanes.current]
        for other, count in self._agreed:
            if count > joined and lanes.has(other):
                agreed, joined = other, count
        wanted = [self._all_reduces[number - self._gone].pending for number in range(joined, self._read)]
        carried = [each.drift for number, each in enumerate(self._all_reduces, self._gone) if number >= self._read]
        if self._fresh is not None and (wanted or any(carried)):
            self._join()
        if lanes.count > 1:  # before anything is used: what is used is read by the kernel that this lane is given next
            for each in wanted:
                if isinstance(each.x, Once):
                    lanes.use(each).prepare()  # type: ignore[attr-defined]
        drifts = tuple(lanes.use(drift) for drift in (*carried, self._drift) if drift is not None)
        pending, base = [lanes.use(each) for each in wanted], lanes.use(agreed)
        self._base = agreed
        if self._fresh is not None:
            # the reader joins the fresh term to the drift, as it would an all-reduce to what the ranks agree on
            return Terms(drifts[0], (Completed(lanes.use(self._fresh)),), (base,), local=True)
        return Terms(base, tuple(pending), drifts, polls=lanes.current == 0)

    def end_read(self, terms: Terms, total: Tensor) -> None:
        """`total` is base + pending of the terms."""
        base, self._base = self._base, None
        if terms.local:
            self._drift, self._fresh = self._lanes.made(total), None
            return
        assert base is not None
        made = base if total is terms.base else self._lanes.made(total)  # the base's memory may be another lane's
        self._agreed[self._lanes.current] = made, self._read
        while self._gone < min(joined for _, joined in self._agreed):
            self._all_reduces.popleft()
            self._gone += 1

    def total(self, x: Tensor) -> Tensor:
        """The sum of `x` over the ranks, waited for: for the few numbers that all ranks need at once."""
        return self._comm.all_reduce(x).wait()

    def _join(self) -> None:
        if self._fresh is not None:
            assert self._drift is not None
            drift = self._lanes.use(self._drift) + self._lanes.use(self._fresh)
            self._drift, self._fresh = self._lanes.made(drift), None

    def write(self, partial: Tensor | Producer, out: Out, post: Post | None = None) -> None:
        """Add a sub-block's partial sum to the stream, as `out` says; the tensor belongs to the stream now.

        With `post`, what joins the stream is post( sum over ranks ( partial )); `local`: post( partial ).
        """
        if post is not None:
            return self._write_output(partial if isinstance(partial, Tensor) else _whole(partial(None, 1)), out, post)
        if not isinstance(partial, Tensor) and out is Out.LOCAL:
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
        held = None if self._held is None else self._lanes.use(self._held)
        drift = None if self._drift is None else self._lanes.use(self._drift)
        if out is Out.LOCAL and held is None:
            return (self._lanes.use(self._agreed[0][0]) if self._alone else drift), 1
        if out is Out.REDUCE and held is None:
            return drift, self._comm.size
        if out is Out.REDUCE and held is not None and drift is not None:
            return held + drift / self._comm.size, 1
        assert out is not Out.LOCAL, "a row that holds a partial sum reduces it with the next one"
        return held, 1

    @property
    def rows(self) -> int:
        return len(self._agreed[0][0].x)

    @property
    def _alone(self) -> bool:
        """A single rank on one lane: what it adds is agreed on at once. (Each lane has an `agreed` of its own.)"""
        return self._comm.size == 1 and self._lanes.count == 1

    @property
    def _begun(self) -> int:
        return self._gone + len(self._all_reduces)

    def _put(self, partial: Tensor | Iterable[Tensor], out: Out) -> None:
        """`write` of a partial sum that its addend has joined."""
        self._held = None
        if out is Out.HOLD:
            self._held = self._lanes.made(_whole(partial))
        elif out is Out.LOCAL and self._alone:
            self._agreed[0] = self._lanes.made(_whole(partial)), self._agreed[0][1]
        elif out is Out.LOCAL:
            self._drift = self._lanes.made(_whole(partial))
        elif isinstance(partial, Tensor):
            self._send(self._comm.all_reduce(partial))
        else:
            self._send(Once(Pieces([self._comm.all_reduce(piece) for piece in partial]), self._lanes))

    def _write_fresh(self, partial: Tensor) -> None:
        """`write` by the way of `local`, but it is left to the next reader to join the partial sum to the drift; or to
        the stream itself, where all that was begun has been read and no all-reduce will ever need the drift.
        """
        nobody_else = self._comm.size == 1 or self._reduces_to_come == 0
        if nobody_else and self._drift is None and self._read == self._begun:
            self._all_reduces.append(AllReduce(self._lanes.made(Completed(partial)), None))
            self._read += 1
        elif self._drift is None:
            self._drift = self._lanes.made(partial)
        else:
            self._join()
            self._fresh = self._lanes.made(partial)

    def _write_output(self, output: Tensor, out: Out, post: Post) -> None:
        if out is Out.LOCAL:
            return self.write(lambda *_: post(output), out)
        self._held_outputs.append((self._lanes.made(output), post))
        if out is Out.REDUCE:
            self._join()
            terms: list[tuple[Tensor, Post | None]] = [(self._lanes.use(x), each) for x, each in self._held_outputs]
            self._held_outputs = []
            if self._drift is not None:
                terms.append((self._lanes.use(self._drift) / self._comm.size, None))
            together = terms[0][0] if len(terms) == 1 else torch.cat([x for x, _ in terms])
            pending = Processed(self._comm.all_reduce(together), [each for _, each in terms])
            self._send(Once(pending, self._lanes))

    def _send(self, pending: Pending) -> None:
        """An all-reduce has begun, and carries the drift."""
        self._all_reduces.append(AllReduce(self._lanes.made(pending), self._drift))
        self._drift = None
        if self._reduces_to_come is not None:
            self._reduces_to_come -= 1

    def rest(self) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        """What the constructor needs to go on from here, in another layer's scope: waits for every all-reduce."""
        assert self._held is None and self._fresh is None and not self._held_outputs and self._lanes.count == 1
        self._all_reduces = deque(
            AllReduce(Made(Completed(each.pending.x.wait())), each.drift) for each in self._all_reduces
        )
        drifts = [
            None if drift is None else drift.x for drift in (*(each.drift for each in self._all_reduces), self._drift)
        ]
        return self._agreed[0][0].x, [each.pending.x.wait() for each in self._all_reduces], drifts

    def rest_of_all_ranks(self) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        """`rest`, the same on all ranks: of a drift every rank's, one beside the other, [rows, ranks x hidden]."""
        agreed, sums, drifts = self.rest()
        return agreed, sums, [None if drift is None else self._comm.all_gather(drift) for drift in drifts]


def _whole(partial: Tensor | Iterable[Tensor]) -> Tensor:
    return partial if isinstance(partial, Tensor) else torch.cat(list(partial))
