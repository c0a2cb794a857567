"""The staleness that rises while a model is trained."""

import random
from dataclasses import dataclass

RAMP = 4  # layers whose staleness rises at the same time, where one follows the other


@dataclass(frozen=True)
class StalenessSchedule:
    """From what a model's layers were, staleness 0, to their wiring, 1, in so many steps: all layers together; one
    after the other, from the first or from the last; or each by chance 0 or 1, with a probability that rises.
    """

    steps: int
    way: str
    layers: tuple[int, ...]  # those with another wiring than standard
    count: int  # of all layers
    seed: int

    def share(self, step: int) -> float:
        """How far the schedule is at a step, from 0 to 1."""
        return min(1.0, step / self.steps)

    def at(self, step: int) -> float | list[float]:
        """Of all layers, or of each, at a step: the same on every rank, and again after a resumption."""
        share = self.share(step)
        if self.way == "together" or share == 1:
            return share
        values, draw = [1.0] * self.count, random.Random(f"{self.seed} {step}")
        for position, index in enumerate(self.layers if self.way == "first" else self.layers[::-1]):
            if self.way == "chance":
                values[index] = float(draw.random() < share)
            else:
                ramp = share * (1 + (len(self.layers) - 1) / RAMP) - position / RAMP
                values[index] = min(1.0, max(0.0, ramp))
        return values
