"""Service-level objectives: the longest times with which a request counts towards goodput."""

import re
from collections.abc import Mapping

from ladder.errors import LadderError

NAMES = ("ttft", "tpot", "e2e")


def parse_slo(text: str) -> dict[str, float]:
    """ttft=200ms,tpot=50ms,e2e=3s as milliseconds by name."""
    found: dict[str, float] = {}
    for part in text.split(","):
        known = re.fullmatch(r"\s*(\w+)=(\d{1,9}(?:\.\d{1,6})?)(ms|s)\s*", part)
        if known is None or known[1] not in NAMES or known[1] in found:
            names = ", ".join(NAMES)
            raise LadderError(
                f"slo {text!r} is not understood at {part!r}: write ttft=200ms,tpot=50ms; known are {names}"
            )
        found[known[1]] = float(known[2]) * (1000 if known[3] == "s" else 1)
    return found


def meets(slo: Mapping[str, float], times: Mapping[str, float | None]) -> bool:
    """Whether none of the times is longer than it may be. A time that a request does not have (an answer of one token
    has no time per further token) is not too long.
    """
    return all((value := times[name]) is None or value <= limit for name, limit in slo.items())
