"""The engine on emulated ranks: any degree at the price of threads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ladder import LLM
from ladder.comm.emulated import World
from ladder.engine.executors.worker import make_model_runner
from ladder.engine.model_runner import Command, NewToken
from ladder.engine.options import EngineOptions
from ladder.engine.setup import Setup


class Threads:
    """An executor whose ranks are threads; they must come to the same tokens."""

    def __init__(self, setup: Setup) -> None:
        self._world = World(setup.options.tp)
        self._commands: list[Command] = []
        self._runners = self._world.run(lambda comm: make_model_runner(setup, comm, setup.device, None))

    room = 1 << 40

    @property
    def free_slots(self) -> int:
        self._apply()
        return self._runners[0].free_slots

    def send(self, commands: Sequence[Command]) -> None:
        self._commands += commands

    def _apply(self) -> None:
        commands, self._commands = self._commands, []
        for runner in self._runners:
            runner.apply(commands)

    def poll(self) -> list[NewToken]:
        self._apply()
        first, *others = self._world.run(lambda comm: self._runners[comm.rank].step())
        assert all(other == first for other in others)
        return first

    def close(self) -> None:
        self._world.close()


@contextmanager
def threaded(model: Path, **options: Any) -> Iterator[LLM]:
    """`LLM(model, **options)`, its ranks emulated."""
    setup = Setup(EngineOptions(model, **options))
    with LLM.over(setup, Threads(setup)) as llm:
        yield llm
