"""Errors with a message for the user: the command line prints it and exits. And the nearest known name."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import TypeVar

Choice = TypeVar("Choice", str, int)


LONGEST = 1500  # characters of a message: what is wrong may be a value of any length


class LadderError(ValueError):
    """Bad input. The text names what was wrong, the value, and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(text if len(text) <= LONGEST else f"{text[: LONGEST - 500]} ... {text[-400:]}")


class RankError(RuntimeError):
    """A rank failed while it worked, and all were stopped. The text names it."""


def nearest(given: Choice, known: Iterable[Choice]) -> Choice:
    """The known choice that is most like the one given: a name by its letters, a number by its distance."""
    if isinstance(given, str):
        return get_close_matches(given, list(known), n=1, cutoff=0.0)[0]
    return min(known, key=lambda number: (abs(number - given), number))


def check_known(what: str, given: str, known: Collection[str]) -> None:
    """Refuse a name that nothing has."""
    if given not in known:
        near = nearest(given, known)
        raise LadderError(f"unknown {what} {given!r}: known are {', '.join(known)}; the nearest is {near!r}")
