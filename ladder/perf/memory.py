"""Whether a model fits into memory, and which choice would. No torch here."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from ladder.config import ModelConfig
from ladder.errors import LadderError

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
USABLE = 0.92  # of what a machine has left: libraries and activations need the rest


class TooLarge(LadderError):
    """A model that does not fit."""


class Need(NamedTuple):
    """Bytes of weights and of keys and values."""

    weights: float
    cache: float

    @property
    def total(self) -> float:
        return self.weights + self.cache


def free_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes of memory that this machine has left, or that the container of this process may still take."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = _text(proc / "meminfo").splitlines()
    for line in lines:
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        most, now = _text(cgroup / limit).strip(), _text(cgroup / used).strip()
        if most.isdigit() and now.isdigit():
            facts = dict(line.split()[:2] for line in _text(cgroup / stat).splitlines() if " " in line)
            files = int(facts.get("inactive_file", facts.get("total_inactive_file", 0)))  # given back when needed
            free = min(free, max(0, int(most) - int(now) + files))
    return free


def _text(file: Path) -> str:
    """What a file of the system says; nothing where there is none."""
    try:
        return file.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


def check_host(what: str, need: float, ways: str) -> None:
    """Refuse what needs more bytes than this machine has left: the system would kill this process without a word."""
    if need > (room := USABLE * free_bytes()):
        raise TooLarge(f"{what} needs {size_text(need)} of memory, this machine has {size_text(room)} to use: {ways}")


def size_text(count: float) -> str:
    """Bytes in a unit in which they are a number of some digits."""
    for unit, each in (("GB", 1e9), ("MB", 1e6)):
        if count >= each / 10:
            return f"{count / each:.1f} {unit}"
    return f"{count:.0f} bytes"


def check_memory(what: str, need: Need, room: float, where: str, ways: Callable[[], Iterable[str]]) -> None:
    """Refuse what needs more than `room` bytes; the message names the `ways` out."""
    if need.total <= room:
        return
    raise TooLarge(
        f"{what} needs {size_text(need.total)} on {where} ({size_text(need.weights)} of weights, "
        f"{size_text(need.cache)} of keys and values), which has {size_text(room)} to use: "
        f"try {' or '.join(ways())}"
    )


def more_ranks(config: ModelConfig, tp: int, most: int, fits: Callable[[int], bool]) -> list[str]:
    """The option for the smallest larger number of ranks, up to `most`, with which the model `fits`; none: empty."""
    found = next((n for n in config.degrees() if tp < n <= most and fits(n)), None)
    return [] if found is None else [f"--tp {found}"]
