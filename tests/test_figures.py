"""The figures of README.md and docs/ come from `results/`: tables are written by programs, prose is searched for."""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments.tables import figures
from experiments.tables.figures import fixed, one
from experiments.tables.models import apart
from experiments.tables.pages import MARK, TABLES, filled
from experiments.tables.speed import ROWS, step
from tests.blocks import PAGES, ROOT, without_code

RESULTS = ROOT / "results"
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# figures of prose that follow from lines, and how: others must stand in a line
FOLLOW: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "0.7%"): lambda: apart("ladder", 10, 1).lstrip("+"),
    ("README.md", "0.5%"): lambda: apart("ladder", 10, 2).lstrip("+"),
    ("docs/choose.md", "1.44"): lambda: fixed(step(ROWS[6], "standard") / step(ROWS[6], "ladder"), 2),
    ("docs/choose.md", "2.80"): lambda: fixed(step(ROWS[6], "standard") / step(ROWS[6], "parallel-1"), 2),
    ("docs/performance-model.md", "2.7%"): lambda: f"{fixed(100 * two_lanes()['median_error'], 1)}%",
    ("docs/use/quantize.md", "1.3"): lambda: fixed(quantized_gain(), 1),
    ("docs/quality.md", "3.328"): lambda: fixed(at_latency("nvlink_nccl"), 3),
    ("docs/quality.md", "3.341"): lambda: fixed(at_latency("pcie_shm_tp8"), 3),
}
# and those that are no measurements of ours: goals, versions, standard errors that a text explains, counts of tokens
SAID = {
    "README.md": {"0.4", "2.0", "3.0"},
    "CONTRIBUTING.md": {"2.0"},
    "docs/how-it-works.md": {"0.75"},
    "docs/performance.md": {"4.75"},
    "docs/quality.md": {"118.2"},
    "docs/serving.md": {"0.32"},  # a version of vLLM
    "docs/use/adapt.md": {"0.4"},
    "docs/use/generate.md": {"8.9"},
}
MORE_FILES = {"docs/quality.md": ["one_rank_h200.jsonl"], "docs/reproduce.md": ["flags_h200.jsonl"]}
FIGURE = re.compile(r"(?<![\w.])(\d[\d,]*\.\d+)(%?)(?![\w]|\.\d)")


def two_lanes() -> dict[str, Any]:
    return one("calibration", measurements="results/two_lanes_h200.jsonl", row="as it is", on="lanes: 2")


def quantized_gain() -> float:
    """Of int4, and nearly so of fp8, over bf16: standard, batch 1, 8B."""
    where = {"measure": "decode", "size": "llama-3-8b", "batch": 1, "wiring": "standard", "link_name": None}
    return figures.least("two_lanes_h200", "ms", **where) / figures.least("one_rank_weights_h200", "ms", **where)


def at_latency(link: str) -> float:
    """The loss of ladder at standard's latency, on the line through its 10 and its 13 layers."""
    ms = {key: one("bench_small_h200", wiring=key[0], size=key[1], cell_link=link)["tpot_ms_p50"] for key in LADDERS}
    losses = {key: one("scratch_h200", wiring=key[0], size=key[1], seed=1)["valid_loss"] for key in LADDERS[1:]}
    standard, short, long = LADDERS
    share = (ms[standard] - ms[short]) / (ms[long] - ms[short])
    return losses[short] + share * (losses[long] - losses[short])


LADDERS = (("standard", "50M"), ("ladder", "50M"), ("ladder", "50M-long"))


# --- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_as_their_lines_have_them(name: str) -> None:
    """Else: python -m experiments.tables"""
    text = (ROOT / name).read_text()
    assert filled(text) == text


def unmarked(text: str) -> list[str]:
    """The tables with decimal figures that no program writes, by their first cell."""
    tables = re.findall(r"(?:^\|.*\n)+", without_code(MARK.sub("", text)), re.MULTILINE)
    return [table.splitlines()[2].split("|")[1].strip() for table in tables if FIGURE.search(table)]


@pytest.mark.parametrize("name", NAMES)
def test_every_table_of_figures_has_a_program(name: str) -> None:
    assert unmarked((ROOT / name).read_text()) == []


def test_every_program_is_used() -> None:
    found = {mark["name"] for page in PAGES for mark in MARK.finditer(page.read_text())}
    assert found == set(TABLES)


def test_the_rules_of_tables_can_fail() -> None:
    table = "<!-- table: generate -->\n| | a |\n|---|---|\n| b | 1.2 |\n<!-- end -->"
    assert filled(table) != table
    assert unmarked(table) == [] and unmarked("| | a |\n|---|---|\n| b | 1.2 |\n") == ["b"]


# --- prose ----------------------------------------------------------------------------------------------------------


def leaves(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


@cache
def numbers(file: Path) -> frozenset[float]:
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    return frozenset(value for line in lines for value in leaves(json.loads(line)) if abs(value) < 1e15)


def stands_in(figure: str, known: list[frozenset[float]]) -> bool:
    """Some number rounds to it: as it is, in percent, thousands or millions, or without its sign."""
    half = 0.5000001 * 10.0 ** -len(figure.partition(".")[2])
    value = float(figure.replace(",", ""))
    return any(
        abs(abs(number) * unit - value) <= half for some in known for number in some for unit in (1, 100, 1e-3, 1e-6)
    )


def prose(text: str) -> str:
    """Without code, tables, formulas and links."""
    lines = [line for line in without_code(MARK.sub("", text)).splitlines() if not line.startswith(("|", "    "))]
    return re.sub(r"`[^`]*`|\]\([^)]*\)|(?:arXiv|vLLM|torch) [\d.]+", "", "\n".join(lines))


@pytest.mark.parametrize("name", NAMES)
def test_figures_of_prose_stand_in_lines(name: str) -> None:
    """Each decimal figure, in some line of the files that the page names; or it follows from lines as said above. That
    it is the right line is for whoever reads.
    """
    text = (ROOT / name).read_text()
    files = [RESULTS / file for file in {*re.findall(r"results/([\w/]+\.jsonl)", text), *MORE_FILES.get(name, [])}]
    known = [numbers(file) for file in files]
    missing = []
    for figure, percent in FIGURE.findall(prose(text)):
        if (follows := FOLLOW.get((name, figure + percent))) is not None:
            assert follows() == figure + percent
        elif figure not in SAID.get(name, ()) and not stands_in(figure, known):
            missing.append(figure)
    assert missing == []


def test_the_rule_of_prose_can_fail() -> None:
    assert FIGURE.findall(prose("takes 3.25 ms, 7.5% more\n| 9.9 |\n    1.1\n`2.2`")) == [("3.25", ""), ("7.5", "%")]
    known = [frozenset({0.0749, 3.2512})]
    assert stands_in("3.25", known) and stands_in("7.5", known)
    assert not stands_in("3.26", known) and not stands_in("7.6", known)


def test_links_between_pages() -> None:
    """Of README and CONTRIBUTING, which are no part of the site, whose own are checked when it is built."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", RESULTS / "README.md"):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), (page, link)
