"""Tables of figures in README.md and docs/ are written by programs, from `results/`. Prose: tests/test_prose.py."""

import re

import pytest

from experiments.tables.pages import MARK, TABLES, filled
from tests.blocks import PAGES, ROOT, without_code

RESULTS = ROOT / "results"
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FIGURE = re.compile(r"(?<![\w.])\d[\d,]*\.\d+(?:%|x\b)?(?!\w|\.\d)")


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
    assert unmarked(table) == [] and unmarked("| | a |\n|---|---|\n| b | 1.2x |\n") == ["b"]


def test_links_between_pages() -> None:
    """Of README and CONTRIBUTING, which are no part of the site, whose own are checked when it is built."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", RESULTS / "README.md"):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), (page, link)
