"""ladder report: from JSON lines to pictures, and a page that needs neither a network nor this package.

    lines -> rows and steps (rows), runs of load (loads) -> panels (figures, weight_figures, load_figures)
          -> report.html (page), *.png (plots, load_plots)

No torch here.
"""

from collections.abc import Sequence
from pathlib import Path

from ladder.errors import LadderError
from ladder.plotting import load_pyplot
from ladder.report.figures import frontier, latency, throughput
from ladder.report.load_figures import load_latency, load_rate
from ladder.report.load_plots import LOAD_DRAWINGS
from ladder.report.looks import looks
from ladder.report.page import page
from ladder.report.plots import DRAWINGS, pictures
from ladder.report.rows import load
from ladder.report.weight_figures import by_weights


def report(inputs: Sequence[Path], out: Path) -> list[Path]:
    """Write `report.html` and the pictures into the folder `out`; the files written, the page first."""
    lines = load(inputs)
    load_pyplot()  # an error before anything is written
    if out.exists() and not out.is_dir():
        raise LadderError(f"{out} is a file: name a folder for the report")
    out.mkdir(parents=True, exist_ok=True)
    figures = {"throughput": throughput(lines.rows), "frontier": frontier(lines.rows), "latency": latency(lines.rows)}
    figures |= {"weights": by_weights(lines.rows)}
    figures |= {"load-latency": load_latency(lines.loads), "load-rate": load_rate(lines.loads)}
    arms = looks([*(row.arm for row in lines.rows), *(run.row.label for run in lines.loads)])
    html = out / "report.html"
    html.write_text(page(lines, figures, arms), encoding="utf-8")
    return [html, *pictures(figures, {**DRAWINGS, **LOAD_DRAWINGS}, lines.lanes, arms, out)]
