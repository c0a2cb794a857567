"""Log-probabilities of tokens in OpenAI's two formats."""

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ladder.engine.requests import TokenLogprobs

LEAST = -9999.0  # JSON has no infinity


class TokenTexts:
    """Tokens as texts and as bytes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}  # an answer has up to 21 for each of its tokens, mostly the same ones

    def text(self, token: int) -> str:
        if (found := self._known.get(token)) is None:
            kwargs = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
            found = self._known[token] = str(self._tokenizer.decode([token], **kwargs))
        return found

    def bytes(self, token: int) -> list[int] | None:
        """None where a token is a part of a character and its bytes are not known."""
        text = self.text(token)
        if "\ufffd" not in text:
            return list(text.encode("utf-8"))
        found = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", str(self._tokenizer.convert_ids_to_tokens(token)))
        return [int(found[1], 16)] if found else None


def chat_logprobs(texts: TokenTexts, logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
    """`logprobs` of a chat's choice."""
    if logprobs is None:
        return None

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token), "logprob": max(logprob, LEAST), "bytes": texts.bytes(token)}

    content = [
        entry(one.token, one.logprob) | {"top_logprobs": [entry(token, logprob) for token, logprob in one.top]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    texts: TokenTexts, logprobs: Sequence[TokenLogprobs] | None, offset: int = 0
) -> dict[str, Any] | None:
    """`logprobs` of a completion's choice; `offset`: characters of the text before these tokens."""
    if logprobs is None:
        return None
    tokens = [texts.text(one.token) for one in logprobs]
    *offsets, _ = accumulate(map(len, tokens), initial=offset)
    return {
        "tokens": tokens,
        "token_logprobs": [max(one.logprob, LEAST) for one in logprobs],
        "top_logprobs": [_by_text(texts, one.top) if one.top else None for one in logprobs],
        "text_offset": offsets,
    }


def _by_text(texts: TokenTexts, top: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Of tokens that have the same text (parts of characters), the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in top:
        found.setdefault(texts.text(token), max(logprob, LEAST))
    return found
