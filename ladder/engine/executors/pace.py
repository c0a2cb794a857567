"""When a piece of a long prompt is read while others are decoded: so seldom that it costs them little."""

import time
from collections import deque
from collections.abc import Sequence

from ladder.engine.model_runner import Command, ModelRunner, NewToken, ReadLong

SHARE = 0.15  # of the time that decoding takes
MOST = 5.0  # seconds of debt: a piece comes in the end, whatever the last one took
REMEMBERED = 16  # steps


class Pace:
    """The first rank's clock. What a piece costs those that are decoded is paid back by their steps."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._recent: deque[float] = deque(maxlen=REMEMBERED)  # seconds of steps without a piece
        self._debt = 0.0  # seconds that pieces have cost
        self._shared = False  # whether the next step is one of others, too
        self._long = False  # whether the last step read a piece

    @property
    def due(self) -> Sequence[Command]:
        """What is added to the commands before the next step."""
        self._shared = self._runner.holds_back
        return [ReadLong()] if self._shared and self._recent and self._debt <= 0 else ()

    def step(self) -> list[NewToken]:
        """The runner's step, timed."""
        begin = time.perf_counter()
        tokens = self._runner.step()
        self._note(time.perf_counter() - begin)
        return tokens

    def _note(self, seconds: float) -> None:
        """Passes may be computed while the next step is prepared: a piece may take its time there."""
        costly, self._long = self._long or self._runner.read_long, self._runner.read_long
        if not costly:
            self._recent.append(seconds)
        if self._shared and self._recent:
            usual = sorted(self._recent)[len(self._recent) // 4]  # of those that read no prompt
            cost = max(0.0, seconds - usual) if costly else 0.0
            self._debt = min(MOST, max(0.0, self._debt + cost - SHARE * usual))
