"""Chats as prompts, by the chat template of the tokenizer."""

from collections.abc import Sequence

from ladder.engine.setup import Setup
from ladder.engine.text import encode
from ladder.server.errors import refused


def chat_tokens(setup: Setup, messages: Sequence[dict[str, str]]) -> list[int]:
    """The tokens of a chat, up to where the assistant answers."""
    tokenizer = setup.tokenizer
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise refused("this model has no chat template: use /v1/completions", "messages", "no_chat_template")
    with setup.tokenizing:
        try:
            text = tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True)
        except Exception as error:  # of Jinja, of the template itself, or whatever it does to its values
            reason = " ".join(str(error).split()) or type(error).__name__
            raise refused(f"the chat template refuses these messages: {reason}", "messages") from None
        return encode(tokenizer, text, special=False)  # the template has written them
