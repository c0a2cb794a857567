"""The bodies of /v1/completions and /v1/chat/completions, as OpenAI and vLLM have them."""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from ladder.engine.options import MOST_LOGPROBS, SamplingParams
from ladder.engine.requests import Prompt
from ladder.errors import LadderError
from ladder.server.errors import ApiError, refused
from ladder.server.fields import Fields

MOST_RESULTS = 128  # of one request
MOST_STOP_TEXTS = 16
TOKENS = 16  # of a completion whose length nobody has given: OpenAI's default
ROLES = ("system", "developer", "user", "assistant")

# fields that change no result here
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
IGNORED |= {"prompt_cache_retention", "prediction", "parallel_tool_calls"}
# fields that are not supported, and their values that ask for nothing
COMPLETION_REFUSED: dict[str, Collection[Any]] = {"suffix": ("",), "best_of": (1,)}
CHAT_REFUSED: dict[str, Collection[Any]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}
Message = dict[str, str]


@dataclass(frozen=True)
class Asked:
    """What a body asks for."""

    model: str | None
    prompts: tuple[Prompt, ...]  # of a completion
    messages: tuple[Message, ...]  # of a chat
    params: SamplingParams
    stream: bool
    include_usage: bool
    echo: bool = False
    fills: bool = False  # nobody has said how long the answer may be: as long as there is room


def completion(body: dict[str, Any], context: int) -> Asked:
    """`context`: the model's."""
    fields = Fields(body)
    prompts = _prompts(fields)
    echo = fields.boolean("echo")
    logprobs = fields.integer("logprobs", 0, MOST_LOGPROBS)
    if echo and logprobs is not None:
        raise refused("echo together with logprobs is not supported", "echo", "unsupported_parameter")
    limit = fields.integer("max_tokens", 1)
    fields.refuse(COMPLETION_REFUSED)
    return _asked(fields, prompts, (), logprobs, min(limit or TOKENS, context), echo)


def chat(body: dict[str, Any], context: int) -> Asked:
    fields = Fields(body)
    messages = _messages(fields)
    top = fields.integer("top_logprobs", 0, MOST_LOGPROBS)
    wanted = fields.boolean("logprobs")
    if top is not None and not wanted:
        raise refused("top_logprobs needs logprobs to be true", "top_logprobs", "invalid_value")
    limits = fields.integer("max_tokens", 1), fields.integer("max_completion_tokens", 1)
    fields.refuse(CHAT_REFUSED)
    limit = min((limit for limit in limits if limit is not None), default=context)
    asked = _asked(fields, (), messages, (top or 0) if wanted else None, min(limit, context))
    return replace(asked, fills=limits == (None, None))


def _asked(
    fields: Fields,
    prompts: tuple[Prompt, ...],
    messages: tuple[Message, ...],
    logprobs: int | None,
    limit: int,
    echo: bool = False,
) -> Asked:
    """The fields that both have. OpenAI's defaults: temperature 1."""
    given: dict[str, Any] = {
        "temperature": fields.number("temperature"),
        "top_p": fields.number("top_p"),
        "min_p": fields.number("min_p"),
        "top_k": fields.integer("top_k"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "seed": fields.integer("seed"),
        "n": fields.integer("n", 1, MOST_RESULTS),
        "min_tokens": fields.integer("min_tokens", 0),
        "stop": fields.texts("stop", MOST_STOP_TEXTS),
        "stop_token_ids": _token_ids(fields, "stop_token_ids"),
        "logit_bias": _logit_bias(fields),
    }
    given = {"temperature": 1.0} | {name: value for name, value in given.items() if value is not None}
    given |= {"ignore_eos": fields.boolean("ignore_eos"), "logprobs": logprobs, "max_new_tokens": limit}
    options, stream = fields.object("stream_options"), fields.boolean("stream")
    if options is not None and not stream:
        raise refused("stream_options needs stream to be true", "stream_options", "invalid_value")
    include_usage = False
    if options is not None:
        include_usage = options.boolean("include_usage")
        options.ignore(("include_obfuscation",))
        options.end()
    model = fields.text("model")
    fields.ignore(IGNORED)
    fields.end()
    for text in given["stop"]:
        if not text or not _is_utf8(text):
            raise refused("stop must not hold an empty text, or half of a character", "stop", "invalid_value")
    try:
        params = SamplingParams(**given)
    except LadderError as error:
        raise bad_input(error) from None
    return Asked(model, prompts, messages, params, stream, include_usage, echo)


def bad_input(error: LadderError) -> ApiError:
    """The engine's sentence; where it begins with a parameter, that one is named, as this API calls it."""
    message = str(error).replace("max_new_tokens", "max_tokens")
    first = re.match(r"[a-z_]+", message)
    param = first[0] if first and first[0] in {*SamplingParams.__dataclass_fields__, "prompt"} else None
    context = "context" in message
    return refused(message, param, "context_length_exceeded" if context else "invalid_value")


def _prompts(fields: Fields) -> tuple[Prompt, ...]:
    value = fields.get("prompt")
    if isinstance(value, str):
        return (value,)
    wrong = fields.wrong("prompt", "a text, a list of texts, a list of token ids, or a list of such lists")
    if not isinstance(value, list) or not value:
        raise wrong
    if all(isinstance(item, str) for item in value) or all(_is_ids(item) for item in value):
        if len(value) > MOST_RESULTS:
            raise fields.wrong("prompt", f"at most {MOST_RESULTS} prompts")
        return tuple(value)
    if not _is_ids(value):
        raise wrong
    return (value,)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(id, int) and not isinstance(id, bool) for id in value)


def _token_ids(fields: Fields, name: str) -> tuple[int, ...] | None:
    value = fields.get(name)
    if value is not None and not _is_ids(value):
        raise fields.wrong(name, "a list of token ids")
    return None if value is None else tuple(value)


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...] | None:
    biases = fields.object("logit_bias")
    if biases is None:
        return None
    found = []
    for name in fields.get("logit_bias"):
        bias = biases.number(name)
        if not re.fullmatch(r"[0-9]{1,9}", name) or bias is None:
            raise fields.wrong("logit_bias", "an object of token ids and numbers")
        found.append((int(name), bias))
    return tuple(found)


def _messages(fields: Fields) -> tuple[Message, ...]:
    value = fields.get("messages")
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise fields.wrong("messages", "a list of messages")
    return tuple(_message(Fields(item, f"messages[{number}]")) for number, item in enumerate(value))


def _message(fields: Fields) -> Message:
    role = fields.text("role")
    if role not in ROLES:
        raise fields.wrong("role", f"one of {', '.join(ROLES)}")
    content = fields.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, fields.path(f"content[{number}]")) for number, part in enumerate(content))
    if not isinstance(content, str):
        raise fields.wrong("content", "a text or a list of parts")
    if not _is_utf8(content):
        raise refused(f"{fields.path('content')} is not valid UTF-8", fields.path("content"), "invalid_value")
    fields.refuse({name: ([],) for name in ("tool_calls", "function_call", "audio", "refusal", "annotations")})
    name = fields.text("name")
    fields.end()
    return {"role": role, "content": content} | ({} if name is None else {"name": name})


def _part(value: Any, where: str) -> str:
    if not isinstance(value, dict):
        raise refused(f"{where} must be an object", where, "invalid_value")
    part = Fields(value, where)
    if part.get("type") != "text":
        raise part.wrong("type", "'text'")
    text = part.text("text")
    part.end()
    if text is None:
        raise part.wrong("text", "a text")
    return text


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
