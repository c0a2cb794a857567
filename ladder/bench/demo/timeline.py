"""Steps as lines of text: a line of what is computed above a line of what is in flight, all on one time axis."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ladder.bench.trace.lanes import Span, Step

# by what it is: a letter, so that it can be read without colours, and a style; blue and orange, after Okabe and Ito
LETTERS = {"attention": "A", "MLP": "M", "wait": ".", "comm": "=", "next": "-"}
STYLES = {
    "attention": "white on #0072b2",
    "MLP": "black on #56b4e9",
    "wait": "#888888",
    "comm": "black on #e69f00",
    "next": "black on #f5c76b",
}
LABEL = 10  # columns
LEGEND = "A attention, M MLP, . waiting, = and - all-reduces in turn"


def lanes(step: Step, width: int, ms: float) -> list[tuple[str, Text]]:
    """Rows with their names: what is computed, and what is in flight, in `width` cells of `ms` milliseconds together.
    Where attention and MLP run at the same time, each has a row.
    """
    compute = [(span, span.name.split()[0]) for span in step.compute]
    waits = [(span, "wait") for span in step.waits]
    comm = [(span, "next" if number % 2 else "comm") for number, span in enumerate(step.comm)]
    rows = [("compute", [*compute, *waits])]
    if step.two_lanes:  # there waits are named as what waits
        rows = [
            (kind, [*(each for each in compute if each[1] == kind), *((s, w) for s, w in waits if kind in s.name)])
            for kind in ("attention", "MLP")
        ]
    return [(name, _line(spans, width, ms)) for name, spans in [*rows, ("link", comm)]]


def timeline(steps: Sequence[tuple[str, Step]], console: Console, ms: float) -> None:
    """Steps under each other, each under its title, from their beginning to `ms` milliseconds."""
    width = max(20, min(console.width, 160) - LABEL)
    for title, step in steps:
        console.print(title, markup=False, highlight=False)
        for name, line in lanes(step, width, ms):
            console.print(Text(f"{name:<{LABEL}}").append_text(line), no_wrap=True, overflow="crop")
    console.print(LEGEND, style="dim", highlight=False)


def _line(spans: Sequence[tuple[Span, str]], width: int, ms: float) -> Text:
    line = Text(no_wrap=True)
    for cell in range(width):
        begin, end = cell * ms / width, (cell + 1) * ms / width
        shares = [(min(end, span.end) - max(begin, span.begin), kind) for span, kind in spans]
        most, kind = max(shares, default=(0.0, ""), key=lambda share: share[0])
        if most > 0.25 * (end - begin):
            line.append(LETTERS[kind], STYLES[kind])
        else:
            line.append(" ")
    return line
