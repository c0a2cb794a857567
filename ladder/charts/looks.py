"""Colours and names of arms, the same in every figure; formats of numbers."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

TWO_LANES = ", two lanes"  # of an arm that computes attention and MLP at the same time
TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True)
class Look:
    """An arm's colour, its shape among points, and how its bars are filled: solid, hatched or hollow."""

    colour: str
    marker: str
    fill: str = "solid"


# In the order in which they are drawn. Colours after Okabe and Ito, which colour-blind readers can tell apart.
LOOKS: dict[str, Look] = {
    "standard": Look("#7f7f7f", "circle"),
    "standard-fused": Look("#7f7f7f", "square", "hatched"),
    "parallel": Look("#56b4e9", "triangle"),
    "parallel-1": Look("#8b6914", "triangle"),
    "desync-2x": Look("#009e73", "down"),
    "hybrid": Look("#e69f00", "diamond"),
    "ladder": Look("#d55e00", "circle"),
    "ladder-1-2": Look("#0072b2", "square"),
    "ladder-2": Look("#cc79a7", "pentagon"),
    "none": Look("#7f7f7f", "cross", "hollow"),
}
# For wirings without a row above; after the last of them they begin again, hatched.
_SPARE = ("#b2a300", "#6a51a3", "#17becf", "#a6761d", "#b22222", "#4d9221")
_SHAPES = ("triangle", "diamond", "square", "down", "pentagon", "circle")


def looks(arms: Iterable[str]) -> dict[str, Look]:
    """Every arm's look, in the order in which they are drawn: standard first, no communication last."""
    found = set(arms)
    known = LOOKS | {f"{arm}{TWO_LANES}": replace(look, fill="hatched") for arm, look in LOOKS.items()}
    others = sorted(found - set(known))
    spare = {
        arm: Look(_SPARE[n % 6], _SHAPES[(n + n // 6) % 6], "solid" if n < 6 else "hatched")
        for n, arm in enumerate(others)
    }
    present = {arm: look for arm, look in known.items() if arm in found}
    last = {arm: present.pop(arm) for arm in ("none",) if arm in present}
    return {**present, **spare, **last}


def figure(value: float) -> str:
    """Three digits that count."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}" if value >= 0.01 or value == 0 else f"{value:.2g}"
