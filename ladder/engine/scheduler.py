"""The scheduler: which sequence is computed when. Every rank runs its own, and all decide alike.

A step is at most two forward passes: a decode batch with the next token of every sequence whose prompt has been read,
and a prefill batch with a chunk of the prompts that are still being read. How a prompt is cut depends on that prompt
alone, so the other sequences of a batch change no result.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ladder.engine.options import SamplingParams


@dataclass(frozen=True)
class SequenceSpec:
    """A request as the ranks know it: tokens in, at most `limit` tokens out. No text."""

    id: int
    tokens: tuple[int, ...]
    limit: int
    params: SamplingParams


@dataclass
class RunningSequence:
    """A sequence in a slot of the KV cache."""

    spec: SequenceSpec
    slot: int
    prefilled: int = 0  # prompt tokens that have been scheduled so far
    new: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class ScheduledBatch:
    """One forward pass: its sequences, and the tokens that each is fed."""

    sequences: tuple[RunningSequence, ...]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def slots(self) -> list[int]:
        return [sequence.slot for sequence in self.sequences]


class Scheduler:
    """Sequences wait in order for one of `slots` slots; prompts are read in chunks of at most `chunk` tokens."""

    def __init__(self, slots: int, chunk: int) -> None:
        self.chunk = chunk
        self.waiting: deque[SequenceSpec] = deque()
        self.running: dict[int, RunningSequence] = {}  # by id, in the order they got their slots
        self._least_read_first = False
        self.free = list(range(slots - 1, -1, -1))  # the lowest is taken first: slots in use tend to be neighbours

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, spec: SequenceSpec) -> None:
        self.waiting.append(spec)

    def drop(self, id: int) -> None:
        """Forget a sequence that is finished or aborted, running or waiting; an unknown id is no error."""
        if id in self.running:
            self.free.append(self.running.pop(id).slot)
            self.free.sort(reverse=True)
        else:
            self.waiting = deque(spec for spec in self.waiting if spec.id != id)

    def admit(self) -> list[RunningSequence]:
        """Give the free slots to waiting sequences; returns those that got one."""
        admitted = []
        while self.waiting and self.free:
            running = RunningSequence(self.waiting.popleft(), self.free.pop())
            self.running[running.spec.id] = running
            admitted.append(running)
        return admitted

    def decode_batch(self) -> ScheduledBatch | None:
        """The newest token of every sequence whose prompt has been read."""
        sequences = sorted((each for each in self.running.values() if each.new), key=lambda each: each.slot)
        return ScheduledBatch(tuple(sequences), tuple((each.new[-1],) for each in sequences)) if sequences else None

    def prefill_batch(self) -> ScheduledBatch | None:
        """Chunks of prompts, as many as fit `chunk` tokens when all are padded to the longest.

        Steps alternate between oldest first, so that no prompt starves, and least read first, so that a short prompt
        need not wait for the end of a long one.
        """
        sequences: list[RunningSequence] = []
        chunks: list[tuple[int, ...]] = []
        unread = [each for each in self.running.values() if not each.new]
        if self._least_read_first:
            unread.sort(key=lambda each: each.prefilled)
        self._least_read_first = not self._least_read_first and len(unread) > 1
        for sequence in unread:
            chunk = sequence.spec.tokens[sequence.prefilled : sequence.prefilled + self.chunk]
            width = max(len(chunk), *map(len, chunks)) if chunks else len(chunk)
            if chunks and width * (len(chunks) + 1) > self.chunk:
                break
            sequences.append(sequence)
            chunks.append(chunk)
        for sequence, chunk in zip(sequences, chunks, strict=True):
            sequence.prefilled += len(chunk)
        return ScheduledBatch(tuple(sequences), tuple(chunks)) if sequences else None


def finish_reason(sequence: RunningSequence, eos: Sequence[int]) -> str | None:
    """Why a sequence ends with the newest of its tokens, if it does."""
    params, token = sequence.spec.params, sequence.new[-1]
    ends = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
    if ends and len(sequence.new) >= params.min_tokens:
        return "stop"
    return "length" if len(sequence.new) == sequence.spec.limit else None
