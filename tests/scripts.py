"""The scripts of `examples/`, run in this process."""

import runpy
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str, *arguments: Any, **named: Any) -> Any:
    """What its `main` returns."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*arguments, **named)
