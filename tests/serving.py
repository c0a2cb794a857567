"""Servers inside a test, and an executor without a model: its tokens follow from the prompt, its pace from the test."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ladder.engine.async_llm import AsyncLLM
from ladder.engine.executors.multi_process import MultiProcessExecutor
from ladder.engine.frontend.supervisor import Restarts
from ladder.engine.model_runner import AbortSequence, AddSequence, Command, NewToken
from ladder.engine.options import EngineOptions
from ladder.engine.requests import TokenLogprobs
from ladder.engine.scheduler import SequenceSpec
from ladder.engine.setup import Setup
from ladder.server.options import ServerOptions
from ladder.server.run import bind, make_server, url_of


def scripted_tokens(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """What a `Scripted` executor says to a prompt: letters."""
    return [97 - 33 + (sum(prompt) + seed + 7 * number) % 26 for number in range(count)]


@dataclass
class Scripted:
    """An executor that computes nothing. `fails`: in which of its polls, and how; `drift`: other tokens."""

    slots: int = 16
    pace: float = 0.0  # seconds of a step
    fails: tuple[int, Exception] | None = None
    drift: int = 0
    running: dict[int, tuple[SequenceSpec, int]] = field(default_factory=dict)
    seen: list[int] = field(default_factory=list)  # how many sequences each step had
    closed: bool = False
    error: Exception | None = None
    room: int = 1 << 40

    def __post_init__(self) -> None:
        self._commands: list[Command] = []
        self._lock = threading.Lock()

    @property
    def free_slots(self) -> int:
        self._apply()
        return self.slots - len(self.running)

    def send(self, commands: Sequence[Command]) -> None:
        if self.error is not None:
            raise self.error
        with self._lock:
            self._commands += commands

    def _apply(self) -> None:
        with self._lock:
            commands, self._commands = self._commands, []
        for command in commands:
            if isinstance(command, AddSequence):
                self.running[command.spec.id] = (command.spec, 0)
            elif isinstance(command, AbortSequence):
                self.running.pop(command.id, None)

    def poll(self) -> list[NewToken]:
        self._apply()
        time.sleep(self.pace)
        if self.fails is not None and len(self.seen) >= self.fails[0]:
            self.error = self.fails[1]
            raise self.error
        now = list(self.running.items())[: self.slots]
        if now:
            self.seen.append(len(now))
        return [self._next(id, spec, done) for id, (spec, done) in now]

    def _next(self, id: int, spec: SequenceSpec, done: int) -> NewToken:
        token = scripted_tokens(spec.tokens, done + 1, self.drift)[-1]
        last = done + 1 == spec.limit
        if last:
            del self.running[id]
        else:
            self.running[id] = (spec, done + 1)
        top = spec.params.logprobs
        known = None
        if top is not None:
            known = TokenLogprobs(token, -0.5, tuple((token + other, -0.5 - other) for other in range(top)))
        return NewToken(id, token, "length" if last else None, known)

    def close(self) -> None:
        self.closed = True


def setup_of(model: Path, **options: Any) -> Setup:
    return Setup(EngineOptions(model, **options))


@dataclass(frozen=True)
class Listening:
    """A server in a thread of this process."""

    url: str
    llm: AsyncLLM

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@contextmanager
def listening(
    setup: Setup, start: Callable[[], Any] | None = None, restarts: Restarts | None = None, **options: Any
) -> Iterator[Listening]:
    """`start`: makes the executor; default: a process for each rank."""
    given = ServerOptions(**{"port": 0, "served_model_name": "tiny", "grace": 5.0, **options})
    make = (lambda _: start()) if start is not None else (lambda report: MultiProcessExecutor(setup, report))
    llm = AsyncLLM.over(setup, make, restarts)
    try:
        listener = bind(given)
        listener.listen()
        server = make_server(llm, "tiny", given)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            yield Listening(url_of(listener), llm)
        finally:
            server.should_exit = True
            thread.join(30.0)
            listener.close()
            assert not thread.is_alive()
    finally:
        llm.close()


def wait_for(condition: Callable[[], bool], limit: float = 10.0) -> None:
    """Until it holds."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
