"""What the process of one rank does, and the messages it sends to the process that started it."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from ladder.checkpoint import load
from ladder.comm.base import Comm
from ladder.comm.signalled import Signalled
from ladder.comm.timed import Timed
from ladder.devices import cpu_multiplies_bfloat16, silence_bfloat16_fallback
from ladder.engine.executors.control import NO_TIMEOUT, Control, join, leave, own_device, stay_on_this_machine
from ladder.engine.executors.heartbeat import Heartbeat, HeartbeatComm, HeartbeatControl
from ladder.engine.executors.pace import Pace
from ladder.engine.executors.rank_processes import reporting_failures
from ladder.engine.executors.rendezvous import Rendezvous
from ladder.engine.memory import cache_blocks, cache_dtype
from ladder.engine.model_runner import Command, ModelRunner, NewToken
from ladder.engine.options import EngineOptions
from ladder.engine.setup import Setup
from ladder.jit import PRESENT
from ladder.kernels.launch import Kernels
from ladder.logs import shown
from ladder.model import Decoder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """So many bytes of weights have been read."""

    count: int


@dataclass(frozen=True)
class Ready:
    """The shard has been loaded, and the KV cache has room for so many tokens."""

    room: int


@dataclass(frozen=True)
class StepOutput:
    """A step's tokens, and how many of the caller's messages had been received before it; from the first rank only."""

    tokens: list[NewToken]
    free_slots: int
    received: int


def make_model_runner(
    setup: Setup, comm: Comm, device: torch.device, progress: Callable[[int], None] | None
) -> ModelRunner:
    """Load one rank's shard."""
    if device.type == "cpu" and setup.config.dtype == "bfloat16" and not cpu_multiplies_bfloat16():
        silence_bfloat16_fallback()
    timed = comm if setup.link is None or comm.size == 1 else Timed(comm, setup.link)  # one rank sends nothing
    launch, graphs = None, False
    if device.type == "cuda" and setup.options.kernels and _kernels_fit(setup, comm, device):
        launch = Kernels.on(device, setup.table)
        graphs = getattr(timed, "capturable", False)
        if not graphs and comm.rank == 0:
            linked = timed is not comm and getattr(comm, "capturable", False)
            reason = "an emulated link" if linked else "this communication backend"
            logger.info("no CUDA graphs: %s cannot be captured in one", reason)
        if timed.size > 1 and (graphs or getattr(timed, "signals", False)):
            # a flag for each all-reduce, the embedding's too
            timed = Signalled([timed], device, setup.config.most_all_reduces)
    model = load(
        Decoder(setup.config, timed, device, expert_parallel=setup.options.expert_parallel),
        setup.directory,
        setup.options.check,
        progress,
    )
    options = setup.options
    blocks, dtype = cache_blocks(options, model.config, comm, device), cache_dtype(options, model.config)
    runner = ModelRunner(model, options.max_num_seqs, options.prefill_chunk, launch, graphs, blocks, dtype)
    if options.warm_up and (sizes := runner.warm_up()) and comm.rank == 0:
        logger.info("warmed up: decode steps of %s sequences", ", ".join(map(str, sizes)))
    return runner


def _kernels_fit(setup: Setup, comm: Comm, device: torch.device) -> bool:
    if setup.config.dtype == "float64":
        if comm.rank == 0:
            logger.info("plain torch instead of our kernels: they do not compute in float64")
        return False
    return _all_have_triton(comm, device)


def _all_have_triton(comm: Comm, device: torch.device) -> bool:
    """Ranks with and without our kernels would not make the same calls."""
    found = bool(comm.all_gather(torch.tensor([float(PRESENT)], device=device)).all())
    if not found and comm.rank == 0:
        logger.warning("Triton is not installed: plain torch instead of our kernels (pip install triton)")
    return found


def run_rank(rank: int, rendezvous: Rendezvous, pipe: Connection, options: EngineOptions, shared: Any) -> None:
    """One rank's process, from start to end."""
    heartbeat = Heartbeat(shared, rank)
    heartbeat.beat()
    with reporting_failures(pipe, heartbeat.beat), shown(rendezvous.log_level, f"ladder rank {rank}"):
        # so that the ranks together use each core once, and leave some to the communication's threads
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.tp))
        setup = Setup(options, tokenizer=False)
        device, own_gpu = own_device(setup.device, rank, options.tp)
        stay_on_this_machine()
        # the watchdog finds a rank that does not answer, so collectives have no time-out
        timeout, store = NO_TIMEOUT.total_seconds(), rendezvous.store()
        comm, control = join(rank, options.tp, device, own_gpu, options.comm_backend, timeout, store, rendezvous.token)
        runner = make_model_runner(
            setup, HeartbeatComm(comm, heartbeat), device, lambda count: pipe.send(Loaded(count))
        )
        control = HeartbeatControl(control, heartbeat)
        heartbeat.watched = True
        pipe.send(Ready(runner.room))
        lead(runner, control, pipe, heartbeat) if rank == 0 else follow(runner, control)
        leave()


def lead(runner: ModelRunner, control: Control, pipe: Connection, heartbeat: Heartbeat) -> None:
    """The first rank: receive the caller's commands, share them with the other ranks, send the tokens."""
    received, pace = 0, Pace(runner)
    while not runner.stopped:
        commands: list[Command] = []
        heartbeat.waits()
        while pipe.poll() or not (runner.busy or commands):  # nothing to do: wait for commands
            commands += pipe.recv()
            received += 1
        runner.apply(control.share([*commands, *pace.due]))
        tokens = pace.step() if runner.busy else []
        if tokens or commands:
            pipe.send(StepOutput(tokens, runner.free_slots, received))


def follow(runner: ModelRunner, control: Control) -> None:
    """The other ranks: carry out the first rank's commands until it shuts down."""
    while not runner.stopped:
        runner.apply(control.share(()))
        if runner.busy:
            runner.step()
