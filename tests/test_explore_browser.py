"""The explorer in a real browser: every control, the keyboard, both ways to get answers; its numbers are those of
`ladder plan --json`.
"""

import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ladder.explore import grid
from ladder.explore.answers import Answers
from ladder.explore.choices import WIRINGS, Offer
from ladder.explore.measured import Measured
from ladder.explore.page import page as make_page
from ladder.explore.server import Server
from tests.pages import open_page
from tests.test_report_browser import browser, settled

__all__ = ["browser"]

FIELDS = ("size", "chip", "tp", "link", "batch", "prompt", "weights")
KEYS = ("speedup", "tpot_ms", "tokens_per_s", "tokens_per_s_gpu", "exposed_ms", "hidden")
LINKS = ("nvlink_nccl", "nvlink_oneshot", "pcie_shm_tp2", "pcie_shm_tp8", "ib_2node_nccl")
OFFER = Offer.of_a_server().with_(link=LINKS, tp=(8, 1, 2, 16), batch=(1, 16))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with Server(0, make_page(OFFER), Answers(OFFER, Measured.of([]), (5, 50))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explore") / "page.html"
    offer = Offer.of_a_file().with_(size=("llama-3-8b",), chip=("h200",), tp=(2, 1), batch=(1, 16), weights=("bf16",))
    grid.write(offer, [], path, lambda *step: None)
    return path


@pytest.fixture
def opened(request: pytest.FixtureRequest, browser: Any, address: str) -> Iterator[Any]:
    yield from open_page(browser, address, shown, *getattr(request, "param", (1280, "light")))


@pytest.fixture
def from_disk(browser: Any, file: Path) -> Iterator[Any]:
    yield from open_page(browser, file.as_uri(), shown, 1280, "dark")


def shown(page: Any, what: str = "shown") -> None:
    """`answered`: the table and the advice; `shown`: all figures, too."""
    for _ in range(1200):
        if page.evaluate(f"document.body.dataset.{what}"):
            return
        page.wait_for_timeout(25)
    pytest.fail("the page does not show an answer")


def choose(page: Any, name: str, value: str) -> None:
    page.locator(f"select[name={name}]").select_option(value)
    shown(page)


def entries(page: Any, name: str) -> list[str]:
    found: list[str] = page.eval_on_selector_all(f"select[name={name}] option", "all => all.map(one => one.value)")
    return found


def values(page: Any) -> dict[str, dict[str, float | None]]:
    """The numbers of the table, as they came."""
    rows = page.eval_on_selector_all(
        "#wirings tbody tr",
        """rows => rows.map(row => [row.dataset.wiring, [...row.querySelectorAll('td[data-value]')].map(
            cell => [cell.dataset.key, cell.dataset.value])])""",
    )
    return {wiring: {key: None if value == "null" else float(value) for key, value in cells} for wiring, cells in rows}


def test_twenty_settings_are_those_of_plan(opened: Any, run: Callable[..., tuple[int, str, str]]) -> None:
    dice, refused = random.Random(26), 0
    for _ in range(20):
        given: dict[str, str] = {}
        for name in FIELDS:
            if opened.locator(f"select[name={name}]").is_enabled():
                given[name] = dice.choice([value for value in entries(opened, name) if value != "own"])
                opened.locator(f"select[name={name}]").select_option(given[name])
            else:
                given[name] = "nvlink_nccl"  # of one GPU
        shown(opened, "answered")
        flags = [part for name, value in given.items() for part in (f"--{name}", value)]
        flags += [part for wiring in WIRINGS for part in ("--wiring", wiring)]
        status, out, err = run("plan", *flags, "--json")
        if status:
            refused += 1
            assert opened.locator("#headline").inner_text() == "This setting is not possible."
            assert opened.locator("#reasons").inner_text().strip() == err.removeprefix("ladder: ").strip()
            continue
        rows = {row["wiring"]: {key: row[key] for key in KEYS} for row in json.loads(out)}
        assert values(opened) == rows and list(rows) == list(WIRINGS)
        headline = opened.locator("#headline").inner_text()
        assert f"{rows['ladder']['speedup']:.2f}" in headline
    assert refused < 15


@pytest.mark.parametrize("opened", [(400, "dark")], indirect=True)
def test_every_control(opened: Any) -> None:
    for name in FIELDS:
        for value in entries(opened, name)[:3]:
            if value == "own":
                continue
            choose(opened, name, value)
            assert opened.locator(f"select[name={name}]").input_value() == value
            assert f"{name}={value}" in opened.url
            refused = opened.locator("#headline").inner_text() == "This setting is not possible."
            assert opened.locator("#layer").is_visible() != refused
            if not refused:
                assert opened.locator("#layer .plot .mark").count() > 16
                assert opened.locator("#frontier .plot .mark").count() > 0
                alone = opened.locator("select[name=tp]").input_value() == "1"
                assert opened.locator("#latency").is_visible() != alone
                assert opened.locator("select[name=link]").is_disabled() == alone
        choose(opened, name, {"size": "llama-3-70b", "tp": "8"}.get(name, entries(opened, name)[0]))


def test_an_own_link(opened: Any) -> None:
    opened.locator("select[name=link]").select_option("own")
    typed = opened.locator("input[name=typed]")
    assert typed.is_visible()
    typed.fill("50us, 10GB/s")
    typed.press("Enter")
    shown(opened)
    assert "--link 50us,10GB/s" in opened.locator("#command").inner_text()
    typed.fill("rope")
    typed.press("Enter")
    shown(opened)
    assert "unknown link 'rope'" in opened.locator("#reasons").inner_text()


def test_the_link_follows_the_gpus(opened: Any) -> None:
    choose(opened, "link", "pcie_shm_tp8")
    choose(opened, "size", "llama-3-8b")
    choose(opened, "tp", "2")
    assert opened.locator("select[name=link]").input_value() == "pcie_shm_tp2"  # the same kind
    choose(opened, "link", "nvlink_oneshot")
    choose(opened, "chip", "rtx-4090")
    assert opened.locator("select[name=link]").input_value() == "pcie_shm_tp2"  # which has no NVLink


def test_an_address_opens_its_setting(browser: Any, address: str) -> None:
    url = f"{address}#size=llama-3-8b&tp=2&batch=16&link=5us,9GB/s&chip=<b>"
    for page in open_page(browser, url, shown, 1280, "light"):
        chosen = [page.locator(f"select[name={name}]").input_value() for name in ("size", "tp", "batch", "chip")]
        assert chosen == ["llama-3-8b", "2", "16", "h200"]
        assert "--link 5us,9GB/s" in page.locator("#command").inner_text()


def test_a_wiring_is_hidden_everywhere(opened: Any) -> None:
    def marks() -> list[int]:
        return [opened.locator(f"#{name} .plot .mark[aria-label^='ladder-2']").count() for name in figures]

    figures = ("layer", "latency", "frontier")
    assert all(marks())
    for place in ("#wirings tbody", "#latency .legend"):
        button = opened.locator(f"{place} button[data-wiring='ladder-2']")
        button.focus()
        opened.keyboard.press("Enter")
        settled(opened)
        assert not any(marks()) and button.get_attribute("aria-pressed") == "false"
        assert opened.evaluate("document.activeElement.dataset.wiring") == "ladder-2"  # the keyboard stays there
        opened.keyboard.press("Enter")
        settled(opened)
        assert all(marks())


def test_marks_tell_their_numbers(opened: Any) -> None:
    tip = opened.locator("#tip")
    assert tip.is_hidden()
    opened.locator("#layer .plot .mark[aria-label^='ladder: MLP 61:']").first.hover()
    assert "needs the all-reduce of" in tip.inner_text() and "MLP 60" in tip.inner_text()
    opened.locator("h1").hover()
    assert tip.is_hidden()
    opened.locator("#frontier .plot .mark[tabindex='0']").focus()
    first = tip.inner_text()
    opened.keyboard.press("ArrowRight")
    assert tip.is_visible() and tip.inner_text() != first
    assert opened.locator("#latency .plot .mark[aria-label*='measured']").count() > 0


def test_one_gpu_has_no_all_reduces(opened: Any) -> None:
    """Neither in the figure of its layers, nor in what that tells."""
    assert opened.locator("#layer .plot .mark[aria-label*='all-reduce']").count() > 0
    assert opened.locator("#kinds .kind:visible", has_text="all-reduce").count() == 1
    choose(opened, "size", "llama-3-8b")
    choose(opened, "tp", "1")
    assert opened.locator("#layer .plot .mark[aria-label*='all-reduce']").count() == 0
    assert opened.locator("#kinds .kind:visible", has_text="all-reduce").count() == 0
    assert "what is on the link" not in opened.locator("#layer .quiet").inner_text()
    assert "link" not in opened.locator("#layer .plot").inner_text()
    opened.locator("#layer .plot .mark[aria-label^='ladder: attention'][aria-label*='waits']").first.hover()
    told = opened.locator("#tip").inner_text()
    assert "waits for the other lane" in told and "all-reduce" not in told
    choose(opened, "tp", "8")
    assert "what is on the link" in opened.locator("#layer .quiet").inner_text()


@pytest.mark.parametrize("opened, more", [((1280, "light"), False), ((400, "light"), True)], indirect=["opened"])
def test_a_table_that_scrolls_says_so(opened: Any, more: bool) -> None:
    box = opened.locator("#wirings .scroll")
    assert box.evaluate("box => box.scrollWidth > box.clientWidth + 1") == more
    assert opened.locator("#wirings .hint").is_visible() == more


def test_a_file_answers_by_itself(from_disk: Any) -> None:
    assert from_disk.locator("#headline").inner_text().startswith("Ladder gives")
    for name in ("tp", "batch", "link"):
        for value in entries(from_disk, name):
            choose(from_disk, name, value)
            assert from_disk.locator("#layer .plot .mark").count() > 16
        choose(from_disk, name, entries(from_disk, name)[-1])
    assert "own" not in entries(from_disk, "link")
