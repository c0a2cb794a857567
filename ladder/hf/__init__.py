"""The transformers host. Importing it teaches transformers' Auto classes to load wired checkpoints."""

from ladder.hf.register import register
from ladder.hf.rewire import restale, rewire

__all__ = ["restale", "rewire"]

register()
