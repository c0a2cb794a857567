"""The colours of charts and pages on light and on dark paper. No torch here."""

from typing import Any

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif'
PALETTES = {
    "light": {"paper": "#ffffff", "ink": "#1b1f24", "quiet": "#59636e", "line": "#d5dae0", "wait": "#e4e7eb"},
    "dark": {"paper": "#14181d", "ink": "#e6e9ed", "quiet": "#a0a9b4", "line": "#39414b", "wait": "#2d343c"},
}
# What takes time in a step. After Okabe and Ito: colour-blind readers can tell them apart, and none of them is an arm's
# that is drawn beside them. Waiting has no colour of its own: nothing is done.
KINDS = {"attention": "#0072b2", "MLP": "#56b4e9", "all-reduce": "#009e73"}


def config(palette: str) -> dict[str, Any]:
    """Vega-Lite's settings. Marks that are neither an arm nor a kind of work name one of the styles."""
    own = PALETTES[palette]
    ink, quiet, line, paper = own["ink"], own["quiet"], own["line"], own["paper"]
    axis: dict[str, Any] = {
        "labelColor": quiet,
        "titleColor": ink,
        "gridColor": line,
        "domainColor": quiet,
        "tickColor": quiet,
    }
    axis |= {
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "gridOpacity": 0.7,
        "labelFlush": False,
    }
    title: dict[str, Any] = {
        "color": ink,
        "subtitleColor": quiet,
        "anchor": "start",
        "fontSize": 15,
        "subtitleFontSize": 11,
    }
    return {
        "background": None,
        "font": FONT,
        "view": {"stroke": None},
        "axis": axis,
        "legend": {"labelColor": ink, "labelFontSize": 12, "titleColor": ink, "symbolSize": 90, "columns": 9},
        "header": {"labelColor": ink, "labelFontSize": 13, "labelFontWeight": 600, "labelAnchor": "start"},
        "title": title,
        "style": {
            "base": {"color": quiet, "strokeDash": [2, 3], "strokeWidth": 1},
            "whisker": {"color": ink, "strokeWidth": 1.2},
            "note": {"color": ink, "fontSize": 11},
            "quiet": {"color": quiet, "fontSize": 11},
            "chosen": {"color": ink, "strokeWidth": 1.4},
            "ring": {"color": ink, "strokeWidth": 1.6},
            "edge": {"color": ink, "strokeWidth": 1.2},
            "work": {"stroke": paper, "strokeWidth": 1},
            "wait": {"color": own["wait"], "stroke": quiet, "strokeDash": [3, 2], "strokeWidth": 1},
        },
    }
