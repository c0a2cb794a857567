"""The executor whose first rank is this process: a single rank, or the first of those that torchrun has started."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from ladder.engine.executors.control import Control, leave
from ladder.engine.executors.pace import Pace
from ladder.engine.executors.torchrun import torchrun_rank
from ladder.engine.model_runner import Command, ModelRunner, NewToken, Shutdown
from ladder.errors import LadderError, RankError


class InProcessExecutor:
    """Runs every step in the caller's thread; the other ranks `follow`."""

    def __init__(self, runner: ModelRunner, control: Control) -> None:
        self._runner = runner
        self._pace = Pace(runner)
        self._control = control
        self._sent: deque[Sequence[Command]] = deque()  # for the next step
        self._step_lock = threading.Lock()  # another thread may close
        self._early: list[NewToken] = []  # of steps made for `free_slots`

    @property
    def room(self) -> int:
        return self._runner.room

    @property
    def free_slots(self) -> int:
        if self._sent and not self._runner.stopped:
            self._early += self._step()
        return self._runner.free_slots

    def send(self, commands: Sequence[Command]) -> None:
        self._sent.append(commands)

    def poll(self) -> list[NewToken]:
        early, self._early = self._early, []
        return early or self._step()

    def _step(self) -> list[NewToken]:
        if self._runner.stopped:
            raise LadderError("a step was interrupted: make a new LLM")
        commands: list[Command] = []
        while self._sent:
            commands += self._sent.popleft()
        with lost_peers(), self._step_lock:
            try:
                self._runner.apply(self._control.share([*commands, *self._pace.due]))
                return self._pace.step() if self._runner.busy else []
            except BaseException:
                self._runner.apply([Shutdown()])  # a step that is half done cannot be continued, on any rank
                raise

    def close(self) -> None:
        with self._step_lock:
            if not self._runner.stopped:
                self._runner.apply([Shutdown()])
                with lost_peers():
                    self._control.share([Shutdown()])
                leave()


@contextmanager
def lost_peers() -> Iterator[None]:
    """Under torchrun, communication that breaks means that another rank has ended: one sentence, no traceback."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        own = torchrun_rank()
        if own is None:
            raise  # a single rank: its own error
        raise RankError(f"rank {own.rank} lost the others: {' '.join(str(error).split())}") from error
