"""Arms: what is compared, measured or predicted. A wiring, on a link of its own where it has one. No torch
here.
"""

import re
from dataclasses import dataclass

from ladder.wiring import EXAMPLES, Wiring, canonical


@dataclass(frozen=True)
class BenchArm:
    """Equal parts of the layers under each of `rows`; the all-reduces on a link of the arm's own where it has one."""

    rows: tuple[str, ...]
    link: str | None = None

    def wiring(self, layers: int) -> Wiring:
        return Wiring(tuple(self.rows[index * len(self.rows) // layers] for index in range(layers)))


ARMS: dict[str, BenchArm] = {
    "standard": BenchArm(("standard",)),
    "standard-fused": BenchArm(("standard",), link="nvlink_fused"),  # the best all-reduce there is
    "parallel": BenchArm(("parallel",)),
    "parallel-1": BenchArm(("parallel-1",)),
    "ladder": BenchArm(("ladder",)),
    "hybrid": BenchArm(("standard", "ladder")),
    "desync-2x": BenchArm(("desync-2x",)),
    "none": BenchArm(("none",)),  # no communication, one sub-block after the other: no model
}


def wiring_of(arm: str, layers: int) -> Wiring:
    """The wiring behind an arm's name, or behind a pattern used as one."""
    if arm in ARMS:
        return ARMS[arm].wiring(layers)
    if arm and not re.search(r"[\s:@]", arm):  # one name, which may be meant for an arm's
        canonical(arm, (*ARMS, *EXAMPLES))
    return Wiring.parse(arm, layers)


def link_of(arm: str) -> str | None:
    """The link of an arm that has one of its own."""
    return ARMS[arm].link if arm in ARMS else None
