"""Proposes layers to rewire from a scan: within a budget of damage, or fast enough by the performance model.

Speed is that of decoding a token, in times of the standard wiring, on a machine that `ladder plan` knows. The
performance model walks the pattern layer by layer, so every set has its own prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from ladder.errors import LadderError
from ladder.scan.probe import Damage, with_row
from ladder.scan.scan import Scan
from ladder.scan.target import Predictor, check_wishes
from ladder.wiring import Wiring


@dataclass(frozen=True)
class Proposal:
    """A set of layers, beside what was asked for."""

    damage: Damage
    budget: float | None  # nats per token that were allowed
    speed: float | None  # that was asked for, in times of standard
    predicted: float | None  # speed of the set; None without a predictor

    @property
    def over(self) -> float | None:
        """Nats per token beyond the budget: 0 where it is kept, None where there is none."""
        return None if self.budget is None else max(0.0, self.damage.kl - self.budget)


def propose(
    scan: Scan, budget: float | None = None, speed: float | None = None, predictor: Predictor | None = None
) -> Proposal:
    """The layers to wire, of the sets that were measured.

    `budget`: the largest set whose KL stays within it. `speed`: the smallest that is predicted to be so many times as
    fast as standard; it counts before the budget, and `over` says what that costs. Of as many layers those that do
    less harm are taken, the grown set or the last ones: which of them it is may change once they are fitted.
    """
    check_wishes(budget, speed)
    if speed is not None and predictor is None:
        raise LadderError("a speed needs a machine to predict it for: give a predictor")
    if speed is None and budget is None:
        raise LadderError("nothing to propose by: give a budget or a speed")

    def fits(damage: Damage) -> bool:
        if speed is not None and predictor is not None:
            return predictor(_wiring(scan, damage.layers)) >= speed
        return budget is not None and damage.kl <= budget

    fitting = [damage for damage in (*scan.grown, *scan.last) if fits(damage)]
    if not fitting:
        raise LadderError(_none_fits(scan, budget, speed, predictor))
    size = (min if speed is not None else max)(len(damage.layers) for damage in fitting)
    chosen = min((damage for damage in fitting if len(damage.layers) == size), key=_harm)
    predicted = None if predictor is None else predictor(_wiring(scan, chosen.layers))
    return Proposal(chosen, budget, speed, predicted)


def size_for(scan: Scan, speed: float, predictor: Predictor) -> int:
    """Layers that the smallest grown set with this speed has, whether or not it was measured."""
    for size in range(1, len(scan.order) + 1):
        if predictor(_wiring(scan, scan.sized(size)[0])) >= speed:
            return size
    raise LadderError(_none_fits(scan, None, speed, predictor))


def size_between(scan: Scan, budget: float) -> int | None:
    """Half way from the largest set within the budget to the next size that was measured; None: no size is between.

    Damage is taken to grow with the set. Measured again and again, this leads to the largest set within the budget.
    """
    low = max((len(damage.layers) for damage in (*scan.grown, *scan.last) if damage.kl <= budget), default=0)
    high = min((len(damage.layers) for damage in scan.grown if len(damage.layers) > low), default=low)
    return (low + high) // 2 if high - low > 1 else None


def check_reach(speed: float, own: Wiring, layers: Sequence[int], row: str, predictor: Predictor) -> None:
    """Refuse a speed that not even all layers give, before anything is measured."""
    most = predictor(with_row(own, layers, row))
    if most < speed:
        raise LadderError(_too_fast(speed, most, row))


def _none_fits(scan: Scan, budget: float | None, speed: float | None, predictor: Predictor | None) -> str:
    if speed is not None and predictor is not None:
        return _too_fast(speed, max(predictor(_wiring(scan, damage.layers)) for damage in scan.grown), scan.row)
    least = min((*scan.grown, *scan.last), key=_harm)
    which = f"layer {least.layers[0]} alone" if len(least.layers) == 1 else f"{len(least.layers)} layers"
    return f"no set stays within a budget of {budget:g} nats per token: the least is {least.kl:.3g}, with {which}"


def _harm(damage: Damage) -> tuple[bool, float]:
    """For sorting: what is not finite last."""
    return not isfinite(damage.kl), damage.kl


def _too_fast(speed: float, most: float, row: str) -> str:
    return (
        f"{speed:g} times standard's speed cannot be reached with {row}: all layers are predicted to give {most:.3f}; "
        "ask for less, or for another machine"
    )


def _wiring(scan: Scan, layers: Sequence[int]) -> Wiring:
    return with_row(scan.wiring, layers, scan.row)
