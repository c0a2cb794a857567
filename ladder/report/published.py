"""Our figures beside the published ones, row by row. No torch here."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ladder.report.figures import BASE, facts
from ladder.report.lines.rows import Row


@dataclass(frozen=True)
class _Claim:
    size: str
    tp: int
    batch: int
    link: str
    arm: str
    what: str
    published: float


@dataclass(frozen=True)
class Beside(_Claim):
    """A published figure, and ours where there is one. `unit`: x for times as fast, % for percent."""

    unit: str
    ours: float | None
    measured: str


def published() -> dict[str, Any]:
    """The paper's figures of speed, with their source."""
    raw: dict[str, Any] = json.loads((files("ladder.report") / "published.json").read_text(encoding="utf-8"))
    return raw


SPEEDUP = "tokens/s, times standard"
_GAINS = {"prefill": "prefill time saved", "decode": "decode time saved", "tokens_per_s": "tokens/s gained"}


def beside(rows: Sequence[Row]) -> list[Beside]:
    """Every published figure with its counterpart among the rows: same size, TP, batch, kind of link and arm."""
    paper = published()
    found = []
    for claim in _claims(paper):
        sizes, links = paper["sizes"][claim.size], paper["links"][claim.link][str(claim.tp)]
        ours, measured = _ours(rows, claim, sizes, links)
        unit = "x" if claim.what == SPEEDUP else "%"
        link = "peer-to-peer on" if claim.link == "p2p_on" else "peer-to-peer off"
        cell = (claim.size, claim.tp, claim.batch, link, claim.arm, claim.what, claim.published)
        found.append(Beside(*cell, unit, ours, measured))
    return found


def _claims(paper: dict[str, Any]) -> Iterator[_Claim]:
    for link in ("p2p_on", "p2p_off"):
        for size, value in paper["speedup_by_size_batch4"][link].items():
            tp = paper["tp"].get(size, paper["tp"]["others"])
            yield _Claim(size, tp, 4, link, "ladder", SPEEDUP, value)
    gains = paper["improvement_70b_tp8_batch1_percent"]
    for link in ("p2p_on", "p2p_off"):
        for arm, values in gains[link].items():
            for column, value in zip(gains["columns"], values, strict=True):
                yield _Claim("70B", 8, 1, link, "none" if arm == "upper" else arm, _GAINS[column], value)


def _ours(rows: Sequence[Row], claim: _Claim, sizes: Sequence[str], links: Sequence[str]) -> tuple[float | None, str]:
    """The best counterpart: the paper's lengths before others, whole models before parts, then the newest."""
    best: tuple[tuple[bool, bool, int], float, str] | None = None
    for place, row in enumerate(rows):
        same = row.size in sizes and row.tp == claim.tp and row.batch == claim.batch and row.arm == claim.arm
        if not same or row.weights != "bf16" or (row.link not in links and claim.arm != "none"):
            continue
        base = _base(rows, row, links)
        value = None if base is None else _VALUES[claim.what](row, base)
        if base is None or value is None:
            continue
        rank = (row.prompt == 1024 and row.new == 512, row.layers == row.of_layers, place)
        if best is None or rank > best[0]:
            # the paper's tokens/s include the prompt; a line without its time is about decoding only
            part = "decoding only: " if row.ttft_ms is None else ""
            best = rank, value, f"{part}{row.size}, {base.link}: {facts([row, base])}"
    return (None, "") if best is None else best[1:]


def _base(rows: Sequence[Row], row: Row, links: Sequence[str]) -> Row | None:
    """The newest standard row of the same cell. No communication is compared on each link alike."""
    cell = (row.size, row.tp, row.batch, row.setting)
    alike = [r for r in rows if r.arm == BASE and r.link in links and (r.size, r.tp, r.batch, r.setting) == cell]
    return alike[-1] if alike else None


def _saved(ours: float | None, base: float | None) -> float | None:
    return None if ours is None or not base else 100 * (1 - ours / base)


_VALUES: dict[str, Callable[[Row, Row], float | None]] = {
    SPEEDUP: lambda row, base: row.total / base.total,
    _GAINS["prefill"]: lambda row, base: _saved(row.ttft_ms, base.ttft_ms),
    _GAINS["decode"]: lambda row, base: _saved(row.tpot_ms_p50, base.tpot_ms_p50),
    _GAINS["tokens_per_s"]: lambda row, base: 100 * (row.total / base.total - 1),
}
