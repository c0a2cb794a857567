"""When a piece of a long prompt is read while others are decoded: so seldom that it costs them little."""

import statistics
import time
from collections import deque
from collections.abc import Sequence

from ladder.engine.model_runner import Command, ModelRunner, NewToken, ReadLong

SHARE = 0.15  # of the time that decoding takes
REMEMBERED = 16  # steps


class Pace:
    """The first rank's clock. What a piece costs is paid back by steps without one."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._plain: deque[float] = deque(maxlen=REMEMBERED)  # seconds of steps that only decoded
        self._debt = 0.0  # seconds that pieces have cost
        self._before = (False, False)  # of the last step: whether it read a prompt, and a long one

    @property
    def due(self) -> Sequence[Command]:
        """What is added to the commands before the next step."""
        return [ReadLong()] if self._runner.holds_back and self._plain and self._debt <= 0 else ()

    def step(self) -> list[NewToken]:
        """The runner's step, timed."""
        begin = time.perf_counter()
        tokens = self._runner.step()
        self._note(time.perf_counter() - begin)
        return tokens

    def _note(self, seconds: float) -> None:
        """Passes may be computed while the next step is prepared: a step's time is that of both."""
        before, self._before = self._before, self._runner.read
        read, long = self._before
        if long or before[1]:
            self._debt += max(0.0, seconds - self._usual(seconds))
            return
        if not (read or before[0]):
            self._plain.append(seconds)
        self._debt = max(0.0, self._debt - SHARE * self._usual(seconds))

    def _usual(self, seconds: float) -> float:
        return statistics.median(self._plain) if self._plain else seconds
