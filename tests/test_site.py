"""The documentation as a site: built strictly, so that no link within it leads nowhere; no page needs a network."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from mkdocs.config import load_config

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file()


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert re.findall(r"<(?:script|img|iframe)[^>]+src=\"?https?:", text) == []
        assert re.findall(r"<link[^>]+stylesheet[^>]+href=\"?https?:", text) == []


def test_pictures_are_there(site: Path) -> None:
    found = 0
    for page in site.rglob("*.html"):
        for source in re.findall(r"<img[^>]+src=\"([^\"]+)\"", page.read_text()):
            assert (page.parent / source).is_file(), (page.name, source)
            found += 1
    assert found > 10


def test_the_reference_has_docstrings(site: Path) -> None:
    text = (site / "api.html").read_text()
    for name in (
        "ladder.engine.llm.LLM.generate",
        "ladder.hf.rewire.share_norm",
        "ladder.wiring.Wiring",
        "ladder.checkpoint.load",
    ):
        assert f'id="{name}"' in text, name


def test_the_menu_has_the_pages(site: Path) -> None:
    """A page that is in no menu is found by nobody."""
    menu = set(re.findall(r"<a href=\"([\w/-]+\.html)\" class=\"md-nav__link", (site / "index.html").read_text()))
    pages = {str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - menu <= {"index.html"}  # whose own link is another


def test_a_page_that_the_menu_does_not_name_is_added(tmp_path: Path) -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))
    (tmp_path / "docs").mkdir()
    for name in ("index.md", "new.md"):
        (tmp_path / "docs" / name).write_text("# A page\n")
    config = load_config(config_file=None, docs_dir=str(tmp_path / "docs"), nav=[{"Home": "index.md"}, {"Use": []}])
    assert hooks["on_config"](config).nav == [{"Home": "index.md"}, {"Use": ["new.md"]}]
