"""Files of measurements: JSON lines. Old files keep their keys; readers see the current ones. No torch here."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ladder.config.fields import read_text
from ladder.errors import LadderError

# old name of a key: today's
KEYS = {
    "sums": "all_reduces",
    "sum_us": "all_reduce_us",
    "sums_at_once": "concurrent_all_reduces",
    "wire_ms": "comm_ms",
    "wire": "comm",
}
# (key, old value): today's
VALUES = {
    ("link_kind", "timed"): "emulated",
    ("link", "timed"): "emulated",
    ("measure", "wire"): "all_reduce",
}


class Lines(NamedTuple):
    """A file's JSON objects with the numbers of their lines; `torn`: the last line was cut off by an interruption."""

    objects: list[tuple[int, dict[str, Any]]]
    torn: bool


def read_lines(path: Path) -> Lines:
    """All objects of a file, under today's names."""
    found: list[tuple[int, dict[str, Any]]] = []
    lines = read_text(path).split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line, parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            if number == len(lines):
                return Lines(found, torn=True)
            raw = None
        if not isinstance(raw, dict):
            shown = line if len(line) <= 60 else f"{line[:57]}..."
            raise LadderError(f"{path} is no file of JSON lines: line {number} is {shown!r}, not an object")
        found.append((number, current(raw)))
    return Lines(found, torn=False)


def current(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line under today's names. Lines of runs that are older than formats of weights are of bf16."""
    found = {KEYS.get(key, key): _value(key, value) for key, value in line.items()}
    return {**found, "weights": found.get("weights", "bf16")} if {"wiring", "tp"} <= found.keys() else found


def _value(key: str, value: Any) -> Any:
    return VALUES.get((key, value), value) if isinstance(value, str) else value
