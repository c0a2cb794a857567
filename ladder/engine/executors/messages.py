"""Commands as bytes between ranks: a fixed format, so that what is received can become nothing but commands.

A message is a sequence of frames. A frame is a number that stands for the kind of command, two lengths, a JSON object
with the command's fields, and the prompt's tokens as 32-bit numbers. Field names, types and lengths must all fit.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from ladder.engine.model_runner import AbortSequence, AddSequence, Command, ReadLong, Shutdown
from ladder.engine.options import SamplingParams
from ladder.engine.scheduler import SequenceSpec
from ladder.errors import LadderError
from ladder.options import check_types

T = TypeVar("T")
VERSION = 3  # of the format, which ranks compare before they read a message
MOST_BYTES = 1 << 24  # that are sent at once; a longer message goes in several pieces
KINDS: dict[int, type[Command]] = {1: AddSequence, 2: AbortSequence, 3: Shutdown, 4: ReadLong}
_FRAME = struct.Struct("<III")  # kind, bytes of JSON, number of tokens


def encode(commands: Sequence[Command]) -> bytes:
    """Commands as one message."""
    return b"".join(map(_frame, commands))


def decode(message: bytes) -> list[Command]:
    """The commands of a message; refuses one that is not exactly what `encode` makes."""
    commands: list[Command] = []
    begin = 0
    while begin < len(message):
        if len(message) - begin < _FRAME.size:
            raise _refused("it ends within a frame")
        kind, size, count = _FRAME.unpack_from(message, begin)
        tokens_begin = begin + _FRAME.size + size
        end = tokens_begin + 4 * count
        if end > len(message):
            raise _refused("it is shorter than its lengths say")
        values = _values(message[begin + _FRAME.size : tokens_begin])
        commands.append(_command(kind, values, struct.unpack_from(f"<{count}I", message, tokens_begin)))
        begin = end
    return commands


def _frame(command: Command) -> bytes:
    kind = next(kind for kind, known in KINDS.items() if type(command) is known)
    tokens: tuple[int, ...] = ()
    values: dict[str, Any] = {}
    match command:
        case AddSequence(spec):
            tokens, values = spec.tokens, _fields(spec)
            del values["tokens"]
            values["params"] = _fields(spec.params)
        case AbortSequence():
            values = _fields(command)
    text = json.dumps(values, allow_nan=False).encode()
    return _FRAME.pack(kind, len(text), len(tokens)) + text + struct.pack(f"<{len(tokens)}I", *tokens)


def _fields(item: Any) -> dict[str, Any]:
    return {entry.name: getattr(item, entry.name) for entry in fields(item)}


def _values(text: bytes) -> dict[str, Any]:
    try:
        values = json.loads(text.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise _refused("its fields are not JSON") from None
    if not isinstance(values, dict):
        raise _refused("its fields are not a JSON object")
    return values


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _command(kind: int, values: dict[str, Any], tokens: tuple[int, ...]) -> Command:
    if KINDS.get(kind) is AddSequence:
        params = values.pop("params", None)
        if not isinstance(params, dict):
            raise _refused("a sequence has no sampling parameters")
        made = _made(SamplingParams, params)
        return AddSequence(_made(SequenceSpec, {**values, "tokens": tokens, "params": made}))
    if tokens:
        raise _refused("it has tokens that belong to no sequence")
    if kind in KINDS:
        return _made(KINDS[kind], values)
    raise _refused(f"there is no command of kind {kind}")


def _made(kind: type[T], values: dict[str, Any]) -> T:
    """An instance of a dataclass from a value for each of its fields, of the declared types."""
    if wrong := values.keys() ^ {entry.name for entry in fields(kind)}:  # type: ignore[arg-type]
        raise _refused(f"{min(wrong)[:40]!r} is missing or is no field of {kind.__name__}")
    try:
        made = kind(**{name: _tuples(value) for name, value in values.items()})
        check_types(made)
    except (LadderError, TypeError) as error:
        raise _refused(str(error)[:200]) from None
    return made


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _refused(why: str) -> LadderError:
    return LadderError(f"a message between ranks is refused: {why}; all ranks must run the same version of ladder")
