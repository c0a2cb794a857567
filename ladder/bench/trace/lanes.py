"""Steps as lanes of compute and communication: the figures of a step, and its picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder.perf.measurements import current
from ladder.plotting import load_pyplot

# after Okabe and Ito: colour-blind readers can tell them apart
COLOURS = {"attention": "#0072b2", "MLP": "#56b4e9", "comm": "#e69f00", "wait": "#d55e00"}
NUMBERED = 0.012  # of the picture's width: a bar that is wider has room for its layer's number


@dataclass(frozen=True)
class Span:
    """Something that took time, in milliseconds since the step began."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Step:
    """What one rank did during one step under one wiring. On two lanes, waits are named as what waits."""

    wiring: str
    rank: int
    compute: Sequence[Span]
    comm: Sequence[Span]
    waits: Sequence[Span]

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Step":
        """From what `asdict` wrote."""
        raw = current(raw)
        spans = {key: [Span(**span) for span in raw[key]] for key in ("compute", "comm", "waits")}
        return cls(raw["wiring"], raw["rank"], **spans)

    @property
    def ms(self) -> float:
        return max(span.end for span in (*self.compute, *self.waits))

    @property
    def two_lanes(self) -> bool:
        """Whether an attention and an MLP were ever computed at the same time."""
        attention = _busy([span for span in self.compute if _is_attention(span)])
        mlp = _busy([span for span in self.compute if not _is_attention(span)])
        return _busy(self.compute) < 0.999 * (attention + mlp)  # it may be less by rounding

    def account(self) -> dict[str, Any]:
        """The figures that are printed, without the embedding's all-reduce, which every wiring waits for. On two lanes
        the wait of one is exposed while the other does not compute.
        """
        comm = _busy(self.comm[1:])
        if self.two_lanes:
            exposed = _busy([*self.compute, *self.waits[1:]]) - _busy(self.compute)
        else:
            exposed = sum(span.end - span.begin for span in self.waits[1:])
        figures = {"all_reduces": len(self.comm) - 1, "step_ms": self.ms, "comm_ms": comm, "exposed_ms": exposed}
        return {"wiring": self.wiring, "rank": self.rank, **figures, "hidden": 1 - exposed / comm if comm else None}

    @property
    def title(self) -> str:
        """Its figures in a line."""
        return self.title_of(self.ms)

    def title_of(self, ms: float) -> str:
        """The same, of a step that took so long with what comes after the layers."""
        figures = self.account()
        share = figures["hidden"]
        hidden = "no all-reduces" if share is None else f"{max(0.0, share):.0%} of the communication hidden"
        return f"{self.wiring}: {ms:.2f} ms, {figures['all_reduces']} all-reduces, {hidden}"


def first_layers(step: Step, count: int) -> Step:
    """The step until its first `count` layers are computed: what a picture has room for."""
    compute, later = step.compute[: 2 * count], {span.name for span in step.compute[2 * count :]}
    until = max(span.end for span in compute)
    comm = [span for span in step.comm if span.begin < until]
    waits = [span for span in step.waits if span.begin < until and span.name not in later]
    return Step(step.wiring, step.rank, compute, comm, waits)


def _is_attention(span: Span) -> bool:
    return span.name.startswith("attention")


def _busy(spans: Sequence[Span]) -> float:
    """Milliseconds with at least one of them under way: all-reduces that queue for a link use it one by one."""
    total, reached = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.begin):
        total += max(0.0, span.end - max(span.begin, reached))
        reached = max(reached, span.end)
    return total


def draw(steps: Sequence[Step], title: str, path: Path, titles: Sequence[str] | None = None) -> None:
    """Rows of compute above a row of communication for every step, all on one time axis. A step on two lanes has two
    rows of compute. `titles`: of the steps, where they are not to be their own.
    """
    pyplot = load_pyplot()
    computing = [["attention", "MLP"] if step.two_lanes else ["compute"] for step in steps]
    height = sum(len(rows) + 2 for rows in computing)  # the last row is room for the next step's title
    figure, axes = pyplot.subplots(figsize=(13, 1.2 + 0.57 * height), layout="constrained")
    width = 1.01 * max(step.ms for step in steps)
    ticks: list[tuple[float, str]] = []
    top = 0.0
    for index, (step, rows) in enumerate(zip(steps, computing, strict=True)):
        for span in step.compute:
            at = top - _row(span, rows)
            _bar(axes, at, span, COLOURS[span.name.split()[0]])
            if span.end - span.begin > NUMBERED * width:
                _number(axes, at, span, "white" if _is_attention(span) else "black")
        for span in step.waits:
            _bar(axes, top - _row(span, rows), span, COLOURS["wait"])
        for span in step.comm:
            _bar(axes, top - len(rows), span, COLOURS["comm"])
        text = step.title if titles is None else titles[index]
        axes.text(0, top + 0.55, text, fontsize=11, fontweight="bold", va="bottom")
        ticks += [(top - row, name) for row, name in enumerate([*rows, "communication"])]
        top -= len(rows) + 2
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    axes.set_ylim(top + 1.2, 1.3)
    axes.set_xlim(0, width)
    axes.set_xlabel("milliseconds since the step began")
    axes.set_title(title, fontsize=11, loc="left")
    names = {"attention": "attention of layer n", "MLP": "MLP of layer n", "comm": "all-reduce"}
    names["wait"] = "waiting for an all-reduce"
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[key]) for key in names]
    figure.legend(handles, names.values(), loc="outside lower center", ncols=4, frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _row(span: Span, rows: Sequence[str]) -> int:
    return 0 if len(rows) == 1 or _is_attention(span) else 1


def _bar(axes: Any, at: float, span: Span, colour: str) -> None:
    axes.barh(at, span.end - span.begin, left=span.begin, height=0.8, color=colour, edgecolor="white", linewidth=0.4)


def _number(axes: Any, at: float, span: Span, colour: str) -> None:
    """The layer, in the middle of its bar."""
    middle = (span.begin + span.end) / 2
    axes.text(middle, at, span.name.split()[-1], fontsize=9, color=colour, ha="center", va="center", clip_on=True)
