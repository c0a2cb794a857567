"""When requests are sent: at times that do not depend on the answers (open loop), or each as another ends (closed)."""

import math
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Arrivals:
    """Either requests per second, `math.inf` for all at once, or how many are under way at any time."""

    rate: float | None = None
    concurrency: int | None = None

    @property
    def kind(self) -> str:
        if self.rate is None:
            return "closed"
        return "at once" if math.isinf(self.rate) else "poisson"

    @property
    def name(self) -> str:
        if self.rate is None:
            return f"{self.concurrency} at a time"
        return "all at once" if math.isinf(self.rate) else f"{self.rate:g} requests/s"

    def times(self, count: int, seed: int) -> list[float]:
        """Seconds after the start at which requests of an open loop are due: a Poisson process whose first event is
        the start. The times of a seed are the same whatever the prompts are.
        """
        assert self.rate is not None
        if math.isinf(self.rate):
            return [0.0] * count
        random, now, found = Random(f"arrivals {seed}"), 0.0, []
        for _ in range(count):
            found.append(now)
            now += random.expovariate(self.rate)
        return found
