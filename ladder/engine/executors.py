"""Who carries out the steps: this process alone, or as the first rank of torchrun's world, or processes of our own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch.distributed as dist

from ladder.comm.base import Solo
from ladder.engine.control import Alone, Control, backend, join, leave, own_device, torchrun_world
from ladder.engine.core import Command, Core, Stop, Token
from ladder.engine.options import EngineOptions
from ladder.engine.processes import Processes
from ladder.engine.rank import follow, make_core
from ladder.engine.requests import Opened
from ladder.errors import LadderError, RankError


class Executor(Protocol):
    """Takes commands and gives tokens."""

    @property
    def free_slots(self) -> int:
        """How many slots are free once every command given so far has been heard."""
        ...

    def tell(self, commands: Sequence[Command]) -> None: ...

    def poll(self) -> list[Token]:
        """Wait for the next tokens (there may be none). Called only while jobs are under way."""
        ...

    def close(self) -> None:
        """Stop every rank; a second call does nothing."""
        ...


class Here:
    """This process is the first rank: alone, or of a world whose other ranks `follow`."""

    def __init__(self, core: Core, control: Control) -> None:
        self._core = core
        self._control = control
        self._told: list[Command] = []
        self._early: list[Token] = []  # of steps made for `free_slots`

    @property
    def free_slots(self) -> int:
        if self._told and not self._core.stopped:
            self._early += self._step()
        return self._core.free_slots

    def tell(self, commands: Sequence[Command]) -> None:
        self._told += commands

    def poll(self) -> list[Token]:
        early, self._early = self._early, []
        return early or self._step()

    def _step(self) -> list[Token]:
        if self._core.stopped:
            raise LadderError("a step was broken off in its middle: make a new LLM")
        told, self._told = self._told, []
        with _company():
            try:
                self._core.tell(self._control.share(told))
                return self._core.step() if self._core.busy else []
            except BaseException:
                self._core.tell([Stop()])  # what was half done cannot be gone on with, nor can the others
                raise

    def close(self) -> None:
        if not self._core.stopped:
            self._core.tell([Stop()])
            with _company():
                self._control.share([Stop()])
            leave()


@contextmanager
def _company() -> Iterator[None]:
    """In torchrun's world, a wire that breaks is another rank's end: one sentence instead of a traceback."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        world = torchrun_world()
        if world is None:
            raise  # alone: nobody else's fault
        raise RankError(f"rank {world.rank} lost the others: {' '.join(str(error).split())}") from error


def adopt_world(options: EngineOptions) -> EngineOptions:
    """Under torchrun the number of ranks is its world's."""
    world = torchrun_world()
    if world is None or options.tp == world.size:
        return options
    if options.tp != 1:
        raise LadderError(f"tp is {options.tp}, but torchrun started {world.size} ranks: leave out --tp")
    return replace(options, tp=world.size)


def start(opened: Opened, progress: Callable[[int], None] | None = None) -> Executor:
    """The executor that fits the options and the way this process was started.

    Under torchrun only the first rank returns: the others follow it, and leave the process when it closes. So a
    program that torchrun starts has one LLM.
    """
    world = torchrun_world()
    if world is not None and opened.options.tp > 1:
        device, own_gpu = own_device(opened.device, world.local, world.here)
        with _company():
            comm, control = join(world.rank, world.size, device, own_gpu, opened.options.wire, opened.options.timeout)
        core = make_core(opened, comm, device, progress if world.rank == 0 else None)
        if world.rank == 0:
            return Here(core, control)
        with _company():
            follow(core, control)
        leave()
        raise SystemExit(0)
    if opened.options.tp == 1:
        return Here(make_core(opened, Solo(), opened.device, progress), Alone())
    backend(opened.options.wire, own_device(opened.device, 0, opened.options.tp)[1])  # refused before a rank is started
    return Processes(opened, progress)
