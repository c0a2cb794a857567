"""Chats as prompts, by the chat template of the tokenizer."""

from collections.abc import Sequence

from ladder.engine.setup import Setup
from ladder.engine.text import encode_chat
from ladder.errors import LadderError
from ladder.server.errors import refused


def chat_tokens(setup: Setup, messages: Sequence[dict[str, str]]) -> list[int]:
    """The tokens of a chat, up to where the assistant answers."""
    tokenizer = setup.tokenizer
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise refused("this model has no chat template: use /v1/completions", "messages", "no_chat_template")
    try:
        with setup.tokenizing:
            return encode_chat(tokenizer, messages)
    except LadderError as error:
        raise refused(str(error), "messages") from None
