"""Transformers whose all-reduces run while the next sub-block computes: Ladder Residual (arXiv 2501.06589)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ladder.engine.llm import LLM as LLM
    from ladder.engine.options import SamplingParams as SamplingParams

__version__ = "0.1.0"

_FACE = {"LLM": "ladder.engine.llm", "SamplingParams": "ladder.engine.options"}


def __getattr__(name: str) -> Any:
    """The Python face, loaded when it is first used: `import ladder` alone costs nothing."""
    if name not in _FACE:
        raise AttributeError(f"module 'ladder' has no attribute {name!r}")
    return getattr(import_module(_FACE[name]), name)
