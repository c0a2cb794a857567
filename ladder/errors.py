"""Errors with a message for the user: the command line prints it and exits. And what messages name: the nearest known
name, and the line that installs what is missing.
"""

import re
import shlex
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, requires

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


def install(extra: str) -> str:
    """What to type for the packages of an extra; this package itself need not be on any index."""
    return "pip install " + " ".join(shlex.quote(package) for package in packages(extra))


def packages(extra: str) -> list[str]:
    """The packages of an extra with their oldest versions, by the metadata of this package; where that says nothing of
    them, the extra of a checkout.
    """
    try:
        lines = requires("ladder-residual") or []
    except PackageNotFoundError:  # run from a checkout that was not installed
        lines = []
    of_extra = re.compile(rf"""extra == ["']{re.escape(extra)}["']""")
    return [line.split(";")[0].strip() for line in lines if of_extra.search(line)] or [f".[{extra}]"]
