"""Errors with a message for the user: the command line prints it and exits. And the nearest known name."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

ALIKE = 0.6  # the share of letters that two names must have in common for one to be meant by the other
LONGEST = 1500  # characters of a message: what is wrong may be a value of any length


class LadderError(ValueError):
    """Bad input. The text names what was wrong, the value, and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(text if len(text) <= LONGEST else f"{text[: LONGEST - 500]} ... {text[-400:]}")


class RankError(RuntimeError):
    """A rank failed while it worked, and all were stopped. The text names it."""


def nearest(given: int, known: Iterable[int]) -> int:
    """The known number that is nearest to the one given."""
    return min(known, key=lambda number: (abs(number - given), number))


def hint(given: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the known one that was probably meant, or nothing."""
    names = {name.lower(): name for name in known}
    begun = [name for name in names if given and name.startswith(given.lower())]
    found = begun or get_close_matches(given.lower(), list(names), n=1, cutoff=ALIKE)
    return f"; the nearest is {names[found[0]]!r}" if found else ""


def check_known(what: str, given: str, known: Collection[str]) -> None:
    """Refuse a name that nothing has."""
    if given not in known:
        raise LadderError(f"unknown {what} {given!r}: known are {', '.join(known)}{hint(given, known)}")
