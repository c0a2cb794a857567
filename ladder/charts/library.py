"""Vega-Lite, where `vl-convert-python` is installed: its program for a page, and charts as pictures."""

import zlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from struct import pack, unpack
from typing import Any

from ladder.charts.theme import config
from ladder.errors import LadderError, install
from ladder.files import write_bytes, write_text

_SCALE = 2  # pixels of a picture for each of the chart's


def missing() -> str:
    """What is said where the package is not there."""
    return f"charts need vl-convert-python: {install('plot')}"


def installed() -> bool:
    return find_spec("vl_convert") is not None


def load_library() -> Any:
    """The package, or the error that says how to install it."""
    if not installed():
        raise LadderError(missing())
    import vl_convert

    return vl_convert


@cache
def program() -> str:
    """Vega, Vega-Lite and their embedder as one script, which asks for nothing else. Without the package it is empty:
    a page has its tables, and says in place of charts what is missing.
    """
    if not installed():
        return ""
    script: str = load_library().javascript_bundle()
    return script.replace("</script", "<\\/script")  # nothing in it ends the element that it is in


def picture(chart: dict[str, Any], path: Path) -> None:
    """A chart as a file of the format that its name ends in (PICTURES), on white."""
    drawn, kind = {**chart, "background": "white", "padding": 12}, path.suffix.lower()
    library, how = load_library(), {"config": config("light")}
    if kind == ".svg":
        write_text(path, library.vegalite_to_svg(drawn, **how))
    elif kind == ".pdf":
        write_bytes(path, library.vegalite_to_pdf(drawn, **how))
    else:
        write_bytes(path, _smaller(library.vegalite_to_png(drawn, **how, scale=_SCALE)))


def _smaller(png: bytes) -> bytes:
    """The same pixels, compressed as well as they can be: about a third."""
    found, pixels, place = [png[:8]], b"", 8
    while place < len(png):
        (size,) = unpack(">I", png[place : place + 4])
        kind, body = png[place + 4 : place + 8], png[place + 8 : place + 8 + size]
        if kind == b"IDAT":
            pixels += body
        elif kind == b"IEND":
            found += [_chunk(b"IDAT", zlib.compress(zlib.decompress(pixels), 9)), _chunk(kind, body)]
        else:
            found.append(_chunk(kind, body))
        place += 12 + size
    return b"".join(found)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return pack(">I", len(body)) + kind + body + pack(">I", zlib.crc32(kind + body))
