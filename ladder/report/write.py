"""ladder report: from JSON lines to pictures, and a page that needs neither a network nor this package.

    lines -> rows and steps (rows) -> panels (figures) -> report.html (page), *.png (plots)

No torch here.
"""

from collections.abc import Sequence
from pathlib import Path

from ladder.errors import LadderError
from ladder.plotting import load_pyplot
from ladder.report.figures import frontier, latency, throughput
from ladder.report.looks import looks
from ladder.report.page import page
from ladder.report.plots import pictures
from ladder.report.rows import load


def report(inputs: Sequence[Path], out: Path) -> list[Path]:
    """Write `report.html` and the pictures into the folder `out`; the files written, the page first."""
    lines = load(inputs)
    load_pyplot()  # an error before anything is written
    if out.exists() and not out.is_dir():
        raise LadderError(f"{out} is a file: name a folder for the report")
    out.mkdir(parents=True, exist_ok=True)
    figures = {"throughput": throughput(lines.rows), "frontier": frontier(lines.rows), "latency": latency(lines.rows)}
    arms = looks(row.arm for row in lines.rows)
    html = out / "report.html"
    html.write_text(page(lines, figures, arms), encoding="utf-8")
    return [html, *pictures(figures, lines.lanes, arms, out)]
