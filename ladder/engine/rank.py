"""What a rank's process does, and what it says to the process that started it."""

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ladder.checkpoint import load
from ladder.comm.base import Comm
from ladder.comm.signalled import Signalled
from ladder.comm.timed import Timed
from ladder.engine.control import PATIENCE, Control, join, leave, own_device
from ladder.engine.core import Command, Core, Token
from ladder.engine.options import EngineOptions
from ladder.engine.requests import Opened
from ladder.engine.vitals import Vitals, Watched, WatchedControl
from ladder.errors import LadderError
from ladder.jit import PRESENT
from ladder.kernels.launch import Kernels
from ladder.model import Decoder

PULSE = 0.2  # seconds between two signs of life


@dataclass(frozen=True)
class Loaded:
    """So many bytes of weights have been read."""

    count: int


@dataclass(frozen=True)
class Ready:
    """The shard is there."""


@dataclass(frozen=True)
class Report:
    """A step's tokens, and how many of the caller's messages had been heard before it; from the first rank only."""

    tokens: list[Token]
    free_slots: int
    heard: int


@dataclass(frozen=True)
class Failed:
    """A rank's own account of its end."""

    reason: str
    refused: bool  # the input was bad
    victim: bool  # its wire broke: another rank is the cause


def make_core(opened: Opened, comm: Comm, device: torch.device, progress: Callable[[int], None] | None) -> Core:
    """Load one rank's shard."""
    wire = comm if opened.link is None or comm.size == 1 else Timed(comm, opened.link)  # one rank sends nothing
    ops, graphs = None, False
    if (
        device.type == "cuda"
        and opened.options.kernels
        and opened.config.dtype != "float64"
        and _all_have_triton(comm, device)
    ):
        ops = Kernels.on(device, opened.table)
        graphs = getattr(wire, "capturable", False)
        if wire.size > 1 and (graphs or getattr(wire, "signals", False)):
            wire = Signalled([wire], device, 2 * opened.config.layers + 1)  # a flag for each sum, the embedding's too
    model = load(Decoder(opened.config, wire, device), opened.directory, opened.options.check, progress)
    return Core(model, opened.options.batch, opened.options.chunk, ops, graphs)


def _all_have_triton(comm: Comm, device: torch.device) -> bool:
    """Ranks with and without our kernels would not make the same calls."""
    found = bool(comm.all_gather(torch.tensor([float(PRESENT)], device=device)).all())
    if not found and comm.rank == 0:
        warnings.warn("Triton is not installed: plain torch instead of our kernels (pip install triton)", stacklevel=2)
    return found


def run_rank(rank: int, options: EngineOptions, port: int, pipe: Connection, shared: Any) -> None:
    """One rank, from its start to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's business, who stops this process
    vitals = Vitals(shared, rank)
    vitals.beat()
    threading.Thread(target=_live, args=(vitals,), daemon=True).start()
    try:
        # so that the ranks together use the cores once, and leave their wire's threads some air
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.tp))
        opened = Opened(options, tokenizer=False)
        device, own_gpu = own_device(opened.device, rank, options.tp)
        store = TCPStore("127.0.0.1", port, options.tp, is_master=False)
        # endless patience, so that it is the watch that says who does not answer
        comm, control = join(rank, options.tp, device, own_gpu, options.wire, PATIENCE.total_seconds(), store)
        core = make_core(opened, Watched(comm, vitals), device, lambda count: pipe.send(Loaded(count)))
        control = WatchedControl(control, vitals)
        pipe.send(Ready())
        lead(core, control, pipe, vitals) if rank == 0 else follow(core, control)
        leave()
    except BaseException as error:
        with contextlib.suppress(OSError):  # nobody listens any more
            pipe.send(_account(error))
        raise SystemExit(1) from None


def lead(core: Core, control: Control, pipe: Connection, vitals: Vitals) -> None:
    """The first rank: hear the caller, tell the others, report."""
    heard = 0
    while not core.stopped:
        commands: list[Command] = []
        vitals.waits()
        while pipe.poll() or not (core.busy or commands):  # nothing to do: wait for something
            commands += pipe.recv()
            heard += 1
        core.tell(control.share(commands))
        tokens = core.step() if core.busy else []
        if tokens or commands:
            pipe.send(Report(tokens, core.free_slots, heard))


def follow(core: Core, control: Control) -> None:
    """Do what the first rank says, until it says stop."""
    while not core.stopped:
        core.tell(control.share(()))
        if core.busy:
            core.step()


def _account(error: BaseException) -> Failed:
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, LadderError):
        return Failed(reason, refused=True, victim=False)
    broken = isinstance(error, dist.DistError | ConnectionError) or "gloo" in reason or "Connection" in reason
    return Failed(f"{type(error).__name__}: {reason}", refused=False, victim=broken)


def _live(vitals: Vitals) -> None:
    """Show signs of life; end when the process that started this one does, however it ended."""
    parent = parent_process()
    assert parent is not None
    while not connection.wait([parent.sentinel], timeout=PULSE):
        vitals.beat()
    os._exit(1)
