"""The answers of both endpoints: whole, and in parts."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from ladder.engine.requests import Chunk, Request
from ladder.server.logprobs import TokenTexts, chat_logprobs, completion_logprobs
from ladder.server.schema import Asked


class Answer(Protocol):
    """How the results of one HTTP request are written."""

    def whole(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Of finished requests."""
        ...

    def first(self, request: Request) -> dict[str, Any] | None:
        """A part that comes before all others of a result, if there is one."""
        ...

    def part(self, request: Request, chunk: Chunk) -> dict[str, Any] | None:
        """None where there is nothing to say yet."""
        ...

    def usage_part(self, requests: Sequence[Request]) -> dict[str, Any]:
        """The last part, where the client wants to know."""
        ...


class _Format(ABC):
    object_whole: str
    object_part: str
    prefix: str

    def __init__(self, model: str, asked: Asked, texts: TokenTexts) -> None:
        self._texts = texts
        self._asked = asked
        self._common = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, requests: Sequence[Request]) -> dict[str, Any]:
        choices = [self._choice(request) for request in requests]
        return {"object": self.object_whole, **self._common, "choices": choices, "usage": usage(requests)}

    def usage_part(self, requests: Sequence[Request]) -> dict[str, Any]:
        return {"object": self.object_part, **self._common, "choices": [], "usage": usage(requests)}

    def _part(self, choice: dict[str, Any]) -> dict[str, Any]:
        part = {"object": self.object_part, **self._common, "choices": [choice]}
        return part | ({"usage": None} if self._asked.include_usage else {})

    @abstractmethod
    def _choice(self, request: Request) -> dict[str, Any]:
        """A finished request."""


class CompletionAnswer(_Format):
    """/v1/completions."""

    object_whole = object_part = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: str, asked: Asked, texts: TokenTexts) -> None:
        super().__init__(model, asked, texts)
        self._offsets: dict[int, int] = {}  # characters of each result's text so far

    def _echo(self, request: Request) -> str:
        if not self._asked.echo:
            return ""
        shown = request.prompt
        return shown if isinstance(shown, str) else "".join(map(self._texts.text, shown))

    def _choice(self, request: Request) -> dict[str, Any]:
        result = request.result()
        logprobs = completion_logprobs(self._texts, result.logprobs)
        return _completion_choice(request, self._echo(request) + (result.text or ""), logprobs, result.finish_reason)

    def first(self, request: Request) -> dict[str, Any] | None:
        echo = self._echo(request)
        return self._part(_completion_choice(request, echo, None, None)) if echo else None

    def part(self, request: Request, chunk: Chunk) -> dict[str, Any] | None:
        if not chunk.text and not chunk.logprobs and chunk.finish_reason is None:
            return None
        offset = self._offsets.get(request.index, 0)
        logprobs = completion_logprobs(self._texts, chunk.logprobs, offset)
        if logprobs is not None:
            self._offsets[request.index] = offset + sum(map(len, logprobs["tokens"]))
        return self._part(_completion_choice(request, chunk.text or "", logprobs, chunk.finish_reason))


def _completion_choice(
    request: Request, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": request.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class ChatAnswer(_Format):
    """/v1/chat/completions."""

    object_whole = "chat.completion"
    object_part = "chat.completion.chunk"
    prefix = "chatcmpl"

    def _choice(self, request: Request) -> dict[str, Any]:
        result = request.result()
        return {
            "index": request.index,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": chat_logprobs(self._texts, result.logprobs),
            "finish_reason": result.finish_reason,
        }

    def first(self, request: Request) -> dict[str, Any] | None:
        return self._delta(request, {"role": "assistant", "content": ""}, None, None)

    def part(self, request: Request, chunk: Chunk) -> dict[str, Any] | None:
        if not chunk.text and not chunk.logprobs and chunk.finish_reason is None:
            return None
        delta = {"content": chunk.text} if chunk.text else {}
        return self._delta(request, delta, chat_logprobs(self._texts, chunk.logprobs), chunk.finish_reason)

    def _delta(
        self, request: Request, delta: dict[str, str], logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        return self._part(
            {"index": request.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        )


def usage(requests: Sequence[Request]) -> dict[str, int]:
    """A prompt is counted once, however many results it has."""
    prompt = sum(len(request.tokens) for request in requests if request.sample == 0)
    new = sum(len(request.new) for request in requests)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def merged(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks of each result as one: a client that is slow gets fewer and longer parts."""
    by_index: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        by_index.setdefault(chunk.index, []).append(chunk)
    return [own[0] if len(own) == 1 else _joined(own) for own in by_index.values()]


def _joined(chunks: list[Chunk]) -> Chunk:
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    logprobs = tuple(one for chunk in chunks for one in chunk.logprobs or ())
    text = "".join(chunk.text or "" for chunk in chunks)
    return Chunk(chunks[0].index, tokens, text, chunks[-1].finish_reason, logprobs or None)
