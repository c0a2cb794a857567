"""Values of lines, checked: each is of its type, and no text can do harm. No torch here."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_args, get_type_hints

from ladder.errors import LadderError

LARGEST = 1e15  # a number beyond it is a mistake, in every unit there is here

Kind = TypeVar("Kind")


def filled(kind: type[Kind], given: Mapping[str, Any], where: str) -> Kind:
    """A dataclass from the keys of a line, each of them checked; keys that it does not have are left out."""
    values: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for field in fields(kind):  # type: ignore[arg-type]
        if given.get(field.name) is None:
            if field.default is MISSING:
                raise LadderError(f"{where}: the key {field.name!r} is missing")
            continue
        hint = hints[field.name]
        values[field.name] = checked(given[field.name], (get_args(hint) or (hint,))[0], field.name, where)
    return kind(**values)


def checked(value: Any, kind: type, name: str, where: str) -> Any:
    """A value of a line, as what it must be."""
    if kind is str:
        if isinstance(value, str):
            return harmless_text(value)
        raise LadderError(f"{where}: {name} must be a text, not {short(repr(value))}")
    lowest = -LARGEST if name == "hidden" else 0  # more may be exposed than communication took, by noise
    number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if not number or not lowest <= value <= LARGEST:
        what = "a whole number" if kind is int else "a number"
        raise LadderError(f"{where}: {name} must be {what} of at least 0, not {short(repr(value))}")
    return value if kind is int else float(value)


def harmless_text(text: str) -> str:
    """What every font and every file can hold: no control characters, no halves of a character."""
    whole = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in whole)


def short(text: str) -> str:
    """For an error."""
    return text if len(text) <= 60 else f"{text[:57]}..."
