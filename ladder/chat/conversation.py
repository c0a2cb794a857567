"""A conversation: lines of the user, commands among them, and streamed answers."""

import re
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from types import FrameType

from ladder.chat.partner import Message, Partner
from ladder.chat.terminal import Terminal
from ladder.client.endpoint import EndpointError
from ladder.errors import LadderError

COMMANDS = {"/help": "show this", "/reset": "begin a new conversation", "/quit": "leave; so does Ctrl-D"}


class Conversation:
    """Ctrl-C ends an answer, and what came of it stays. Twice without a line between, it leaves."""

    def __init__(self, partner: Partner, terminal: Terminal, system: str | None = None) -> None:
        self._partner, self._terminal = partner, terminal
        self._first = [] if system is None else [Message("system", system)]
        self.messages = list(self._first)

    def run(self) -> None:
        """Until the user leaves, or the input ends."""
        if self._terminal.interactive:
            self._terminal.say(f"{self._partner.name}: /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves")
        self._tell_notes()
        stopped = False  # by Ctrl-C, and nothing was typed since
        while True:
            try:
                line = self._terminal.read()
            except KeyboardInterrupt:
                if stopped or not self._terminal.interactive:
                    raise
                stopped = True
                self._terminal.say("\nCtrl-C again, or Ctrl-D, leaves")
                continue
            if line is None or line.strip() == "/quit":
                return
            stopped = False
            if re.fullmatch(r"/[a-z]+", line.strip()):
                self._command(line.strip())
            elif line.strip():
                stopped = self._turn(line)

    def _command(self, name: str) -> None:
        if name == "/reset":
            self.messages = list(self._first)
            self._terminal.say("a new conversation")
        elif name == "/help":
            self._terminal.say("\n".join(f"{command:8}{words}" for command, words in COMMANDS.items()))
        else:
            self._terminal.say(f"unknown command {name}: known are {', '.join(COMMANDS)}")

    def _turn(self, text: str) -> bool:
        """One question and its answer; whether Ctrl-C ended it."""
        pieces: list[str] = []
        before = len(self.messages)
        try:
            check_text(text)
            self.messages.append(Message("user", text))
            stopped = self._answer(pieces)
        except (EndpointError, LadderError) as error:
            if not self._terminal.interactive:
                raise
            del self.messages[before:]
            self._terminal.say(str(error))
            return False
        if stopped and not self._terminal.interactive:
            raise KeyboardInterrupt
        self.messages.append(Message("assistant", "".join(pieces)))
        self._terminal.write("\n")
        if stopped:
            self._terminal.say("stopped; Ctrl-C again leaves")
        return stopped

    def _answer(self, pieces: list[str]) -> bool:
        with interrupts(self._partner.waits_safely) as interrupted, closing(self._pieces()) as answer:
            try:
                for piece in answer:
                    self._tell_notes()
                    pieces.append(piece)
                    self._terminal.write(piece)
                    if interrupted():
                        return True
            except KeyboardInterrupt:
                if not self._partner.waits_safely:
                    raise
                return True
        return False

    def _pieces(self) -> Generator[str, None, None]:
        """A generator, which can be closed."""
        yield from self._partner.answer(self.messages)

    def _tell_notes(self) -> None:
        while self._partner.notes:
            self._terminal.say(self._partner.notes.pop(0))


def check_text(text: str) -> None:
    """A terminal can give bytes that are no characters."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise LadderError("this line is not valid UTF-8") from None


@contextmanager
def interrupts(at_once: bool) -> Iterator[Callable[[], bool]]:
    """What Ctrl-C does meanwhile: `at_once` it raises KeyboardInterrupt, as always; otherwise the first is only noted
    in the function given here, and the second raises.
    """
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    if at_once or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
