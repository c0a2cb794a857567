"""What a wheel has, as pyproject.toml says it: every file of the package, one version, the licenses of all of it."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from ladder import errors
from tests import first_use

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def unnamed(package: Path, patterns: list[str]) -> list[Path]:
    """Files that are no Python, and that no pattern brings into a wheel."""
    brought = {file for pattern in patterns for file in package.glob(pattern)}
    files = [file for file in package.rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")]
    return sorted(file.relative_to(package) for file in files if file not in brought)


def test_every_file_is_in_the_wheel(tmp_path: Path) -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["ladder"]
    assert unnamed(ROOT / "ladder", patterns) == []
    (tmp_path / "a.css").touch()
    assert unnamed(tmp_path, patterns) == [Path("a.css")]


def test_there_is_one_version() -> None:
    """In `ladder/__init__.py`, as a text that setuptools reads without an import."""
    assert "version" not in PROJECT["project"] and "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ladder.__version__"}
    tree = ast.parse((ROOT / "ladder" / "__init__.py").read_text())
    (value,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and "__version__" in ast.dump(node))
    assert isinstance(ast.literal_eval(value), str)


def test_licenses_are_stated() -> None:
    """Of the program, and beside the embedded model its own."""
    assert PROJECT["project"]["license"] == "Apache-2.0 AND CC-BY-SA-3.0"
    files = [(ROOT / name).read_text() for name in PROJECT["project"]["license-files"]]
    assert "Apache License" in files[0] and "CC BY-SA 3.0" in files[1]
    assert "license: cc-by-sa-3.0" in (ROOT / "ladder" / "embedded" / "README.md").read_text()


def test_what_is_installed_is_within_the_bounds() -> None:
    """Where private names of a package are used, its next version is not allowed before it was tried."""
    bounds = {text.split(">")[0]: text for text in PROJECT["project"]["dependencies"]}
    assert all("<" in bounds[name] for name in ("torch", "transformers", "typer"))


@pytest.mark.parametrize("program, status", [("raise SystemExit(3)", 3), ("print('Traceback')", None)])
def test_the_first_use_can_fail(program: str, status: int | None, tmp_path: Path) -> None:
    ladder = tmp_path / "ladder"
    ladder.write_text(f"#!/usr/bin/env python3\nimport sys\n{program}\nprint('not json', file=sys.stderr)\n")
    ladder.chmod(0o755)
    with pytest.raises((SystemExit, ValueError)):
        first_use.main(ladder)


def test_the_citation_has_the_licences_of_the_package() -> None:
    """All of them, as LICENSE and the embedded model's own file say; the page of contributions names the program's."""
    found = re.search(r"^license: \[(.*)\]", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert found is not None and " AND ".join(found[1].split(", ")) == PROJECT["project"]["license"]
    assert PROJECT["project"]["license"].split(" AND ")[0] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()[:200]
    assert "Apache-2.0" in (ROOT / "CONTRIBUTING.md").read_text() and "Apache-2.0" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("extra", [name for name in PROJECT["project"]["optional-dependencies"] if name != "dev"])
def test_install_lines_name_the_packages_of_an_extra(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the metadata of what is installed, as setuptools writes it; no index needs to have this package."""
    table = PROJECT["project"]["optional-dependencies"]
    lines = [f'{package}; extra == "{name}"' for name, some in table.items() for package in some]
    monkeypatch.setattr(errors, "requires", lambda name: ["torch>=2.11,<2.14", *lines])
    assert errors.packages(extra) == table[extra]
    assert errors.install(extra) == "pip install " + " ".join(f"'{package}'" for package in table[extra])
    monkeypatch.setattr(errors, "requires", lambda name: None)
    assert errors.install(extra) == f"pip install '.[{extra}]'"


def test_nothing_is_installed_from_an_index_that_does_not_have_it() -> None:
    texts = [*(ROOT / "ladder").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    assert [text for text in texts if re.search(r"pip install .*ladder-residual", text.read_text())] == []
