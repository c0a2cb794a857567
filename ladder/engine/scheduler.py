"""Which request is computed when. Pure bookkeeping: every rank has a scheduler of its own and comes to the same ends.

A step is at most two forward passes: one with the next token of every request that is being continued, one with a piece
of the prompts that wait. How a prompt is cut depends on that prompt alone, so company changes no result.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ladder.engine.options import SamplingParams


@dataclass(frozen=True)
class Job:
    """A request as the ranks know it: tokens in, at most `limit` tokens out. No text."""

    id: int
    tokens: tuple[int, ...]
    limit: int
    params: SamplingParams


@dataclass
class Running:
    """A job in a slot."""

    job: Job
    slot: int
    fed: int = 0  # tokens of the prompt that the cache has, or is about to have
    new: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Pass:
    """One forward pass: for each line its job and the tokens it is fed."""

    lines: tuple[Running, ...]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def slots(self) -> list[int]:
        return [line.slot for line in self.lines]


class Scheduler:
    """Jobs wait in order for one of `slots` slots; prompts are fed in pieces of at most `chunk` tokens."""

    def __init__(self, slots: int, chunk: int) -> None:
        self.chunk = chunk
        self.waiting: deque[Job] = deque()
        self.running: dict[int, Running] = {}  # by id, in the order they got their slots
        self._newest_first = False
        self.free = list(range(slots - 1, -1, -1))  # the lowest is taken first: slots in use tend to be neighbours

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, job: Job) -> None:
        self.waiting.append(job)

    def drop(self, id: int) -> None:
        """Forget a job that is finished or no longer wanted, wherever it is; an unknown one is no error."""
        if id in self.running:
            self.free.append(self.running.pop(id).slot)
            self.free.sort(reverse=True)
        else:
            self.waiting = deque(job for job in self.waiting if job.id != id)

    def admit(self) -> list[Running]:
        """Give free slots to those who wait; returns who got one."""
        admitted = []
        while self.waiting and self.free:
            running = Running(self.waiting.popleft(), self.free.pop())
            self.running[running.job.id] = running
            admitted.append(running)
        return admitted

    def continuing(self) -> Pass | None:
        """The next token of every job whose prompt has been read."""
        lines = sorted((line for line in self.running.values() if line.new), key=lambda line: line.slot)
        return Pass(tuple(lines), tuple((line.new[-1],) for line in lines)) if lines else None

    def beginning(self) -> Pass | None:
        """Pieces of prompts, as many as fit `chunk` tokens when all are padded to the longest.

        In turns the oldest comes first, so that none is forgotten, and the one of which least has been read, so that
        a short prompt need not wait for the end of a long one.
        """
        lines: list[Running] = []
        pieces: list[tuple[int, ...]] = []
        unread = [line for line in self.running.values() if not line.new]
        if self._newest_first:
            unread.sort(key=lambda line: line.fed)
        self._newest_first = not self._newest_first and len(unread) > 1
        for line in unread:
            piece = line.job.tokens[line.fed : line.fed + self.chunk]
            width = max(len(piece), *map(len, pieces)) if pieces else len(piece)
            if pieces and width * (len(pieces) + 1) > self.chunk:
                break
            lines.append(line)
            pieces.append(piece)
        for line, piece in zip(lines, pieces, strict=True):
            line.fed += len(piece)
        return Pass(tuple(lines), tuple(pieces)) if lines else None


def finish_reason(line: Running, eos: Sequence[int]) -> str | None:
    """Why a job ends with the newest of its tokens, if it does."""
    if line.new[-1] in eos:
        return "stop"
    return "length" if len(line.new) == line.job.limit else None
