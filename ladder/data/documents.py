"""Documents out of files, streamed: what is in memory at a time does not depend on how much text there is.

    .jsonl             a document a line, under the key `field`
    .parquet           a document a row, in the column `field`
    .json              refused: it does not say what a document is
    any other name     UTF-8 text; two or more empty lines stand between documents, line ends are read as Python does

Around text and lines there may be .xz or .gz. Documents without a visible character are none. A document that is very
long comes in pieces, cut where a line ends if there is such a place.
"""

import codecs
import importlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from ladder.config.fields import UNPACKERS
from ladder.errors import LadderError, install

CHUNK = 1 << 20  # bytes of text that are read at a time
LONGEST = 1 << 18  # characters of a piece
LINE = 1 << 28  # bytes of a line of JSON
SEPARATOR = re.compile(r"\n{3,}")


class Piece(NamedTuple):
    """A document, or a part of one."""

    text: str
    last: bool  # whether the document ends here
    at: int  # bytes of the file, of all files in `documents`, that were read so far


def documents(files: Sequence[Path], field: str = "text") -> Iterator[Piece]:
    """The documents of all files, piece by piece."""
    before = 0
    for file in files:
        kind, empty = _kind(file), True
        for piece in _in_rows(_READERS[kind](file, field)) if kind in _READERS else _in_text(file):
            empty = False
            yield piece._replace(at=before + piece.at)
        if empty:
            raise LadderError(f"{file} has no documents: nothing but empty texts")
        before += file.stat().st_size


def check_files(files: Sequence[Path], field: str) -> None:
    """What can be known of the files before they are read."""
    if not files:
        raise LadderError("no text: name at least one file")
    for file in files:
        if not file.is_file():
            raise LadderError(f"{file} is not a file" if file.exists() else f"no such file: {file}")
        if not file.stat().st_size:
            raise LadderError(f"{file} is empty")
        if _kind(file) == ".json":
            raise LadderError(f"{file} is one JSON value: write a document a line and name it .jsonl, or .txt as it is")
        if _kind(file) == ".parquet":
            _parquet(file, field).close()


def _kind(file: Path) -> str:
    inner = Path(file.name.lower())
    if inner.suffix not in (".xz", ".gz"):
        return inner.suffix
    if Path(inner.stem).suffix == ".parquet":
        raise LadderError(f"{file} is a packed parquet file: unpack it first")
    return Path(inner.stem).suffix


def _in_rows(rows: Iterator[tuple[str, str, int]]) -> Iterator[Piece]:
    for text, where, at in rows:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half a character
            raise LadderError(f"{where} has a text that is no Unicode: {error}") from None
        if text.strip():
            *parts, rest = _cut(text)
            yield from (Piece(part, False, at) for part in parts)
            yield Piece(rest, True, at)


def _in_text(file: Path) -> Iterator[Piece]:
    rest, ends, begun = "", "", False  # of the document under way; line ends that may be part of a separator
    for chunk, at in _characters(file):
        text = rest + ends + chunk
        body = text.rstrip("\n")
        ends = text[len(body) :][:3]
        *whole, rest = SEPARATOR.split(body)
        for document in whole:
            *parts, last = _cut(document)
            if begun or document.strip():
                yield from (Piece(part, False, at) for part in parts)
                yield Piece(last, True, at)
            begun = False
        *parts, rest = _cut(rest)
        yield from (Piece(part, False, at) for part in parts)
        begun = begun or bool(parts)
    rest += ends if len(ends) < 3 else ""
    if begun or rest.strip():
        yield Piece(rest, True, file.stat().st_size)


def _cut(text: str) -> list[str]:
    """Pieces of at most LONGEST characters, up to a line end between two words, else up to any, else up to a space."""
    pieces, begin = [], 0
    while len(text) - begin > LONGEST:
        most = at = begin + LONGEST
        while (at := text.rfind("\n", begin + 1, at)) > 0:
            if not text[at - 1].isspace() and not text[at + 1].isspace():
                break
        at = at + 1 or text.rfind("\n", begin, most) + 1 or max(text.rfind(" ", begin + 1, most), 0) or most
        pieces.append(text[begin:at])
        begin = at
    return [*pieces, text[begin:]]


def _characters(file: Path) -> Iterator[tuple[str, int]]:
    """A file's text, chunk by chunk, and how many of its bytes were read."""
    decoder, lines = codecs.getincrementaldecoder("utf-8")(), io.IncrementalNewlineDecoder(None, translate=True)
    done = 0  # bytes of text before this chunk
    with _opened(file) as (read, at):
        while True:
            chunk = read.read(CHUNK)
            pending = len(decoder.getstate()[0])
            wrong = chunk.find(0)
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                position = done - pending + error.start
                raise LadderError(f"{file} is no UTF-8 text: {error.reason} at byte {position}") from None
            if wrong >= 0:
                raise LadderError(f"{file} is no text: there is a zero at byte {done + wrong}")
            yield lines.decode(text if done else text.removeprefix("\ufeff"), final=not chunk), at()
            done += len(chunk)
            if not chunk:
                return


def _lines(file: Path, field: str) -> Iterator[tuple[str, str, int]]:
    """The texts of a file of JSON lines, where they stand, and how many bytes were read."""
    number = 0
    with _opened(file) as (read, at):
        while line := read.readline(LINE + 1):
            number += 1
            where = f"line {number} of {file}"
            if len(line) > LINE:
                raise LadderError(f"{where} has more than {LINE >> 20} MB: is it a file of JSON lines?")
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise LadderError(f"{where} is no UTF-8 text: {error.reason} at its byte {error.start}") from None
            except (ValueError, RecursionError) as error:
                raise LadderError(f"{where} is no JSON: {error}") from None
            text = row.get(field) if isinstance(row, dict) else None
            if text is not None and not isinstance(text, str):
                kind = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
                raise LadderError(
                    f"{where}: the value of {field!r} is {kind[type(text)]}, not a text: choose another "
                    "key with --field"
                )
            if text is None:
                keys = ", ".join(map(repr, row)) if isinstance(row, dict) else "none"
                raise LadderError(f"{where} has no text {field!r}: its keys are {keys}; choose one with --field")
            yield text, where, at()


def _rows(file: Path, field: str) -> Iterator[tuple[str, str, int]]:
    """The same of a parquet file."""
    table, size, number = _parquet(file, field), file.stat().st_size, 0
    with _readable(file), table:
        for batch in table.iter_batches(batch_size=64, columns=[field], use_threads=False):
            for text in batch.column(0).to_pylist():
                number += 1
                if text is None:
                    raise LadderError(f"row {number} of {file} has no {field!r}")
                yield text, f"row {number} of {file}", size * number // table.metadata.num_rows


_READERS = {".jsonl": _lines, ".parquet": _rows}


def _parquet(file: Path, field: str) -> Any:
    """An open parquet file that has such a column of texts."""
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise LadderError(f"{file} needs pyarrow ({error}): {install('data')}") from None
    with _readable(file):
        table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=CHUNK)  # not a whole row group in memory
    kinds = dict(zip(table.schema_arrow.names, table.schema_arrow.types, strict=True))
    if field not in kinds:
        known = ", ".join(map(repr, kinds))
        raise LadderError(f"{file} has no column {field!r}: its columns are {known}; choose one with --field")
    kind = kinds[field].value_type if arrow.types.is_dictionary(kinds[field]) else kinds[field]
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise LadderError(f"the column {field!r} of {file} is no text, but {kinds[field]}: choose one with --field")
    return table


@contextmanager
def _opened(file: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """A file's bytes, unpacked, and how many of them were read as they lie on the disk."""
    with _readable(file), file.open("rb") as raw, ExitStack() as stack:
        unpack = UNPACKERS.get(file.suffix.lower())
        yield raw if unpack is None else stack.enter_context(unpack(raw)), raw.tell


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except LadderError:
        raise
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError) as error:  # pyarrow's are of the last kind
        raise LadderError(f"{file} cannot be read: {error}") from None
