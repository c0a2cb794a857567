"""The cost of another wiring: of each layer alone, and of growing sets of layers.

    alone   layer i under the row that is tried, all others as they are
    grown   the n layers that hurt least: by their damage alone, or (greedy) each next one by trying all that remain
    last    the last n layers, for comparison

The cost is KL(original || rewired) in nats per token: every change counts, whether or not it makes the text likelier.
Perplexity and greedy agreement are measured too. Sizes of sets are a sample of the curve; 1, half and all are always
among them. A set is measured merely rewired or, where sequences to fit on are given, after `solve`.

Position j of a sequence reads tokens 0..j and predicts token j+1, so a sequence of n+1 tokens counts n times. All
sequences count alike, and standard errors take them as independent, as in `ladder.hf.measures`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import Any

import torch
from torch import Tensor

from ladder.errors import LadderError
from ladder.progress import Progress
from ladder.scan.probe import Damage, OnMeasured, Probe, rewired_temporarily
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
        """Whether the layers were fitted."""
        return f"fitted on {self.fitted} tokens, not trained" if self.fitted else "before any training"

    def sized(self, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The grown set of this size, and the last layers."""
        return tuple(sorted(self.order[:size])), tuple(sorted(self.order))[-size:]


def scan(
    model: Any,
    sequences: Tensor,
    row: str = "ladder",
    points: int = POINTS,
    greedy: bool = False,
    batch: int = 8,
    progress: Progress | None = None,
    fit: Tensor | None = None,
    on_measured: OnMeasured | None = None,
) -> Scan:
    """Try a row of the table on a loaded model, layer by layer and in growing sets.

    `sequences`: [n, length] tokens. `points`: about so many sizes of sets, 0 for every size (as greedy has it).
    `batch`: sequences at a time; it changes no value. `fit`: sequences to fit each set on, a multiple of `batch`.
    `on_measured` is called with each result as soon as it is known: fitted, set by set; else round by round.
    """
    if points < 0:
        raise LadderError(f"points is {points}: it must be 0 (every size) or more")
    probe = Probe(model, sequences, row, batch, progress, fit, on_measured)
    layers = probe.layers
    with rewired_temporarily(probe.model):
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


def extend(
    model: Any,
    sequences: Tensor,
    found: Scan,
    size: int,
    batch: int = 8,
    progress: Progress | None = None,
    fit: Tensor | None = None,
    on_measured: OnMeasured | None = None,
) -> Scan:
    """A scan with one more size on its curves, of the same model and sequences."""
    if size in (len(damage.layers) for damage in found.grown):
        return found
    probe = Probe(model, sequences, found.row, batch, progress, fit, on_measured)
    with rewired_temporarily(probe.model):
        grown, last = probe.measure(found.sized(size), f"{size} layers", ("grown", "last"))
    return replace(found, grown=_by_size(*found.grown, grown), last=_by_size(*found.last, last))


def _by_size(*sets: Damage) -> tuple[Damage, ...]:
    return tuple(sorted(sets, key=lambda damage: len(damage.layers)))


def sizes(layers: int, points: int) -> list[int]:
    """Sizes of sets: evenly spaced, with 1 (which is known already), half and all."""
    if not points:
        return list(range(1, layers + 1))
    return sorted({1, -(-layers // 2), *(-(-layers * step // points) for step in range(1, points + 1))})


def scan_sequences(tokens: Sequence[int], seq_len: int, most: int, begin: int | None = None) -> Tensor:
    """Sequences of a text, [n, seq_len + 1]: each predicts `seq_len` tokens, all together at most `most`.

    As `ladder eval` cuts it: every sequence's last token is the next one's first, unless texts of the model begin with
    a special token (`begin`). What is left at the end is shorter than a sequence, and dropped.
    """
    if most < seq_len:
        raise LadderError(f"{most} tokens are less than a sequence of {seq_len}: take more, or a smaller --seq-len")
    count = min(most, len(tokens) - 1) // seq_len
    if count < 1:
        raise LadderError(
            f"the text has {len(tokens)} tokens, a sequence of {seq_len} needs {seq_len + 1}: "
            "take a longer text, or a smaller --seq-len"
        )
    sequences = torch.tensor(tokens[: count * seq_len + 1], dtype=torch.long).unfold(0, seq_len + 1, seq_len).clone()
    if begin is not None:
        sequences[:, 0] = begin
    return sequences


def fit_sequences(tokens: Sequence[int], measured: Tensor, most: int, batch: int, begin: int | None = None) -> Tensor:
    """Sequences to fit on, [n, seq_len], n a multiple of `batch`: at most `most` tokens, behind those measured on."""
    seq_len = measured.shape[1] - 1
    at = len(measured) * seq_len + 1
    if not (count := min(most, len(tokens) - at) // (batch * seq_len) * batch):
        raise LadderError(
            f"a fit takes {batch * seq_len} tokens at least, a batch of sequences, behind the {at} measured on; "
            f"{most} are wanted, and the text has {len(tokens)}"
        )
    sequences = torch.tensor(tokens[at : at + count * seq_len], dtype=torch.long).view(count, seq_len)
    if begin is not None:
        sequences[:, 0] = begin
    return sequences


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
    """For sorting: NaN last."""
    return float("inf") if isnan(damage.kl) else damage.kl
