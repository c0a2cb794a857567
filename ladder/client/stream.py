"""An endpoint's streamed answer: server-sent events from bytes, and what each of them holds."""

import json
from dataclasses import dataclass
from typing import Any

from ladder.client.endpoint import EndpointError

LONGEST = 1 << 24  # bytes of one event
_DONE = b"[DONE]"


@dataclass(frozen=True)
class Piece:
    """One event: new text, why the answer ended, and counts of tokens where the endpoint sends them.

    `is_token`: whether it stands for at least one token. An event of the completions API without text does, as long as
    it does not end the answer: the token's characters are not complete yet.
    """

    text: str
    is_token: bool
    finish_reason: str | None
    prompt_tokens: int | None
    output_tokens: int | None


class Events:
    """The data of the events in a stream of bytes. An event of these APIs is one line that begins with `data:`."""

    def __init__(self) -> None:
        self._rest = b""
        self.done = False  # the stream's own end was seen

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are complete with these bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST:
            raise EndpointError("broken stream", f"the stream has a line of more than {LONGEST} bytes")
        found = []
        for line in lines:
            if line.startswith(b"data:"):
                value = line[5:].strip()
                if value == _DONE:
                    self.done = True
                elif value:
                    found.append(value)
        return found


def read_piece(event: bytes) -> Piece:
    """What an event holds, of either API."""
    try:
        raw = json.loads(event)
    except (ValueError, RecursionError):
        raise EndpointError("broken stream", f"the stream has an event that is not JSON: {_shown(event)}") from None
    if not isinstance(raw, dict):
        raise EndpointError("broken stream", f"the stream has an event that is not an object: {_shown(event)}")
    if raw.get("error"):
        raise EndpointError("error in stream", f"the endpoint ended the stream with an error: {_shown(event)}")
    usage = raw.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    counts = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    choices = raw.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return Piece("", False, None, *counts)
    choice = choices[0]
    reason = choice.get("finish_reason")
    reason = reason if isinstance(reason, str) else None
    delta = choice.get("delta")
    if isinstance(delta, dict):
        spoken = [delta.get(key) for key in ("reasoning_content", "content")]
        text = "".join(part for part in spoken if isinstance(part, str))
        return Piece(text, bool(text) or bool(delta.get("tool_calls")), reason, *counts)
    text = choice["text"] if isinstance(choice.get("text"), str) else ""
    return Piece(text, bool(text) or reason is None, reason, *counts)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _shown(event: bytes) -> str:
    text = event.decode("utf-8", "replace")
    return repr(text if len(text) <= 200 else f"{text[:197]}...")
