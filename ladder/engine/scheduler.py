"""The scheduler: which sequence is computed when, and in which blocks of the cache. Every rank runs its own, and all
decide alike.

A step is at most two forward passes: a decode batch with the next token of every sequence whose prompt has been read,
and a prefill batch with pieces of the prompts that are still being read. How a prompt is cut depends on that prompt
and on where its unknown part begins, so the other sequences of a batch change no result. Long prompts are read in
small pieces, while others are decoded only when the caller says so: see pace.py.

A step may be scheduled before the tokens of the one before it are known: `pending` counts those of a sequence. Where
blocks run out, the sequence that came last is preempted: it gives back its blocks, and waits to be read again with all
the tokens that it has.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ladder.engine.blocks import BlockPool, names_of
from ladder.engine.options import SamplingParams
from ladder.layers.cache import BLOCK

LONG, SMALL = 16384, 256  # tokens of a prompt that has to wait for others, and of its pieces
AHEAD = 4  # blocks that a sequence is given at once while there are plenty: tables are written less often


@dataclass(frozen=True)
class SequenceSpec:
    """A request as the ranks know it: tokens in, at most `limit` tokens out. No text."""

    id: int
    tokens: tuple[int, ...]
    limit: int
    params: SamplingParams


@dataclass(eq=False)
class RunningSequence:
    """A sequence; while it runs it has a slot and blocks of the KV cache."""

    spec: SequenceSpec
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    unread: tuple[int, ...] = ()  # what had to be read when it was admitted: its prompt, and after a preemption more
    names: list[bytes] = field(default_factory=list)  # of the blocks that this fills
    computed: int = 0  # tokens that have been scheduled so far: their keys and values are, or will be, in the cache
    new: list[int] = field(default_factory=list)
    pending: int = 0  # tokens that have been scheduled but are not known yet
    long: bool = False  # whether what it had to read was long

    @property
    def reading(self) -> bool:
        return self.computed < len(self.unread)

    @property
    def complete(self) -> bool:
        """Whether all its tokens have been scheduled."""
        return len(self.new) + self.pending >= self.spec.limit


@dataclass(frozen=True)
class ScheduledBatch:
    """One forward pass: its sequences, from which position on, and for prefill the tokens that each is fed."""

    sequences: tuple[RunningSequence, ...]
    starts: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...] = ()  # none: every sequence's newest token

    answered: tuple[RunningSequence, ...] = ()  # the sequences that a token is chosen for
    decoded: int = 0  # of the sequences of a prefill, the first so many are fed their newest token

    @property
    def slots(self) -> list[int]:
        return [sequence.slot for sequence in self.sequences]

    def joined(self, decode: "ScheduledBatch") -> "ScheduledBatch":
        """This prefill batch and a decode batch as one pass: the weights are read once."""
        newest = ((),) * len(decode.sequences)
        return ScheduledBatch(
            decode.sequences + self.sequences, decode.starts + self.starts, newest + self.tokens,
            decode.answered + self.answered, len(decode.sequences),
        )  # fmt: skip

    @property
    def long(self) -> bool:
        """Whether a piece of a long prompt is part of it."""
        return bool(self.tokens) and self.sequences[-1].long


class Scheduler:
    """Sequences wait in order for one of `slots` slots and for blocks; prompts are read in chunks of at most `chunk`
    tokens. More than `long` of them are a long prompt.
    """

    def __init__(self, slots: int, chunk: int, blocks: BlockPool, long: int = LONG) -> None:
        self.chunk = chunk
        self._long = long
        self.waiting: deque[RunningSequence] = deque()
        self.running: dict[int, RunningSequence] = {}  # by id, in the order they got their slots
        self.blocks = blocks
        self.preemptions = 0
        self._least_read_first = False
        self.free = list(range(slots - 1, -1, -1))  # the lowest is taken first: slots in use tend to be neighbours
        self.moved: dict[int, RunningSequence] = {}  # by slot: sequences whose blocks changed, for the tables

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, spec: SequenceSpec) -> None:
        self.waiting.append(RunningSequence(spec))

    def drop(self, id: int) -> None:
        """Forget a sequence that is finished or aborted, running or waiting; an unknown id is no error."""
        if id in self.running:
            self._release(self.running.pop(id))
        else:
            self.waiting = deque(each for each in self.waiting if each.spec.id != id)

    def _release(self, sequence: RunningSequence) -> None:
        self.moved.pop(sequence.slot, None)
        self.free.append(sequence.slot)
        self.free.sort(reverse=True)
        self.blocks.give_back(sequence.blocks)
        sequence.blocks = []

    def admit(self) -> list[RunningSequence]:
        """Give free slots and blocks to waiting sequences, in their order; returns those that got them."""
        admitted = []
        while self.waiting and self.free and self._fits(self.waiting[0]):
            sequence = self.waiting.popleft()
            sequence.slot = self.free.pop()
            self.running[sequence.spec.id] = sequence
            self.moved[sequence.slot] = sequence
            admitted.append(sequence)
        return admitted

    def _fits(self, sequence: RunningSequence) -> bool:
        """Take the blocks that a sequence needs for what it has to read and for one more token, if they are free, and
        if every running sequence could still get one. Beginnings that others have read already are shared.
        """
        if not sequence.unread:  # else it has waited for blocks since an earlier step
            sequence.unread = (*sequence.spec.tokens, *sequence.new)
            sequence.names = list(names_of(sequence.unread))
        unread = sequence.unread
        # at least one token is read: its logits are needed
        shared = self.blocks.find(sequence.names[: (len(unread) - 1) // BLOCK])
        count = len(unread) // BLOCK + 1
        needed = count - len(shared) + self.blocks.kept_of(shared)
        if needed + len(self.running) > self.blocks.free and self.running:
            return False
        self.blocks.share(shared)
        sequence.blocks = [*shared, *(self.blocks.take() for _ in range(count - len(shared)))]
        sequence.computed = len(shared) * BLOCK
        # one that is read again after a preemption has been answered already: it does not wait
        sequence.long = not sequence.new and len(unread) - sequence.computed > self._long
        return True

    def preempt(self) -> RunningSequence:
        """The sequence that came last waits again, before all others. Its tokens must be known."""
        sequence = self.running.pop(next(reversed(self.running)))
        assert not sequence.pending
        self._release(sequence)
        sequence.unread, sequence.computed, sequence.slot = (), 0, -1
        self.waiting.appendleft(sequence)
        self.preemptions += 1
        return sequence

    def lacks_blocks(self) -> bool:
        """Whether the next decode batch needs more blocks than there are."""
        return sum(self._needs_block(each) for each in self._going_on()) > self.blocks.free

    @staticmethod
    def _needs_block(sequence: RunningSequence) -> bool:
        return sequence.computed >= len(sequence.blocks) * BLOCK

    def _going_on(self) -> list[RunningSequence]:
        return [each for each in self.running.values() if not each.reading and not each.complete]

    def decode_batch(self) -> ScheduledBatch | None:
        """The newest token of every sequence whose prompt has been read, whether it is known or not."""
        sequences = sorted(self._going_on(), key=lambda each: each.slot)
        for sequence in sequences:
            if self._needs_block(sequence):
                left = -(-(len(sequence.spec.tokens) + sequence.spec.limit) // BLOCK) - len(sequence.blocks)
                plenty = self.blocks.free > 2 * AHEAD * len(self.running)
                sequence.blocks += [self.blocks.take() for _ in range(max(1, min(AHEAD if plenty else 1, left)))]
                self.moved[sequence.slot] = sequence
        starts = tuple(each.computed for each in sequences)
        for sequence in sequences:
            sequence.computed += 1
            sequence.pending += 1
        return ScheduledBatch(tuple(sequences), starts, answered=tuple(sequences)) if sequences else None

    @property
    def holds_back(self) -> bool:
        """Whether a long prompt waits for its next piece while others are decoded."""
        return any(each.reading and each.long for each in self.running.values()) and bool(self._going_on())

    def prefill_batch(self, long: bool = False, alone: bool = False) -> ScheduledBatch | None:
        """Pieces of prompts, as many as fit `chunk` tokens, and last one of a long prompt: if nothing else is computed
        in this step (`alone`: nothing is decoded), or a small one with `long`, or beside other prompts.

        Steps alternate between oldest first, so that no prompt starves, and least read first, so that a short prompt
        need not wait for the end of a long one.
        """
        sequences: list[RunningSequence] = []
        pieces: list[tuple[int, ...]] = []
        reading = [each for each in self.running.values() if each.reading]
        unread = [each for each in reading if not each.long]
        if self._least_read_first:
            unread.sort(key=lambda each: each.computed)
        self._least_read_first = not self._least_read_first and len(unread) > 1
        room = self.chunk
        for sequence in unread:
            piece = sequence.unread[sequence.computed : sequence.computed + self.chunk]
            room -= len(piece)
            if room < 0:
                break
            sequences.append(sequence)
            pieces.append(piece)
        oldest = next((each for each in reading if each.long), None)
        if oldest is not None and (long or alone):
            count = self.chunk if alone and not unread else min(self.chunk, max(SMALL, self.chunk // 8))
            sequences.append(oldest)  # the last one: see `ScheduledBatch.long`
            pieces.append(oldest.unread[oldest.computed : oldest.computed + count])
        starts = tuple(each.computed for each in sequences)
        for sequence, piece in zip(sequences, pieces, strict=True):
            self._read(sequence, len(piece))
        answered = tuple(each for each in sequences if not each.reading)
        return ScheduledBatch(tuple(sequences), starts, tuple(pieces), answered) if sequences else None

    def _read(self, sequence: RunningSequence, count: int) -> None:
        """A pass reads so many tokens of a sequence; what comes after it can share the blocks that they fill."""
        begin, end = sequence.computed // BLOCK, (sequence.computed + count) // BLOCK
        sequence.computed += count
        sequence.pending += not sequence.reading
        for block, name in zip(sequence.blocks[begin:end], sequence.names[begin:end], strict=True):
            self.blocks.name(block, name)


def finish_reason(sequence: RunningSequence, eos: Sequence[int]) -> str | None:
    """Why a sequence ends with the newest of its tokens, if it does."""
    params, token = sequence.spec.params, sequence.new[-1]
    ends = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
    if ends and len(sequence.new) >= params.min_tokens:
        return "stop"
    return "length" if len(sequence.new) == sequence.spec.limit else None
