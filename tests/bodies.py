"""Bodies of requests with something wrong, drawn from a seed: what a fuzzer sends to a server."""

import json
import random
from copy import deepcopy
from typing import Any

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"model": "tiny", "prompt": "abc", "max_tokens": 3, "temperature": 0.5, "seed": 1, "stop": ["x"]}),
    ("completions", {"prompt": [1, 2, 3], "max_tokens": 2, "n": 2, "logprobs": 1, "logit_bias": {"5": 1}}),
    ("completions", {"prompt": ["a", "b"], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}),
    ("completions", {"prompt": [[1], [2]], "max_tokens": 2, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1}),
    ("chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "logprobs": True}),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_completion_tokens": 2},
    ),
]
VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 10**9, 2**63, -(2**63), 10**30, 0.5, -0.5, 1e308, 1e999]
VALUES += ["", "a", "\ud800", "\x00", "\u202e", "x" * 600, [], [[]], [None], {}, {"": None}, {"a": {"b": []}}, [1, "a"]]
VALUES += ["tiny", "user", "text", [1, 2, 3], ["a"], {"type": "text"}, {"5": 1}, {"-1": 1}]
NAMES = ["n", "stop", "seed", "top_p", "min_tokens", "stop_token_ids", "ignore_eos", "echo", "tools", "best_of", "user"]
NAMES += ["presence_penalty", "frequency_penalty", "top_logprobs", "logit_bias", "stream_options", "response_format"]
NAMES += ["", "\u0000", "__class__", "prompt", "messages", "model", "suffix"]


def mutated(chance: random.Random) -> tuple[str, bytes]:
    """A path below /v1, and a body."""
    path, body = chance.choice(BODIES)
    body = json.loads(json.dumps(body))
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        _change(chance, body)
    text = json.dumps(body, ensure_ascii=chance.random() < 0.9).encode("utf-8", "surrogatepass")
    return (path if chance.random() < 0.95 else chance.choice(BODIES)[0]), _damaged(chance, text)


def _change(chance: random.Random, value: Any) -> None:
    """Somewhere in it."""
    inner = [each for each in (value.values() if isinstance(value, dict) else value) if isinstance(each, dict | list)]
    if inner and chance.random() < 0.5:
        return _change(chance, chance.choice(inner))
    if isinstance(value, dict):
        name = chance.choice([*value, *NAMES]) if chance.random() < 0.8 else str(chance.random())
        if name in value and chance.random() < 0.3:
            del value[name]
        else:
            value[name] = deepcopy(chance.choice(VALUES))
    else:
        value.insert(chance.randint(0, len(value)), deepcopy(chance.choice(VALUES)))


def _damaged(chance: random.Random, text: bytes) -> bytes:
    """Most of the time as it is."""
    if chance.random() < 0.8:
        return text
    where = chance.randrange(len(text))
    noise = bytes(chance.randrange(256) for _ in range(chance.randint(0, 4)))
    return text[:where] + noise + text[where + chance.randint(0, 20) :]
