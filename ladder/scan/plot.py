"""A scan as a picture: what each layer costs alone, and what growing sets cost.

matplotlib and its style come from the caller: it is optional, and imported in one place.
"""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from ladder.files import replaced
from ladder.scan.probe import Damage
from ladder.scan.propose import Proposal
from ladder.scan.scan import Scan

# after Okabe and Ito: colour-blind readers can tell them apart
OTHER, GROWN, LAST, BUDGET = "#9a9a9a", "#0072b2", "#e69f00", "#d55e00"
WIDE = 20  # from this ratio of the largest to the smallest on, an axis is logarithmic
_INK = "#444444"


def draw(
    pyplot: Any, scan: Scan, path: Path, name: str, budget: float | None = None, proposal: Proposal | None = None
) -> None:
    """Left: each layer alone, those of the proposal in colour. Right: sets by size, with the budget as a line."""
    width = max(6.0, min(12.0, 0.2 * len(scan.alone)))
    size = (width + 6.5, 5.2)
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=size, layout="constrained", width_ratios=(width, 6.0), gridspec_kw={"wspace": 0.06}
    )
    figure.suptitle(_title(name, scan, proposal), x=0.01, ha="left", fontsize=13, fontweight="bold")
    _alone(left, scan, proposal)
    _curves(right, scan, budget, proposal)
    with replaced(path) as partial:
        figure.savefig(partial, dpi=120, format=path.suffix[1:].lower())
    pyplot.close(figure)


def _alone(axis: Any, scan: Scan, proposal: Proposal | None) -> None:
    layers = [damage.layers[0] for damage in scan.alone]
    chosen = () if proposal is None else proposal.damage.layers
    heights, errors = _heights(scan.alone)
    colours = [OTHER if proposal and layer not in chosen else GROWN for layer in layers]
    axis.bar(layers, heights, 0.8, color=colours)
    axis.errorbar(layers, heights, yerr=errors, fmt="none", ecolor=_INK, elinewidth=0.9, capsize=1.5)
    _scale(axis, [*heights])
    axis.set_xlim(-0.7, len(scan.wiring.layers) - 0.3)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("layer")
    hint = "" if OTHER not in colours else "  (blue: proposed, grey: left as it is)"
    axis.set_title(f"Each layer alone{hint}", fontsize=12, loc="left")


def _curves(axis: Any, scan: Scan, budget: float | None, proposal: Proposal | None) -> None:
    looks = (("least damage first", scan.grown, GROWN, "o-"), ("last n layers", scan.last, LAST, "s--"))
    every: list[float] = []
    for label, sets, colour, form in looks:
        heights, errors = _heights(sets)
        every += heights
        counts = [len(damage.layers) for damage in sets]
        look = {"color": colour, "fmt": form, "markersize": 6, "linewidth": 1.8, "elinewidth": 0.9, "capsize": 2}
        axis.errorbar(counts, heights, yerr=errors, label=label, **look)
    if budget is not None:
        axis.axhline(budget, color=BUDGET, linestyle=":", linewidth=2, label=f"budget {budget:g}")
        every.append(budget)
    if proposal is not None and isfinite(proposal.damage.kl):
        _mark(axis, proposal.damage)
    _scale(axis, every)
    axis.set_xlim(0, 1.04 * len(scan.order))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.25)
    axis.set_xlabel(f"layers wired as {scan.row}, of {len(scan.order)}")
    axis.set_title("Growing sets of layers", fontsize=12, loc="left")
    axis.legend(frameon=False, loc="best")


def _mark(axis: Any, damage: Damage) -> None:
    style = {"marker": "*", "s": 260, "color": BUDGET, "edgecolors": "white", "linewidths": 0.8, "zorder": 5}
    axis.scatter([len(damage.layers)], [damage.kl], label=f"proposed: {len(damage.layers)} layers", **style)


def _title(name: str, scan: Scan, proposal: Proposal | None) -> str:
    title = f"{name}: what it costs to wire layers as {scan.row}, {scan.state}"
    if proposal is None:
        return title
    proposed = f"\nproposed: {len(proposal.damage.layers)} of {len(scan.order)} layers, KL {proposal.damage.kl:.3g}"
    return (
        title
        + proposed
        + (f", predicted to be {proposal.predicted:.2f} times as fast as standard" if proposal.predicted else "")
    )


def _heights(sets: Sequence[Damage]) -> tuple[list[float], list[float]]:
    """Values and standard errors; what is not finite is left out."""
    values = [damage.kl if isfinite(damage.kl) else float("nan") for damage in sets]
    errors = [damage.kl_stderr if damage.kl_stderr and isfinite(damage.kl_stderr) else 0.0 for damage in sets]
    return values, errors


def _scale(axis: Any, heights: list[float]) -> None:
    """From 0, or logarithmic where the small ones would not be seen."""
    above = [height for height in heights if height > 0]
    label = "KL to the original, nats per token"
    if above and max(above) > WIDE * min(above):
        axis.set_yscale("log")
        axis.set_ylim(min(above) / 2, max(above) * 2)
        axis.yaxis.set_major_formatter(lambda height, _: f"{height:g}")
        axis.yaxis.set_minor_formatter(lambda height, _: "")
        axis.set_ylabel(f"{label} (logarithmic)")
    else:
        axis.set_ylim(0, 1.15 * max(above) if above else 1.0)
        axis.set_ylabel(label)
