"""The transformers host. Importing it lets transformers' Auto classes load wired checkpoints."""

from ladder.hf.register import register
from ladder.hf.rewire import rewire, set_staleness, share_norm

__all__ = ["rewire", "set_staleness", "share_norm"]

register()
