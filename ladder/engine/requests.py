"""Requests: a prompt with its sampling parameters, the chunks of its output, and its result."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ladder.engine.options import SamplingParams
from ladder.engine.text import Text

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Chunk:
    """New output of a request. `finish_reason` is set in the last chunk: stop, length or error."""

    index: int
    token_ids: tuple[int, ...]
    text: str | None  # None where the directory has no tokenizer
    finish_reason: str | None


@dataclass(frozen=True)
class Result:
    """A finished request; `token_ids` are the new ones only. The finish reason is error where the model's output was
    not finite: its weights are broken (see `check`), or its dtype is too narrow.
    """

    prompt: str | list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str


class Request:
    """A request in progress: what the ranks compute for it, and the text of its tokens."""

    def __init__(self, index: int, tokens: list[int], limit: int, params: SamplingParams, text: Text | None) -> None:
        self.index = index
        self.tokens = tuple(tokens)  # the prompt's
        self.limit = limit  # new tokens, at most
        # a seed is drawn here and not by the ranks, which must all draw the same tokens
        self.params = params if params.seed is not None else replace(params, seed=secrets.randbits(63))
        self.text = text
        self.new: list[int] = []
        self.finish_reason: str | None = None

    def add(self, token: int | None, finish_reason: str | None) -> Chunk:
        """Append a token that the ranks have computed."""
        new = () if token is None else (token,)
        self.new += new
        piece = "".join(map(self.text.add, new)) if self.text else None
        self.finish_reason = "stop" if self.text and self.text.stopped else finish_reason
        if self.text and self.finish_reason:
            piece = (piece or "") + self.text.finish()
        return Chunk(self.index, new, piece, self.finish_reason)
