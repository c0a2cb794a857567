"""Measures by hand: every position on its own, in float64."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.tolerance import forward

# between two computations of a log-probability by the model of `tests.checkpoints.tiny`, whose logits are below six
NATS = 2 * 6 * forward(4, 128, 64)
WORDS = "The ladder waits for nobody, and nobody waits for the ladder: each rung is read while the next one travels. "


def said(model: Any, line: list[int]) -> Tensor:
    """Log-probabilities after each token of a line, in float64."""
    with torch.no_grad():
        return model(torch.tensor([line])).logits[0].double().log_softmax(-1)  # type: ignore[no-any-return]


def naive(models: list[Any], tokens: list[int], window: int, begin: int | None = None) -> list[list[list[float]]]:
    """For each window: the positions' (surprise of the first model, KL from the second, agreement)."""
    found = []
    for start in range(0, len(tokens) - 1, window):
        line = tokens[start : min(start + window, len(tokens) - 1)]
        model, source = (said(each, [line[0] if begin is None else begin, *line[1:]]) for each in models)
        rows = []
        for at in range(len(line)):
            apart = sum(float(p.exp() * (p - q)) for p, q in zip(source[at], model[at], strict=True))
            same = float(int(source[at].argmax()) == int(model[at].argmax()))
            rows.append([-float(model[at, tokens[start + at + 1]]), apart, same])
        found.append(rows)
    return found


def clustered(windows: list[list[list[float]]], column: int) -> tuple[float, float | None]:
    """Mean over tokens, and its standard error with windows as clusters."""
    sums, counts = [sum(row[column] for row in rows) for rows in windows], [len(rows) for rows in windows]
    mean, m = sum(sums) / sum(counts), len(windows)
    squares = sum((s - mean * c) ** 2 for s, c in zip(sums, counts, strict=True))
    return mean, math.sqrt(m / (m - 1) * squares) / sum(counts) if m > 1 else None
