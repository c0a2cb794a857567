"""Pages that need nothing but themselves: a template, with styles, programs and data inside. No torch here.

What comes from measurements or from a user is in a page only as JSON, which its program shows as text; none of it is
ever HTML.
"""

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from ladder.charts.library import missing, program
from ladder.charts.looks import Look
from ladder.charts.theme import PALETTES, config

GLYPHS = {
    "circle": "\N{BLACK CIRCLE}",
    "square": "\N{BLACK SQUARE}",
    "triangle": "\N{BLACK UP-POINTING TRIANGLE}",
    "down": "\N{BLACK DOWN-POINTING TRIANGLE}",
    "diamond": "\N{BLACK DIAMOND}",
    "pentagon": "\N{BLACK PENTAGON}",
    "cross": "\N{MULTIPLICATION X}",
}


def assembled(template: str, style: str, script: str, data: Mapping[str, Any]) -> str:
    """The page: what all pages share comes before its own style and script."""
    own = {**data, "themes": {name: config(name) for name in PALETTES}, "missing": missing()}
    parts = {
        "STYLE": text_of("ladder.charts", "charts.css") + style,
        "LIBRARY": program(),
        "PROGRAM": text_of("ladder.charts", "charts.js") + script,
        "DATA": harmless(own),
    }
    # in one pass, so that nothing in the data is taken for a place to fill
    return re.sub(r"/\*(STYLE|LIBRARY|PROGRAM|DATA)\*/", lambda found: parts[found[1]], template)


def harmless(data: Any) -> str:
    """JSON that no browser takes for the end of a script or the beginning of anything."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text)


def legend(looks: Mapping[str, Look]) -> dict[str, dict[str, str]]:
    """Colours and signs of arms for a page's own legend."""
    return {arm: {"colour": look.colour, "sign": GLYPHS[look.marker]} for arm, look in looks.items()}


def text_of(package: str, name: str) -> str:
    """A file of the package."""
    return (files(package) / name).read_text(encoding="utf-8")
