"""Options as dataclass fields: the command line is generated from them, and every value is of its type."""

from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ladder.errors import LadderError


def option(default: Any, help: str) -> Any:
    """A dataclass field that is also a command-line option."""
    return field(default=default, metadata={"help": help})


def required(help: str) -> Any:
    """The same without a default: it must be given."""
    return field(metadata={"help": help})


def keyword(default: Any) -> Any:
    """A dataclass field that the command line does not have."""
    return field(default=default, metadata={"keyword": True})


def argument(help: str) -> Any:
    """A dataclass field that is given on the command line without a name."""
    return field(metadata={"help": help, "argument": True})


def refuse_renamed(given: Iterable[str], renamed: Mapping[str, str]) -> None:
    """Refuse a name of an earlier version, with the present one named. `renamed`: old name to new name."""
    for name in given:
        if name in renamed:
            raise LadderError(f"{name} was renamed: use {renamed[name]}")


def check_types(options: Any) -> None:
    """Every field of a dataclass is of the type it was declared with."""
    hints = get_type_hints(type(options))
    for name, hint in ((entry.name, hints[entry.name]) for entry in fields(options)):
        value = getattr(options, name)
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if not any(_is(value, kind) for kind in kinds):
            wanted = " or ".join("None" if kind is NoneType else getattr(kind, "__name__", str(kind)) for kind in kinds)
            raise LadderError(f"{name} must be {wanted}, not {value!r}")


def _is(value: Any, kind: Any) -> bool:
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            return False
        parts = get_args(kind)
        parts = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(value) == len(parts) and all(_is(one, part) for one, part in zip(value, parts, strict=True))
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def check_least(options: Any, **least: int) -> None:
    """These fields, where they have a value, are at least so large."""
    for name, smallest in least.items():
        if (value := getattr(options, name)) is not None and value < smallest:
            raise LadderError(f"{name.replace('_', '-')} must be at least {smallest}, not {value}")
