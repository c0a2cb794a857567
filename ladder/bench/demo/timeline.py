"""Steps as lines of text: a line of what is computed above a line of what is in flight, all on one time axis."""

from collections.abc import Sequence

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
LEGEND = "A attention, M MLP, . waiting, = and - all-reduces in turn"


def lanes(step: Step, width: int, ms: float) -> tuple[Text, Text]:
    """What is computed, and what is in flight, in `width` cells of `ms` milliseconds together."""
    compute = [(span, span.name.split()[0]) for span in step.compute]
    waits = [(span, "wait") for span in step.waits]
    comm = [(span, "next" if number % 2 else "comm") for number, span in enumerate(step.comm)]
    return _line([*compute, *waits], width, ms), _line(comm, width, ms)


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
