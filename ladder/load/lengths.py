"""Lengths of prompts and outputs: fixed, uniform or lognormal."""

import math
import re
from dataclasses import dataclass
from random import Random

from ladder.errors import LadderError

LONGEST = 10_000_000  # tokens
FORMS = "512, 128-1024, or lognormal:300,0.8 (the median, and the standard deviation of the logarithm)"


@dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers: uniform from `low` to `high`, or lognormal, cut at both."""

    low: int
    high: int
    median: float | None = None
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str, what: str) -> "Lengths":
        """From an option; `what` names it."""
        if found := re.fullmatch(r"(\d{1,8})(?:-(\d{1,8}))?", text):
            low, high = int(found[1]), int(found[2] or found[1])
            if not 1 <= low <= high <= LONGEST:
                raise LadderError(f"{what} {text!r} must be from 1 to {LONGEST}, the smaller number first")
            return cls(low, high)
        if found := re.fullmatch(r"lognormal:(\d{1,8}(?:\.\d{1,6})?),(\d(?:\.\d{1,6})?)", text):
            median, sigma = float(found[1]), float(found[2])
            if not 1 <= median <= LONGEST:
                raise LadderError(f"{what} {text!r}: the median must be from 1 to {LONGEST}")
            return cls(1, LONGEST, median, sigma)
        raise LadderError(f"{what} {text!r} is no length: write {FORMS}")

    def draw(self, random: Random) -> int:
        if self.median is None:
            return random.randint(self.low, self.high)
        drawn = random.lognormvariate(math.log(self.median), self.sigma)
        return max(self.low, min(self.high, round(drawn)))
