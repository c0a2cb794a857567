"""The engine on emulated ranks: any degree at the price of threads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ladder import LLM
from ladder.comm.emulated import World
from ladder.engine.core import Command, Token
from ladder.engine.options import EngineOptions
from ladder.engine.rank import make_core
from ladder.engine.requests import Opened


class Threads:
    """An executor whose ranks are threads; they must come to the same tokens."""

    def __init__(self, opened: Opened) -> None:
        self._world = World(opened.options.tp)
        self._told: list[Command] = []
        self._cores = self._world.run(lambda comm: make_core(opened, comm, opened.device, None))

    @property
    def free_slots(self) -> int:
        self._hear()
        return self._cores[0].free_slots

    def tell(self, commands: Sequence[Command]) -> None:
        self._told += commands

    def _hear(self) -> None:
        told, self._told = self._told, []
        for core in self._cores:
            core.tell(told)

    def poll(self) -> list[Token]:
        self._hear()
        first, *others = self._world.run(lambda comm: self._cores[comm.rank].step())
        assert all(other == first for other in others)
        return first

    def close(self) -> None:
        self._world.close()


@contextmanager
def threaded(model: Path, **options: Any) -> Iterator[LLM]:
    """`LLM(model, **options)`, its ranks emulated."""
    opened = Opened(EngineOptions(model, **options))
    with LLM.over(opened, Threads(opened)) as llm:
        yield llm
