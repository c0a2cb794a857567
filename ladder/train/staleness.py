"""How the layers of a model go from what they were, staleness 0, to their wiring, 1, while it learns."""

import random
from dataclasses import dataclass

WAYS = ("together", "first", "last", "chance")
RAMP = 4  # layers that are on their way at a time, where one follows the other


@dataclass(frozen=True)
class Moving:
    """In so many steps, from the first: all layers together; one after the other, the first or the last before the
    others; or each by chance, 0 or 1, the more often 1 the later it is.
    """

    steps: int
    way: str
    layers: tuple[int, ...]  # those that another wiring than standard has
    count: int  # of all layers
    seed: int

    def share(self, step: int) -> float:
        """Of the way, at a step."""
        return min(1.0, step / self.steps)

    def at(self, step: int) -> float | list[float]:
        """Of all layers, or of each, at a step: the same on every rank, and again after a resumption."""
        share = self.share(step)
        if self.way == "together" or share == 1:
            return share
        values, draw = [1.0] * self.count, random.Random(f"{self.seed} {step}")
        for place, index in enumerate(self.layers if self.way == "first" else self.layers[::-1]):
            if self.way == "chance":
                values[index] = float(draw.random() < share)
            else:
                ramp = share * (1 + (len(self.layers) - 1) / RAMP) - place / RAMP
                values[index] = min(1.0, max(0.0, ramp))
        return values
