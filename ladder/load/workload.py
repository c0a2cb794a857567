"""The requests of a run: their lengths, their prompts, and their bodies as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from ladder.config.fields import read_text
from ladder.errors import LadderError
from ladder.load.lengths import LONGEST
from ladder.load.options import LOWEST_ID, REQUESTS, LoadOptions

# short, and one token each in most vocabularies
WORDS = """
the of and to in is that for it was on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did down
only way find use may water long little very after words called just where most know get through back much before go
good new write our used me man too any day same right look think also around another came come work three word must
because does part even place well such here take why things help put years different away again off went old number
great tell men say small every found still between name should home big give
"""


@dataclass(frozen=True)
class Planned:
    """A request to be sent. Its prompt is given, or made up with as many tokens as wanted."""

    max_tokens: int
    prompt_tokens: int | None = None  # wanted; None where the prompt is given without their number
    prompt: str | tuple[int, ...] | None = None
    messages: str | None = None  # as JSON


@dataclass(frozen=True)
class WordRate:
    """How many tokens an endpoint counts for a prompt of words: `base`, and `each` for every word."""

    base: float = 0.0
    each: float = 1.0

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.base) / self.each))


def plan(options: LoadOptions) -> list[Planned]:
    """The requests of each run: the same ones, whatever their arrivals are."""
    random = Random(f"lengths {options.seed}")
    prompts, outputs = options.prompt_lengths, options.output_lengths
    if options.requests_file is None:
        return [Planned(outputs.draw(random), prompts.draw(random)) for _ in range(options.requests or REQUESTS)]
    found = [_planned(raw, where, options, outputs.draw(random)) for where, raw in _objects(options.requests_file)]
    if not found:
        raise LadderError(f"{options.requests_file} has no requests: write one JSON object per line")
    count = options.requests or len(found)
    return [found[number % len(found)] for number in range(count)]  # a short file is begun again


def _objects(path: Path) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            raw = None
        if not isinstance(raw, dict):
            raise LadderError(f"{path} line {number} is not a JSON object")
        found.append((f"{path} line {number}", raw))
    return found


def _planned(raw: dict[str, Any], where: str, options: LoadOptions, drawn: int) -> Planned:
    limit = _count(raw, "max_tokens", where)
    wanted = _count(raw, "prompt_tokens", where)
    prompt, messages = raw.get("prompt"), raw.get("messages")
    if isinstance(prompt, list):
        if not prompt or not all(isinstance(id, int) and not isinstance(id, bool) and id >= 0 for id in prompt):
            raise LadderError(f"{where}: prompt must be a text or a list of token ids")
        if options.api == "chat":
            raise LadderError(f"{where}: the chat API takes no token ids: use --api completions")
        return Planned(limit or drawn, len(prompt), tuple(prompt))
    if messages is not None:
        if options.api != "chat":
            raise LadderError(f"{where}: messages are for the chat API: use --api chat")
        if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages) or not messages:
            raise LadderError(f"{where}: messages must be a list of objects with role and content")
        return Planned(limit or drawn, wanted, messages=json.dumps(messages))
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise LadderError(f"{where}: prompt must be a text or a list of token ids")
    if prompt is None and wanted is None:
        raise LadderError(f"{where} has neither prompt nor messages nor prompt_tokens")
    return Planned(limit or drawn, wanted, prompt)


def _count(raw: dict[str, Any], key: str, where: str) -> int | None:
    value = raw.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LONGEST:
        raise LadderError(f"{where}: {key} must be a whole number from 1 to {LONGEST}, not {value!r}")
    return value


class Bodies:
    """What is posted for each request."""

    def __init__(self, options: LoadOptions, model: str, ids: bool, rate: WordRate) -> None:
        """`ids`: whether prompts that are made up are token ids; otherwise they are words, at `rate`."""
        self._options, self._ids, self._rate = options, ids, rate
        self._words = WORDS.split()
        self._common = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **options.sampling}

    def all(self, planned: Sequence[Planned]) -> list[bytes]:
        return [self.body(one, number) for number, one in enumerate(planned)]

    def body(self, planned: Planned, number: int) -> bytes:
        """The JSON of request `number`. No two made-up prompts begin alike, so that no cache of prefixes helps."""
        raw: dict[str, Any] = {**self._common, "max_tokens": planned.max_tokens}
        if planned.messages is not None:
            return json.dumps({**raw, "messages": json.loads(planned.messages)}).encode()
        prompt: str | Sequence[int] | None = planned.prompt
        if prompt is None:
            assert planned.prompt_tokens is not None
            random = Random(f"prompt {self._options.seed} {number}")
            if self._ids:
                prompt = random.choices(range(LOWEST_ID, self._options.vocab), k=planned.prompt_tokens)
            else:
                prompt = " ".join(random.choices(self._words, k=self._rate.words(planned.prompt_tokens)))
        if self._options.api == "chat":
            return json.dumps({**raw, "messages": [{"role": "user", "content": prompt}]}).encode()
        return json.dumps({**raw, "prompt": prompt}).encode()
