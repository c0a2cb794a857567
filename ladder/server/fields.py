"""The fields of a body: each is read with its type, and what nobody has read is refused by name."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from ladder.errors import hint
from ladder.server.errors import ApiError, refused

SHOWN = 60  # characters of a wrong value that an error quotes


class Fields:
    """A JSON object. A field that is null is as one that is not there."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        """`where`: the path of the object in the body, as in messages[0]."""
        self._values = values
        self._where = where
        self._known: set[str] = set()

    def path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def get(self, name: str) -> Any:
        self._known.add(name)
        return self._values.get(name)

    def wrong(self, name: str, wanted: str) -> ApiError:
        value = repr(self._values.get(name))
        value = value if len(value) <= SHOWN else value[:SHOWN] + "..."
        return refused(f"{self.path(name)} must be {wanted}, not {value}", self.path(name), "invalid_value")

    def integer(self, name: str, least: int = -(2**63), most: int = 2**63 - 1) -> int | None:
        value = self.get(name)
        if isinstance(value, float) and value.is_integer():  # JSON has one kind of number
            value = int(value)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.wrong(name, "a whole number")
        if value is not None and not least <= value <= most:
            raise self.wrong(name, f"from {least} to {most}")
        return value

    def number(self, name: str) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e30 or math.isnan(value):
            raise self.wrong(name, "a number")
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return bool(value)

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """One text, or a list of at most so many."""
        value = self.get(name)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(text, str) for text in values) or len(values) > most:
            raise self.wrong(name, f"a text or a list of at most {most} texts")
        return tuple(values)

    def object(self, name: str) -> "Fields | None":
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, self.path(name))

    def ignore(self, names: Collection[str]) -> None:
        """Fields that change no result."""
        self._known.update(names)

    def refuse(self, neutral: Mapping[str, Collection[Any]]) -> None:
        """Fields that are not supported, by name; with values that ask for nothing they are accepted."""
        for name, harmless in neutral.items():
            value = self.get(name)
            if value is not None and not any(value == other and type(value) is type(other) for other in harmless):
                raise refused(f"{self.path(name)} is not supported", self.path(name), "unsupported_parameter")

    def end(self) -> None:
        """Nothing else may be there."""
        for name in self._values:
            if name not in self._known:
                meant = hint(name, sorted(self._known)) if len(name) < SHOWN else ""
                raise refused(f"unknown field {self.path(name)[:200]!r}{meant}", self.path(name), "unknown_parameter")
