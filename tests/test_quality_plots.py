"""The pictures of docs/quality.md, drawn from the lines that are kept."""

import pytest

from experiments import quality_plots
from ladder.plotting import load_pyplot, plot_style


@pytest.mark.parametrize(
    "draw", [quality_plots.scratch, quality_plots.adaptation, quality_plots.latency, quality_plots.wirings]
)
def test_labels_are_legible(draw: object) -> None:
    """Nothing of what is meant for TeX, which our pictures do not read."""
    assert callable(draw)
    pyplot = load_pyplot()
    with plot_style(pyplot):
        figure = draw(pyplot)
        figure.canvas.draw()
        labels = [
            label.get_text()
            for axis in figure.axes
            for label in (*axis.get_xticklabels(which="both"), *axis.get_yticklabels())
        ]
        pyplot.close(figure)
    assert len([label for label in labels if label]) > 4 and not [label for label in labels if "$" in label]
