"""ladder report: from JSON lines to pictures, and a page that needs neither a network nor this package.

    lines -> rows, steps, logs, runs of load (read) -> panels (figures, weight_figures, load_figures, trainings)
          -> charts (charts) -> report.html (page), *.png (pictures)

No torch here.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from ladder.charts.library import installed, missing
from ladder.charts.looks import looks
from ladder.files import check_folder, write_text
from ladder.report.figures import frontier, latency, throughput
from ladder.report.lines.read import load
from ladder.report.load_figures import load_latency, load_rate
from ladder.report.page import page
from ladder.report.pictures import pictures
from ladder.report.trainings import training
from ladder.report.weight_figures import by_weights


def report(inputs: Sequence[Path], out: Path) -> list[Path]:
    """Write `report.html` and the pictures into the folder `out`; the files written, the page first. Without the
    library that draws, the page has tables alone.
    """
    lines = load(inputs)
    check_folder(out)
    out.mkdir(parents=True, exist_ok=True)
    figures = {"throughput": throughput(lines.rows), "frontier": frontier(lines.rows), "latency": latency(lines.rows)}
    figures |= {"weights": by_weights(lines.rows)}
    figures |= {"load-latency": load_latency(lines.loads), "load-rate": load_rate(lines.loads)}
    figures |= {"training": training(lines.trainings)}
    names = [*(row.arm for row in lines.rows), *(run.row.label for run in lines.loads)]
    arms = looks([*names, *(run.label for run in lines.trainings)])
    html = out / "report.html"
    write_text(html, page(lines, figures, arms))
    if not installed():
        logging.getLogger(__name__).warning("%s; the page has its tables without them", missing())
        return [html]
    return [html, *pictures(figures, lines.lanes, arms, out)]
