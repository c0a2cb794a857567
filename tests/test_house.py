"""The rules of the house: who may import whom, nothing at import, no torch where none belongs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ladder"
# A module imports only from rows above its own, or from its own room.
ROWS = ["errors", "options", "files", "progress", "devices", "jit", "wiring", "comm", "config", "residual", "layers"]
ROWS += ["kernels", "model", "plotting", "perf", "checkpoint", "engine", "hf", "data", "scan", "train", "bench"]
ROWS += ["report", "cli", "__main__"]


def imports(file: Path) -> list[str]:
    """The modules of this package that a file names, function bodies and type-checking blocks included."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names += (
                [f"ladder.{alias.name}" for alias in node.names] if node.module == "ladder" else [node.module or ""]
            )
    return [name for name in names if name.split(".")[0] == "ladder"]


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_come_from_rows_above(file: Path) -> None:
    room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    assert room in ROWS, f"{room} has no row in the house"
    for name in imports(file):
        other = name.split(".")[1] if "." in name else "errors"
        if other != room and other != "__version__":
            assert ROWS.index(other) < ROWS.index(room), f"{file.name} imports {name}"


def test_the_import_rule_can_fail(tmp_path: Path) -> None:
    (tmp_path / "wiring.py").write_text("def f():\n    from ladder.model import Decoder\n")
    assert imports(tmp_path / "wiring.py") == ["ladder.model"]


@pytest.mark.parametrize(
    "module", ["ladder", "ladder.wiring", "ladder.comm.link", "ladder.config", "ladder.perf.plan", "ladder.cli"]
)
def test_no_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_happens_at_import(file: Path) -> None:
    """At module level: definitions, imports, constants. No loop, no call for its effect, no environment."""
    text = file.read_text()
    assert ("environ" not in text and "getenv" not in text) or file.name == "control.py"  # torchrun's, none of our own
    for node in ast.parse(text).body:
        assert not isinstance(node, ast.For | ast.While | ast.With), f"{file.name}:{node.lineno}"
        if isinstance(node, ast.Expr) and file != PACKAGE / "hf" / "__init__.py":  # which teaches transformers
            assert isinstance(node.value, ast.Constant), f"{file.name}:{node.lineno}"


def test_files_are_small_and_listed_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for file in FILES:
        assert len(file.read_text().splitlines()) <= 350, file
        if file.name not in ("__init__.py", "__main__.py"):
            assert file.name in readme, f"{file.name} is missing in the README's tree"


def test_only_the_stream_and_the_engine_communicate() -> None:
    for file in FILES:
        calls = {n.func.attr for n in ast.walk(ast.parse(file.read_text()))
                 if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)}  # fmt: skip
        if calls & {"all_reduce", "all_gather"}:
            assert file.relative_to(PACKAGE).parts[0] in ("comm", "residual.py", "engine", "bench"), file
