"""Which layers bear another wiring: what each costs alone, and what growing sets of them cost.

    alone   layer i under the row that is tried, all others as they are
    grown   the n layers that hurt least: by their damage alone, or (greedy) each next one by trying all that remain
    last    the last n layers, for comparison

The cost is KL(original || rewired) in nats per token: it sees what moved, whether or not the text likes it. Perplexity
and greedy agreement come with it. Sizes of sets are a sample of the curve; 1, half and all are always among them. A set
costs what it costs merely rewired or, where rows to fit on are given, what is left when `solve` has done what it can.

A window is a row of tokens: position j reads row[0..j] and predicts row[j+1], so a row of W+1 tokens counts W times.
All windows count alike, and standard errors take them as independent, as `ladder.hf.measures` has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import Any

import torch
from torch import Tensor

from ladder.errors import LadderError
from ladder.scan.probe import Damage, Heard, Probe, Progress, borrowed
from ladder.wiring import Wiring

POINTS = 8


@dataclass(frozen=True)
class Scan:
    """All that was measured. Layers that the model has under `row` already are not tried."""

    row: str
    wiring: Wiring  # the original's
    original: Damage  # of no layer: its perplexity
    tokens: int  # that were predicted
    order: tuple[int, ...]  # of the layers, as grown sets take them
    alone: tuple[Damage, ...]  # by layer
    grown: tuple[Damage, ...]  # by size
    last: tuple[Damage, ...]
    fitted: int = 0  # tokens that each set was fitted on; 0: merely rewired

    @property
    def state(self) -> str:
        """What the layers have been through."""
        return f"fitted on {self.fitted} tokens, not trained" if self.fitted else "before any training"

    def sized(self, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The grown set of this size, and the last layers."""
        return tuple(sorted(self.order[:size])), tuple(sorted(self.order))[-size:]


def scan(
    model: Any,
    windows: Tensor,
    row: str = "ladder",
    points: int = POINTS,
    greedy: bool = False,
    batch: int = 8,
    progress: Progress | None = None,
    fit: Tensor | None = None,
    heard: Heard | None = None,
) -> Scan:
    """Try a row of the table on a loaded model, layer by layer and in growing sets.

    `windows`: [n, length] tokens. `points`: about so many sizes of sets, 0 for every size (as greedy has it). `batch`:
    windows at a time; it changes no value. `fit`: rows to fit each set on, a multiple of `batch`. `heard` is told what
    the scan will hold as soon as it is known: fitted, set by set; else round by round.
    """
    if points < 0:
        raise LadderError(f"points is {points}: it must be 0 (every size) or more")
    probe = Probe(model, windows, row, batch, progress, fit, heard)
    layers = probe.layers
    with borrowed(probe.model):
        alone = probe.measure([(layer,) for layer in layers], "layers alone", ["alone"] * len(layers))
        order = [found.layers[0] for found in sorted(alone, key=_cost)]
        if greedy:
            order = _greedy(probe, order)
        grown_sizes = sizes(len(layers), 0 if greedy else points)
        grown = [tuple(sorted(order[:size])) for size in grown_sizes]
        last = [layers[-size:] for size in grown_sizes]
        found = probe.measure([*grown, *last], "growing sets", ["grown"] * len(grown) + ["last"] * len(last))
    curves = (tuple(found[: len(grown)]), tuple(found[len(grown) :]))
    return Scan(probe.row, probe.own, probe.known[()], probe.tokens, tuple(order), tuple(alone), *curves, probe.fitted)


def extended(
    model: Any,
    windows: Tensor,
    found: Scan,
    size: int,
    batch: int = 8,
    progress: Progress | None = None,
    fit: Tensor | None = None,
    heard: Heard | None = None,
) -> Scan:
    """A scan with one more size on its curves, of the same model, windows and rows."""
    if size in (len(damage.layers) for damage in found.grown):
        return found
    probe = Probe(model, windows, found.row, batch, progress, fit, heard)
    with borrowed(probe.model):
        grown, last = probe.measure(found.sized(size), f"{size} layers", ("grown", "last"))
    return replace(found, grown=_by_size(*found.grown, grown), last=_by_size(*found.last, last))


def _by_size(*sets: Damage) -> tuple[Damage, ...]:
    return tuple(sorted(sets, key=lambda damage: len(damage.layers)))


def sizes(layers: int, points: int) -> list[int]:
    """Sizes of sets: evenly spaced, with 1 (which is known already), half and all."""
    if not points:
        return list(range(1, layers + 1))
    return sorted({1, -(-layers // 2), *(-(-layers * step // points) for step in range(1, points + 1))})


def windows_of(tokens: Sequence[int], window: int, most: int, begin: int | None = None) -> Tensor:
    """Windows of a text, [n, window + 1]: each predicts `window` tokens, all together at most `most`.

    As `ladder eval` cuts it: every window's last token is the next one's first, unless texts of the model begin with a
    token of their own. What is left at the end is less than a window, and dropped.
    """
    if most < window:
        raise LadderError(f"{most} tokens are less than a window of {window}: take more of them, or a shorter window")
    count = min(most, len(tokens) - 1) // window
    if count < 1:
        raise LadderError(
            f"the text has {len(tokens)} tokens, a window of {window} needs {window + 1}: "
            "take a longer text, or a shorter window"
        )
    rows = torch.tensor(tokens[: count * window + 1], dtype=torch.long).unfold(0, window + 1, window).clone()
    if begin is not None:
        rows[:, 0] = begin
    return rows


def rows_of(tokens: Sequence[int], measured: Tensor, most: int, batch: int, begin: int | None = None) -> Tensor:
    """Rows to fit on, [n, window], a multiple of `batch`: at most `most` tokens of a text, behind its windows."""
    window = measured.shape[1] - 1
    at = len(measured) * window + 1
    if not (count := min(most, len(tokens) - at) // (batch * window) * batch):
        raise LadderError(
            f"a fit takes {batch * window} tokens at least, a batch of windows, behind the {at} that are measured on; "
            f"{most} are wanted, and the text has {len(tokens)}"
        )
    rows = torch.tensor(tokens[at : at + count * window], dtype=torch.long).view(count, window)
    if begin is not None:
        rows[:, 0] = begin
    return rows


def _greedy(probe: Probe, rest: Sequence[int]) -> list[int]:
    """Each next layer is the one that costs least beside those chosen before it."""
    chosen: list[int] = []
    left = list(rest)
    while left:
        trials = [tuple(sorted((*chosen, layer))) for layer in left]
        found = probe.measure(trials, f"greedy, {len(chosen) + 1} of {len(rest)} layers")
        costs = [_cost(damage) for damage in found]
        chosen.append(left.pop(costs.index(min(costs))))
    return chosen


def _cost(damage: Damage) -> float:
    """What is not finite costs most."""
    return float("inf") if isnan(damage.kl) else damage.kl
