"""Where a conversation is read from and written to: a terminal, or pipes with one line per turn."""

import re
import sys
from contextlib import suppress
from importlib import import_module
from typing import TextIO

import typer

from ladder.errors import LadderError

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model's text must not steer a terminal
PROMPT = "> "


class Terminal:
    """Standard input and output. What is not part of the conversation goes to standard error."""

    def __init__(self, source: TextIO | None = None) -> None:
        self._source = sys.stdin if source is None else source
        self.interactive = self._source.isatty() and sys.stdout.isatty()
        if self.interactive:
            # where it is there, `input` can edit a line and knows earlier ones
            with suppress(ImportError):
                import_module("readline")

    def read(self) -> str | None:
        """The next line; None at the end of the input."""
        if self.interactive:
            try:
                return input(PROMPT)
            except EOFError:
                typer.echo()
                return None
        try:
            line = self._source.readline()
        except UnicodeDecodeError:
            raise LadderError("standard input is not valid UTF-8") from None
        return line.rstrip("\r\n") if line else None

    def write(self, text: str) -> None:
        """A part of an answer, at once."""
        typer.echo(_CONTROL.sub("", text) if self.interactive else text, nl=False)
        sys.stdout.flush()

    def say(self, text: str) -> None:
        """Something about the conversation."""
        typer.echo(typer.style(text, dim=True) if self.interactive else text, err=True)
