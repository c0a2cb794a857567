"""ladder report of what ladder load wrote: the numbers in its figures, pictures, the page in a browser, refusals."""

import re
from pathlib import Path
from typing import Any

import pytest

from ladder.charts.library import program
from ladder.errors import LadderError
from ladder.report.lines.read import load
from ladder.report.load_figures import load_latency, load_rate, load_table
from ladder.report.write import report
from tests.test_report import EVIL, data, row, write
from tests.test_report_browser import browser, settled

__all__ = ["browser"]


def request(run: str, index: int, ms: float, **more: Any) -> dict[str, Any]:
    line = {"measure": "load request", "run": run, "index": index, "ttft_ms": 10 * ms, "tpot_ms": ms, "e2e_ms": 30 * ms}
    return {**line, "itl_ms": [ms, 2 * ms], "error": None, **more}


def ended(run: str, label: str, rate: float | None, tokens: float, **more: Any) -> dict[str, Any]:
    line = {"measure": "load", "run": run, "label": label, "arrivals": "at once" if rate is None else "poisson"}
    line |= {
        "rate": rate,
        "requests_per_s": tokens / 10,
        "output_tokens_per_s": tokens,
        "tpot_ms_p50": 5.0,
        "failed": 1,
    }
    line |= {"ttft_ms_p50": 50.0, "ttft_ms_p99": 90.0, "tpot_ms_p99": 9.0, "prompt_length": "8", "output_length": "3"}
    return {
        **line,
        "api": "completions",
        "model": "m",
        "chip": "abacus",
        "commit": "abc",
        "time": "2025-11-15T1",
        **more,
    }


def sample() -> list[dict[str, Any]]:
    """Two labels at two rates, a hundred requests each and one that failed."""
    lines = []
    for label, factor in (("standard", 2.0), ("ladder", 1.0)):
        for rate in (1.0, 4.0):
            run = f"{label}{rate}"
            lines += [request(run, n, factor * (n + 1)) for n in range(101)]
            lines += [
                request(run, 101, 9.0, error="timeout", ttft_ms=None),
                ended(run, label, rate, 100 * rate / factor),
            ]
    return lines


def test_numbers(tmp_path: Path) -> None:
    runs = load([write(tmp_path / "load.jsonl", [*sample(), ended("x", "ladder", None, 900.0)])]).loads
    slow, fast = load_latency(runs)
    assert slow.keys == {"arrivals": "1/s", "tokens": "prompts 8, outputs 3", "API": "completions"}
    points = {(mark.arm, mark.y): mark.x for mark in fast.marks["TTFT"] if mark.front}
    assert points["ladder", 50] == pytest.approx(510) and points["standard", 90] == pytest.approx(2 * 910)
    assert len([mark for mark in fast.marks["ITL"] if mark.arm == "ladder"]) == len(fast.marks["TPOT"]) / 2
    [rate] = load_rate(runs)
    tokens = [(mark.arm, mark.x, mark.y) for mark in rate.marks["output tokens/s"]]
    assert ("ladder", 4.0, 400.0) in tokens and len(tokens) == 4 and rate.keys["against"] == "requests/s offered"
    assert not rate.marks["goodput, requests/s"] and "client on abacus" in rate.facts
    table = load_table(runs)
    titles = [column["title"] for column in table["columns"]]
    assert len(table["cells"]) == 5 and table["cells"][4][titles.index("arrivals")] == "all at once"
    closed = [ended(f"c{n}", "ladder", None, 10.0 * n, arrivals="closed", concurrency=n) for n in (1, 2)]
    [panel] = load_rate(load([write(tmp_path / "closed.jsonl", closed)]).loads)
    assert panel.keys["against"] == "requests at a time" and not load_rate(runs[:1])


def test_page_and_pictures(tmp_path: Path) -> None:
    from matplotlib.image import imread

    both = [write(tmp_path / "load.jsonl", sample()), write(tmp_path / "rows.jsonl", [row("ladder", 1, 5.0)])]
    page, *pictures = report(both, tmp_path / "out")
    assert [path.name.split("-prompts")[0] for path in pictures if path.name.startswith("load")] == [
        "load-latency-1-s",
        "load-latency-4-s",
        "load-rate-requests-s-offered",
    ]
    for picture in pictures:
        pixels = imread(picture)
        assert ((pixels[:, :, :3].max(2) - pixels[:, :, :3].min(2)) > 0.3).mean() > 0.0002, picture.name
    read = data(page)
    assert read["summary"][0].startswith("1 measurements and 4 runs of requests from load.jsonl, rows.jsonl")
    assert len(read["loads"]["cells"]) == 4 and len(read["figures"]["load-latency"]) == 2
    alone = data(report(both[:1], tmp_path / "alone")[0])
    assert alone["summary"][0].startswith("4 runs of requests") and not alone["rows"]["cells"]


def test_names_are_harmless_and_a_killed_run_is_told(tmp_path: Path) -> None:
    lines = [request("dead", 0, 1.0), request("r", 0, 1.0), ended("r", EVIL, 2.0, 5.0, url=EVIL, model=EVIL)]
    page, *pictures = report([write(tmp_path / "load.jsonl", lines)], tmp_path / "out")
    assert "<img" not in page.read_text().replace(program(), "") and len(pictures) == 1
    assert data(page)["notes"] == ["load.jsonl: not drawn are 1 line of a request whose run has no line."]


@pytest.mark.parametrize("line, reason", [
    (request("r", 0, 1.0, ttft_ms="soon"), "ttft_ms must be a number of at least 0, not 'soon'"),
    (request("r", 0, 1.0, itl_ms=[1.0, -1.0]), "itl_ms must be a number"),
    ({"measure": "load request"}, "run must be a text"),
    (ended("r", "x", -2.0, 1.0), "rate must be a number"),
    ({"measure": "load", "run": "r"}, "the key 'label' is missing"),
    (request("r", 0, 1.0), "has nothing to draw"),
])  # fmt: skip
def test_refusals(tmp_path: Path, line: dict[str, Any], reason: str) -> None:
    with pytest.raises(LadderError, match=reason):
        report([write(tmp_path / "load.jsonl", [line])], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_in_a_browser(browser: Any, tmp_path: Path) -> None:
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(report([write(tmp_path / "load.jsonl", sample())], tmp_path / "out")[0].as_uri())
    for figure in ("load-latency", "load-rate"):
        buttons = page.locator(f"#{figure} .choice button")
        assert buttons.count() > 5
        for at in range(buttons.count()):
            buttons.nth(at).click()
            settled(page)
            assert (
                page.locator(f"#{figure} .plot .mark").count() > 0
                and page.locator(f"#{figure} .mark-line path").count() == 2
            )
    page.locator("#load-latency .choice button", has_text=re.compile("^TTFT$")).click()
    settled(page)
    page.locator("#load-latency .plot .mark[aria-label^='ladder']").first.hover()
    assert "50% within" in page.locator("#tip").inner_text()
    assert page.locator("#loads tbody tr").count() == 4 and wrong == []
    page.close()
