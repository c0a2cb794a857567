"""Requests: a prompt with its sampling parameters, the chunks of its output, and its result."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ladder.engine.options import SamplingParams
from ladder.engine.text import Text

Prompt = str | Sequence[int]
_NEXT_SEED = 0x9E3779B97F4A7C15  # odd: the seeds of a prompt's samples are all different


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a new token, and the likeliest tokens with theirs: of the model, before any filter."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Chunk:
    """New output of a request. `finish_reason` is set in the last chunk: stop, length or error."""

    index: int
    token_ids: tuple[int, ...]
    text: str | None  # None where the directory has no tokenizer
    finish_reason: str | None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of `token_ids`, where the request asks for them


@dataclass(frozen=True)
class Result:
    """A finished request; `token_ids` are the new ones only. The finish reason is error where the model's output was
    not finite: its weights are broken (see `check`), or its dtype is too narrow.
    """

    prompt: str | list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    prompt_tokens: int = 0  # how many the prompt has
    sample: int = 0  # which of the prompt's `n` results
    logprobs: list[TokenLogprobs] | None = None


class Request:
    """A request in progress: what the ranks compute for it, and the text of its tokens."""

    def __init__(
        self,
        index: int,
        prompt: str | list[int],
        tokens: list[int],
        limit: int,
        params: SamplingParams,
        text: Text | None,
        sample: int = 0,
    ) -> None:
        """`sample`: which of the prompt's results. The first has the seed that was given, the others have their own."""
        self.index = index
        self.prompt = prompt
        self.tokens = tuple(tokens)  # the prompt's
        self.limit = limit  # new tokens, at most
        # a seed is drawn here and not by the ranks, which must all draw the same tokens
        seed = secrets.randbits(63) if params.seed is None else (params.seed + sample * _NEXT_SEED) % 2**63
        self.params = replace(params, seed=seed)
        self.text = text
        self.sample = sample
        self.new: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.finish_reason: str | None = None

    def add(self, token: int | None, finish_reason: str | None, logprobs: TokenLogprobs | None = None) -> Chunk:
        """Append a token that the ranks have computed."""
        new = () if token is None else (token,)
        self.new += new
        piece = "".join(map(self.text.add, new)) if self.text else None
        self.finish_reason = "stop" if self.text and self.text.stopped else finish_reason
        if self.text and self.finish_reason:
            piece = (piece or "") + self.text.finish()
        known = None if self.logprobs is None or logprobs is None else (logprobs,)
        if self.logprobs is not None and known is not None:
            self.logprobs += known
        return Chunk(self.index, new, piece, self.finish_reason, known)

    def result(self) -> Result:
        """Of a finished request."""
        assert self.finish_reason is not None
        text = self.text.text if self.text else None
        return Result(self.prompt, self.new, text, self.finish_reason, len(self.tokens), self.sample, self.logprobs)
