"""The partner of a conversation: whatever answers messages."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol


class Message(NamedTuple):
    """Of the system, the user or the assistant."""

    role: str
    content: str


class Partner(Protocol):
    """Answers a conversation piece by piece. Closing the iterator ends the answer."""

    name: str
    notes: list[str]  # what the user must know; whoever has told them removes them
    waits_safely: bool  # whether an exception may interrupt it at any point, or only between two pieces

    def answer(self, messages: Sequence[Message]) -> Iterator[str]: ...


def continued(messages: Sequence[Message]) -> str:
    """A conversation as one text that a model without a chat template continues: an answer follows its question
    directly, everything else begins a line.
    """
    return "".join(
        message.content if at == 0 or message.role == "assistant" else f"\n{message.content}"
        for at, message in enumerate(messages)
    )
