"""Steps as lanes: the account of a step, and its picture."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder.errors import LadderError

# after Okabe and Ito: colour-blind readers can tell them apart
COLOURS = {"attention": "#0072b2", "MLP": "#56b4e9", "wire": "#e69f00", "wait": "#d55e00"}
_PLAIN = {
    "text.parse_math": False,  # a name may hold dollar signs
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
}


@dataclass(frozen=True)
class Span:
    """Something that took time, in milliseconds since the step began."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Step:
    """What one rank did during one step under one wiring."""

    wiring: str
    rank: int
    compute: Sequence[Span]
    wire: Sequence[Span]
    waits: Sequence[Span]

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Step":
        """From what `asdict` wrote."""
        lanes = {lane: [Span(**span) for span in raw[lane]] for lane in ("compute", "wire", "waits")}
        return cls(raw["wiring"], raw["rank"], **lanes)

    @property
    def ms(self) -> float:
        return max(span.end for span in (*self.compute, *self.waits))

    def account(self) -> dict[str, Any]:
        """The figures that are printed. The embedding's sum, which every wiring waits for, is left out."""
        wire = _busy(self.wire[1:])
        exposed = sum(span.end - span.begin for span in self.waits[1:])
        figures = {"sums": len(self.wire) - 1, "step_ms": self.ms, "wire_ms": wire, "exposed_ms": exposed}
        return {"wiring": self.wiring, "rank": self.rank, **figures, "hidden": 1 - exposed / wire if wire else None}


def first_layers(step: Step, count: int) -> Step:
    """The step until its first `count` layers are computed: what a picture has room for."""
    until = step.compute[: 2 * count][-1].end
    lanes = ([span for span in lane if span.begin < until] for lane in (step.compute, step.wire, step.waits))
    return Step(step.wiring, step.rank, *lanes)


def _busy(spans: Sequence[Span]) -> float:
    """Milliseconds with at least one of them under way: sums that queue for the wire use it one after the other."""
    total, reached = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.begin):
        total += max(0.0, span.end - max(span.begin, reached))
        reached = max(reached, span.end)
    return total


def plotting() -> Any:
    """matplotlib, or the sentence that says how to get it."""
    try:
        import matplotlib
    except ImportError:
        raise LadderError("pictures need matplotlib: pip install 'ladder-residual[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


@contextmanager
def plainly(pyplot: Any, **more: Any) -> Iterator[None]:
    """How our pictures look; `more`: other settings of matplotlib's."""
    with pyplot.rc_context({**_PLAIN, **more}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks
        yield


def draw(steps: Sequence[Step], title: str, path: Path) -> None:
    """Two lanes per wiring, compute above communication, all on one time axis."""
    pyplot = plotting()
    figure, axes = pyplot.subplots(figsize=(13, 1.2 + 1.7 * len(steps)), layout="constrained")
    ticks: list[tuple[float, str]] = []
    for index, step in enumerate(steps):
        top = -3.0 * index
        for span in step.compute:
            _bar(axes, top, span, COLOURS[span.name.split()[0]])
        for span in step.waits:
            _bar(axes, top, span, COLOURS["wait"])
        for span in step.wire:
            _bar(axes, top - 1, span, COLOURS["wire"])
        account = step.account()
        share = account["hidden"]
        hidden = "no sums" if share is None else f"{max(0.0, share):.0%} of the wire time hidden"
        text = f"{step.wiring}: {step.ms:.1f} ms, {account['sums']} sums, {hidden}"
        axes.text(0, top + 0.55, text, fontsize=11, fontweight="bold", va="bottom")
        ticks += [(top, "compute"), (top - 1, "wire")]
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    axes.set_ylim(-3.0 * len(steps) + 1.2, 1.3)
    axes.set_xlim(0, 1.01 * max(step.ms for step in steps))
    axes.set_xlabel("milliseconds since the step began")
    axes.set_title(title, fontsize=11, loc="left")
    names = {"attention": "attention", "MLP": "MLP", "wire": "sum on the wire", "wait": "waiting for a sum"}
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[key]) for key in names]
    axes.legend(handles, names.values(), loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4, frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bar(axes: Any, at: float, span: Span, colour: str) -> None:
    axes.barh(at, span.end - span.begin, left=span.begin, height=0.8, color=colour, edgecolor="white", linewidth=0.4)
