"""The output head of a model, whose logits are never whole: a loss takes them some tokens at a time."""

from ladder.train.head.head import Head
from ladder.train.head.logits import Logits, chunks

__all__ = ["Head", "Logits", "chunks"]
