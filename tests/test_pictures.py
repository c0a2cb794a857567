"""The pictures of README and docs are what their programs draw today, from results and from the table of wirings."""

import json
from pathlib import Path

import pytest

from experiments import headline_plot, wiring_drawings
from ladder.perf.schedule import walk

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"


def test_the_headline_is_drawn_from_the_results() -> None:
    lines = [json.loads(line) for line in (ROOT / "results/two_lanes_h200.jsonl").read_text().splitlines()]
    assert (PICTURES / "headline.svg").read_text() == headline_plot.draw(lines)


def test_the_headline_takes_the_fastest_way() -> None:
    line = {"measure": "decode", "wiring": "ladder", "batch": 1, "ms": 5.0}
    assert (
        headline_plot.fastest([line, {**line, "ms": 4.0}, {**line, "batch": 2, "ms": 1.0}], "ladder", {"batch": 1})
        == 4.0
    )


@pytest.mark.parametrize("wiring", wiring_drawings.WIRINGS)
def test_drawings_of_wirings(wiring: str) -> None:
    assert (PICTURES / f"wiring-{wiring}.svg").read_text() == wiring_drawings.draw(wiring)


@pytest.mark.parametrize("wiring", [*wiring_drawings.WIRINGS, "standard:1 ladder:2", "parallel-2", "desync-3x-1"])
@pytest.mark.parametrize("all_reduce", [0.25, 0.75, 1.5])
def test_their_time_axis_is_the_performance_models(
    wiring: str, all_reduce: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring_drawings, "ALL_REDUCE", all_reduce)
    blocks = wiring_drawings.blocks_of(wiring)
    computed, sent, end = wiring_drawings.run(blocks)
    account = walk([(block, wiring_drawings.COMPUTE) for block in blocks], all_reduce, first=False)
    assert end == pytest.approx(account.total) and len(sent) == account.all_reduces
    assert end - len(computed) * wiring_drawings.COMPUTE == pytest.approx(account.waited)
