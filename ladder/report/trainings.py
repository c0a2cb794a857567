"""Logs of training runs: `log.jsonl` of `ladder train` and `ladder adapt`, read and drawn. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ladder.charts.looks import figure
from ladder.report.figures import Mark, Panel
from ladder.report.lines.values import checked, harmless_text

# what is drawn, and the key of a line; loss and perplexity of the validation text are points that can be pointed at
AGAINST = {
    "loss": "loss",
    "validation loss": "eval_loss",
    "tokens/s": "tokens_per_s",
    "examples/s": "examples_per_s",
    "share of the peak (MFU)": "mfu",
    "learning rate": "learning_rate",
    "staleness": "staleness",
}
COUNTS = ("tokens", "examples", "step")  # along the axis: the first that all runs have


@dataclass
class Training:
    """A run: the values of its log, by key, with the counts at which they were written."""

    label: str
    values: dict[str, list[tuple[dict[str, float], float]]] = field(default_factory=dict)

    def add(self, raw: Mapping[str, Any], where: str) -> None:
        at = {name: checked(raw[name], float, name, where) for name in COUNTS if raw.get(name) is not None}
        for key in AGAINST.values():
            if raw.get(key) is not None:
                self.values.setdefault(key, []).append((at, checked(raw[key], float, key, where)))


def is_log(raw: Mapping[str, Any]) -> bool:
    return "step" in raw and ("loss" in raw or "eval_loss" in raw) and "measure" not in raw


def label_of(path: Path, taken: Sequence[str]) -> str:
    """The run's folder, as all logs have one name; else the file's."""
    name = harmless_text(path.parent.resolve().name if path.stem == "log" else path.stem) or "log"
    label, count = name, 1
    while label in taken:
        count += 1
        label = f"{name} ({count})"
    return label


def training(runs: Sequence[Training]) -> list[Panel]:
    """All runs in one panel."""
    if not runs:
        return []
    lines = [at for run in runs for values in run.values.values() for at, _ in values]
    against = next((name for name in COUNTS if all(name in at for at in lines)), "step")
    marks = {name: [m for run in runs for m in _marks(run, name, key, against)] for name, key in AGAINST.items()}
    keys = {"against": "steps" if against == "step" else against}
    return [Panel(keys, ", ".join(run.label for run in runs), {name: own for name, own in marks.items() if own})]


def _marks(run: Training, name: str, key: str, against: str) -> list[Mark]:
    """A point at the end of each, and at every evaluation."""
    points = [(at[against], value) for at, value in run.values.get(key, []) if against in at]
    found = []
    for place, (x, y) in enumerate(points):
        tips = [(name, f"{y:.4f}" if y < 100 else figure(y)), (against, f"{x:,.0f}")]
        front = place == len(points) - 1 or key == "eval_loss"
        found.append(Mark(run.label, x, y, None, None, f"{run.label}: {name}", tips, front))
    return found
