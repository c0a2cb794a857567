"""What belongs to a project beside its code: README, CHANGELOG, CITATION.cff, each true to the package."""

import re
from pathlib import Path

import yaml

from ladder import __version__

ROOT = Path(__file__).parent.parent


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_version_is_everywhere_the_same() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["version"] == __version__
    assert {"title", "message", "authors", "license"} <= citation.keys()
    assert re.findall(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == __version__


def test_the_changelog_knows_what_was_renamed() -> None:
    from ladder.cli.verbs import RENAMED

    text = (ROOT / "CHANGELOG.md").read_text()
    for names in RENAMED.values():
        for old, new in names.items():
            if old not in ("--link", "--batch"):  # which are named by verb
                assert f"`{old}`" in text or f" {old}`" in text, old
            assert f"`{new}`" in text, new
