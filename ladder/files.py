"""New folders; atomic writing: a file appears under its name only when it is complete; lines that are appended.

Of whatever a verb writes, a file or a folder, the folders above it are made where they are missing. What cannot be
written is refused before the work.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ladder.errors import LadderError

PICTURES = (".png", ".svg", ".pdf")  # endings of pictures that are written
# what safetensors and torch.save say where the system refuses a write
_IO_ERRORS = ("os error", "I/O error", "PytorchStreamWriter", "file write failed", "unexpected pos", "No space left")


def check_new(out: Path) -> None:
    """Refuse a folder that is something already, or that cannot be made."""
    writable(out)
    writable(out.absolute().parent)  # it is made beside, and renamed
    if out.exists() and any(out.iterdir()):
        raise LadderError(f"{out} is there already: name a new folder")


@contextmanager
def new_folder(out: Path, suffix: str = ".partial") -> Iterator[Path]:
    """A folder beside `out` that is gone afterwards, unless it was given another name."""
    folder = out.with_name(out.name + suffix)
    if folder.exists():
        raise LadderError(f"{folder} is there already, left by a run that was killed or is still at work: remove it")
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def writable(folder: Path) -> Path:
    """The nearest folder that exists, itself or one above; refused where nothing can be made in it."""
    path = folder.absolute()
    while not path.exists():
        path = path.parent
    if not path.is_dir():
        raise LadderError(f"{folder} cannot be made: {path} is a file")
    if not os.access(path, os.W_OK | os.X_OK):
        raise LadderError(f"{folder} cannot be written: nothing can be made in {path}")
    return path


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """A path beside `file` to write to. When the block ends, what was written there is flushed to the disk and becomes
    `file`; when it fails, `file` is what it was before.
    """
    partial = file.with_name(f"{file.name}.partial")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        with partial.open("rb") as opened:
            os.fsync(opened.fileno())
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def write_bytes(file: Path, content: bytes) -> None:
    """Write a file: all of it, or what was there before."""
    with replaced(file) as partial:
        partial.write_bytes(content)


def write_text(file: Path, text: str) -> None:
    """Write a file, as UTF-8: all of it, or what was there before."""
    with replaced(file) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(file: Path, value: Any) -> None:
    """The same of a JSON value, indented, its keys sorted."""
    write_text(file, json.dumps(value, indent=2, sort_keys=True) + "\n")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """While the block runs no other process has this file or folder locked; refused where one has. The lock ends with
    its process, however that ends. File systems without locks have none.
    """
    opened = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LadderError(
                    f"{path} is being written by another process: wait until it has ended, or name another"
                ) from None
        yield
    finally:
        os.close(opened)


def check_unlocked(path: Path) -> None:
    """Refuse what another process writes at this moment."""
    if path.exists():
        with locked(path):
            pass


def check_folder(out: Path) -> None:
    """Refuse a folder that files cannot be written into; it may be there already."""
    if out.exists() and not out.is_dir():
        raise LadderError(f"{out} is a file: name a folder")
    writable(out)


def check_file(file: Path, *endings: str) -> None:
    """Refuse a file that cannot be written as a whole, or that has none of the `endings`, where there are any."""
    if endings and file.suffix.lower() not in endings:
        raise LadderError(f"{file} must end in {', '.join(endings[:-1])} or {endings[-1]}")
    if file.is_dir():
        raise LadderError(f"{file} is a directory: name a file")
    check_appendable(file)
    writable(file.absolute().parent)  # it is made beside, and renamed


def check_appendable(file: Path) -> None:
    """Refuse a file that lines cannot be appended to, before there are any."""
    if file.is_dir():
        raise LadderError(f"{file} is a directory: name a file, as in {file / 'lines.jsonl'}")
    if not file.exists():
        writable(file.absolute().parent)
    elif not os.access(file, os.W_OK):
        raise LadderError(f"{file} cannot be written")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Where files of a library's are written below `folder`: a full disk is an OSError that says so, whatever error
    that library has for it.
    """
    try:
        yield
    except (LadderError, OSError):
        raise
    except Exception as error:
        text = str(error)
        if not any(sign in text for sign in _IO_ERRORS):
            raise
        raise OSError(f"{folder} cannot be written, the disk may be full: {text.splitlines()[0]}") from None


class LineFile:
    """A file that JSON lines are appended to."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a line, for good: it is on the disk when this returns."""
        with self.opened() as write:
            write(row)

    @contextmanager
    def opened(self) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """A function that appends a line. Each is in the file when it returns, and on the disk when the block ends."""
        self._out.parent.mkdir(parents=True, exist_ok=True)
        with self._out.open("a+b") as file:
            self._mend(file)

            def write(row: Mapping[str, Any]) -> None:
                file.write(json.dumps(row).encode() + b"\n")
                file.flush()

            try:
                yield write
            finally:
                os.fsync(file.fileno())

    @staticmethod
    def _mend(file: Any) -> None:
        """A last line that has no end is ended, or, where it is torn, removed."""
        file.seek(0)
        start = file.read().rfind(b"\n") + 1
        file.seek(start)
        last = file.read()
        try:
            if last:
                json.loads(last)
                file.write(b"\n")
        except ValueError:
            file.truncate(start)
