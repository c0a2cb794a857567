"""Lines of `ladder.bench.one_rank` as rows of a report: one decode step of one rank. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ladder.charts.looks import TWO_LANES
from ladder.report.lines.rows import Row

NO_LINK = "no link"  # all-reduces that take no time, or are left out


def is_step(raw: Mapping[str, Any]) -> bool:
    """A step of one rank; several all-reduces at a time are another experiment."""
    known = raw.get("measure") == "decode" and raw.get("mode") == "one-rank" and raw.get("ms") is not None
    return known and raw.get("concurrent_all_reduces", 1) == 1


def as_row(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Under the keys of `ladder bench`. A wiring on two lanes is an arm of its own."""
    two = TWO_LANES if raw.get("lanes") == 2 else ""
    name = raw.get("link_name")
    link = {"link": name} if name not in (None, "zero") else {"link": NO_LINK, "link_alpha_us": 0.0}
    times = {"tpot_ms_p50": raw["ms"], "tpot_ms_q1": raw.get("ms_q1"), "tpot_ms_q3": raw.get("ms_q3")}
    kind = {"link_kind": "emulated"} if raw.get("tp") != 1 else {}
    return {**raw, **times, **link, **kind, "arm": f"{raw.get('wiring')}{two}", "repetitions": raw.get("steps")}


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Of steps that differ in how their kernels are launched alone, the fastest."""
    found: dict[Any, Row] = {}
    none = {"tpot_ms_p50": 0.0, "tpot_ms_q1": None, "tpot_ms_q3": None, "bandwidth_tb_s": None}
    for row in rows:
        key = replace(row, **none)  # type: ignore[arg-type]
        if key not in found or row.tpot_ms_p50 < found[key].tpot_ms_p50:
            found[key] = row
    return list(found.values())
