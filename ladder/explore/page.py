"""The explorer's page, which asks its server or has all answers inside. No torch here."""

import json
import zlib
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ladder import __version__
from ladder.charts import specs
from ladder.charts.looks import looks
from ladder.charts.page import assembled, legend, text_of
from ladder.charts.theme import KINDS
from ladder.explore.choices import WIRINGS, Offer

PACKAGE = "ladder.explore"


def page(offer: Offer, answers: Mapping[str, Any] | None = None) -> str:
    """`answers`: by question and key, for a file; None: they are asked for."""
    start = {name: str(value) for name, value in asdict(offer.first()).items()}
    data: dict[str, Any] = {"offer": offer.listed(), "start": start, "looks": legend(looks(WIRINGS)), "kinds": KINDS}
    where = "answered by this machine" if answers is None else "written into this file"
    data |= {"charts": charts(), "about": f"ladder {__version__}, predictions of its performance model, {where}."}
    if answers is not None:
        packed = zlib.compress(json.dumps(answers, separators=(",", ":")).encode(), 9)
        data["answers"] = b64encode(packed).decode()
    parts = [text_of(PACKAGE, f"page.{kind}") for kind in ("html", "css", "js")]
    return assembled(parts[0], parts[1], parts[2], data)


def charts() -> dict[str, Any]:
    """Without their numbers, which come with the answers."""
    own = looks(WIRINGS)
    x = specs.Axis("latency of the link, \N{MICRO SIGN}s", log=True, reach=(1, 1000))
    latency = specs.curves(
        x, specs.speedup_axis("times as fast as standard"), own, _empty("lines dots points chosen"), True
    )
    latency = specs.within(latency, "y")
    across, up = specs.Axis("tokens/s for each user"), specs.Axis("tokens/s for each GPU", log=True)
    frontier = specs.curves(across, up, own, _empty("lines dots points rings"))
    return {"layer": specs.timeline("microseconds", []), "latency": latency, "frontier": frontier}


def _empty(names: str) -> dict[str, list[Any]]:
    return {name: [] for name in names.split()}
