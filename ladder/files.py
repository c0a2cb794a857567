"""Folders that must be new, and files that appear under their names only when they are whole."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ladder.errors import LadderError


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
