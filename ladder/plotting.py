"""matplotlib, where it is installed, and the style of our pictures."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ladder.errors import LadderError, install

_STYLE = {
    "text.parse_math": False,  # a name may hold dollar signs
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
}


def load_pyplot() -> Any:
    """matplotlib's pyplot without a display, or the error that says how to install it."""
    try:
        import matplotlib
    except ImportError:
        raise LadderError(f"pictures need matplotlib: {install('plot')}") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


@contextmanager
def plot_style(pyplot: Any, **more: Any) -> Iterator[None]:
    """The settings of our pictures; `more`: other settings of matplotlib's."""
    with pyplot.rc_context({**_STYLE, **more}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks
        yield
