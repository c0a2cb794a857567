"""Log lines of this package on standard error: which level is shown, and which rank a line comes from.

The package writes to loggers below `ladder` and adds no handler by itself. The command line does, and so does each rank
process, which shows the level that its parent process shows.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ladder.errors import check_known

NAME = "ladder"
LEVELS = ("debug", "info", "warning", "error")


class _Lines(logging.Handler):
    """One line each, on what standard error is at that time."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self.who = who

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = " ".join(record.getMessage().split())
            sys.stderr.write(f"{self.who}: {record.levelname.lower()}: {text}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def level_number(name: str) -> int:
    """A level by its name."""
    name = name.lower()
    check_known("log level", name, LEVELS)
    return logging.getLevelNamesMapping()[name.upper()]


def current_level() -> int:
    """The least level that is shown."""
    return logging.getLogger(NAME).getEffectiveLevel()


@contextmanager
def shown(level: int, who: str = NAME) -> Iterator[None]:
    """Show lines from this level on, while the block runs, in place of what an outer block shows."""
    logger = logging.getLogger(NAME)
    before, outer = logger.level, [handler for handler in logger.handlers if isinstance(handler, _Lines)]
    own = _Lines(who)
    for handler in outer:
        logger.removeHandler(handler)
    logger.addHandler(own)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(own)
        for handler in outer:
            logger.addHandler(handler)
        logger.setLevel(before)


def name_rank(rank: int) -> None:
    """From now on the lines of this process say which rank it is."""
    for handler in logging.getLogger(NAME).handlers:
        if isinstance(handler, _Lines):
            handler.who = f"{NAME} rank {rank}"
