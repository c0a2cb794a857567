"""The report's page in a real browser, opened from disk: buttons, legend, hovering, keyboard, tables."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ladder.charts.looks import TIMES
from ladder.report.write import report
from tests.pages import open_page
from tests.test_report import EVIL, row, sample, step, write

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--no-first-run"]
BOTH = pytest.mark.parametrize("page", [(1280, "light"), (400, "dark")], ids=["wide", "narrow"], indirect=True)

TIMED = {("bf16", "standard"): 6.0, ("bf16", "ladder"): 4.0, ("fp8", "standard"): 4.0, ("fp8", "ladder"): 2.0}
FORMATS = [row(arm, 1, ms, size="34B", layers=4, weights=weights) for (weights, arm), ms in TIMED.items()]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("the browser test needs playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("the browser test needs Chromium: apt-get install chromium")
    with sync_playwright() as player:
        started = player.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    other = [row("standard", 1, 9.0, size="llama-3-8b"), row(EVIL, 1, 6.0, size="llama-3-8b")]
    rows = write(folder / "rows.jsonl", [*sample(), *other, *FORMATS])
    steps = write(folder / "steps.jsonl", [step("standard"), step()])
    return report([rows, steps], folder / "out")[0]


@pytest.fixture
def page(request: pytest.FixtureRequest, browser: Any, html: Path) -> Iterator[Any]:
    """The page; at the end nothing must have gone wrong, and nothing but the file itself have been asked for."""
    yield from open_page(browser, html.as_uri(), settled, *getattr(request, "param", (1280, "light")))


def settled(page: Any) -> None:
    """Charts are drawn after the click; the page's own policy forbids what playwright would wait with."""
    for _ in range(400):
        if not page.locator(".plot[aria-busy=true]").count():
            return
        page.wait_for_timeout(25)
    pytest.fail("a chart is not drawn")


@pytest.mark.parametrize("page", [(400, "dark")], indirect=True)
def test_every_button_draws(page: Any) -> None:
    for figure in ("throughput", "frontier", "latency", "weights", "timeline"):
        keys = page.eval_on_selector_all(f"#{figure} .choice button", "all => all.map(one => one.dataset.key)")
        assert keys
        for key in keys:
            button = page.locator(f"#{figure} .choice button").locator(f"xpath=self::*[@data-key={key!r}]")
            button.click()
            settled(page)
            assert button.get_attribute("aria-pressed") == "true"
            assert page.locator(f"#{figure} .plot .mark").count() > 0
            assert "commit" in page.locator(f"#{figure} .facts").first.inner_text()


def test_speedups_by_weight_format(page: Any) -> None:
    labels = page.eval_on_selector_all("#weights .plot .mark", "all => all.map(one => one.getAttribute('aria-label'))")
    assert [label.split(":")[0] for label in labels] == ["ladder · bf16", "ladder · fp8"]
    assert "measured" in page.locator("#weights").inner_text()
    (cells,) = page.locator("#formats tbody tr").all()
    assert {"1.50", "2.00"} <= {*cells.locator("td").all_inner_texts()}  # beside what is predicted


def test_legend_switches_an_arm_everywhere(page: Any) -> None:
    def bars() -> int:
        return int(page.locator("#throughput .plot .mark[aria-label^='ladder ·']").count())

    before = bars()
    entry = page.locator("#throughput .legend button", has_text=re.compile("^ladder$"))
    entry.click()
    settled(page)
    assert before > 0 and bars() == 0 and entry.get_attribute("aria-pressed") == "false"
    assert page.locator("#frontier .plot .mark[aria-label^='ladder ·']").count() == 0
    assert page.evaluate("document.activeElement.dataset.key") == "arm=ladder"  # the keyboard stays where it was
    entry.click()
    settled(page)
    assert bars() == before


def test_all_arms_switched_off(page: Any) -> None:
    for figure in ("throughput", "latency"):
        pressed = page.locator(f"#{figure} .legend button[aria-pressed=true]")
        while pressed.count():
            pressed.first.click()
    settled(page)
    assert page.locator("#throughput .plot .mark").count() == 0
    page.locator("#throughput .legend button").first.click()
    settled(page)
    assert page.locator("#throughput .plot .mark").count() > 0


@BOTH
def test_hovering_and_the_keyboard_tell_the_numbers(page: Any) -> None:
    tip = page.locator("#tip")
    assert tip.is_hidden()
    bar = page.locator("#throughput .plot .mark[aria-label^='ladder · TP 8 · batch 4:']")
    bar.hover()
    text = tip.inner_text()
    assert "ladder · TP 8 · batch 4" in text and f"2.00{TIMES}" in text and "7.00 (6.90 to 7.20)" in text
    page.locator("h1").hover()
    assert tip.is_hidden()
    page.locator("#latency .plot .mark[tabindex='0']").focus()
    first = tip.inner_text()
    page.keyboard.press("ArrowRight")
    assert tip.is_visible() and tip.inner_text() != first
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_tables_sort(page: Any) -> None:
    def column(number: int) -> list[float]:
        cells = page.locator(f"#rows tbody td:nth-child({number})").all_inner_texts()
        return [float(cell.replace(",", "")) for cell in cells if cell]

    titles = page.locator("#rows th").all_inner_texts()
    at = titles.index("tokens/s") + 1
    header = page.locator(f"#rows th:nth-child({at})")
    for direction, order in (("ascending", 1), ("descending", -1)):
        header.locator("button").click()
        assert header.get_attribute("aria-sort") == direction
        values = column(at)
        assert len(values) == len(sample()) + 2 + len(FORMATS) and values == sorted(
            values, key=lambda value: order * value
        )
    for button in page.locator("#published th button").all():
        button.click()
    assert page.locator("#published tbody tr").count() == 20
    assert "20 of 32 published figures" in page.locator("#published").inner_text()
    assert f"1.29{TIMES}" in page.locator("#published tbody").inner_text()


def test_names_stay_text(page: Any) -> None:
    assert page.locator("img").count() == 0 and page.locator("script").count() == 3
    page.locator("#throughput .choice button", has_text="llama-3-8b").click()
    assert "<img src=x onerror=alert(1)>" in page.locator("#throughput .legend").inner_text()


def test_narrower_window_redraws(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    for _ in range(100):  # the page's own policy forbids what playwright would wait with
        if page.evaluate("(document.querySelector('#throughput .plot svg')?.clientWidth ?? 999) < 360"):
            return
        page.wait_for_timeout(50)
    pytest.fail("the plot is as wide as before")
