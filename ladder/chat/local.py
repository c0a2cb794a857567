"""A local model as the partner of a conversation: by its chat template, or as a continuation of the text."""

from collections.abc import Iterator, Sequence
from typing import Any

from ladder.chat.partner import Message, continued
from ladder.engine.llm import LLM
from ladder.engine.options import SamplingParams
from ladder.engine.setup import Setup
from ladder.engine.text import encode, encode_chat
from ladder.errors import LadderError
from ladder.hub import name_of

NO_TEMPLATE = "this model has no chat template: it continues the text, yours and its own"


class LocalPartner:
    """Runs the engine. A step of it must not be interrupted, so an answer is ended between two pieces."""

    waits_safely = False

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm, self._params, setup = llm, params, llm.setup
        self._tokenizer = check(setup)
        self._context = setup.config.context
        self._templated = self._tokenizer.chat_template is not None
        self.name = name_of(setup.options.model)
        self.notes = [] if self._templated else [NO_TEMPLATE]

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        tokens = self._fitting(messages)
        for chunk in self._llm.stream([tokens], self._params):
            if chunk.finish_reason == "error":
                raise LadderError("the model's output is not finite: try --check for its weights, or a wider --dtype")
            yield chunk.text or ""

    def _fitting(self, messages: Sequence[Message]) -> list[int]:
        """The prompt's tokens. Where the context is too short, the oldest turns are left out; an answer has room for a
        quarter of the context, or for as much as it may be long.
        """
        room = self._context - min(self._params.max_new_tokens, max(1, self._context // 4))
        if not self._templated:
            return encode(self._tokenizer, continued(messages))[-room:]
        left = list(messages)
        while len(tokens := encode_chat(self._tokenizer, [each._asdict() for each in left])) > room:
            first = next((at for at, message in enumerate(left) if message.role != "system"), len(left))
            if len(left) - first < 2:
                raise LadderError(f"the message has {len(tokens)} tokens, the model's context is {self._context}")
            del left[first : first + 2]  # a question and its answer
        return tokens


def check(setup: Setup) -> Any:
    """The tokenizer, which a conversation needs."""
    if setup.tokenizer is None:
        raise LadderError(f"{setup.options.model} has no tokenizer: a conversation needs one")
    return setup.tokenizer
