"""Which executor fits the options and the way this process was started."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from ladder.comm.base import Solo
from ladder.engine.executors.control import LocalControl, group_backend, join, leave, own_device
from ladder.engine.executors.in_process import InProcessExecutor, lost_peers
from ladder.engine.executors.multi_process import MultiProcessExecutor
from ladder.engine.executors.seal import read_token
from ladder.engine.executors.torchrun import torchrun_rank
from ladder.engine.executors.worker import follow, make_model_runner
from ladder.engine.model_runner import Command, NewToken
from ladder.engine.setup import Setup
from ladder.errors import LadderError
from ladder.logs import name_rank

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """Takes commands and gives tokens. One thread polls; others may send and close meanwhile."""

    @property
    def room(self) -> int:
        """Tokens that the KV cache has room for: prompt and output of a request must not be more."""
        ...

    @property
    def free_slots(self) -> int:
        """How many slots are free once every command sent so far has been carried out."""
        ...

    def send(self, commands: Sequence[Command]) -> None:
        """One thread at a time. Raises the error that has ended the ranks, where one has, also if there are none."""
        ...

    def poll(self) -> list[NewToken]:
        """Wait for the next tokens (there may be none). Called only while sequences are running or waiting."""
        ...

    def close(self) -> None:
        """Stop every rank; a second call does nothing."""
        ...


def start(setup: Setup, progress: Callable[[int], None] | None = None) -> Executor:
    """The executor that fits the options and the way this process was started.

    Under torchrun only the first rank returns: the others follow it, and exit when it closes. So a program that
    torchrun starts has one LLM.
    """
    own, options = torchrun_rank(), setup.options
    if (remark := setup.rewired_remark) is not None and (own is None or own.rank == 0):
        logger.warning(remark)
    if own is not None and options.tp > 1:
        device, own_gpu = own_device(setup.device, own.local_rank, own.local_size)
        name_rank(own.rank)
        token = read_token(options.token_file)
        if not token and own.local_size < own.size and own.rank == 0:
            logger.warning("ranks on several machines without --token-file: any host that reaches them can join them")
        with lost_peers():
            comm, control = join(
                own.rank, own.size, device, own_gpu, options.comm_backend, options.timeout, token=token
            )
        runner = make_model_runner(setup, comm, device, progress if own.rank == 0 else None)
        if own.rank == 0:
            return InProcessExecutor(runner, control)
        with lost_peers():
            follow(runner, control)
        leave()
        raise SystemExit(0)
    if own is None and options.token_file is not None:
        raise LadderError(
            "--token-file is for ranks that torchrun starts; others get a token of their own: leave it out"
        )
    if options.tp == 1:
        return InProcessExecutor(make_model_runner(setup, Solo(), setup.device, progress), LocalControl())
    group_backend(options.comm_backend, own_device(setup.device, 0, options.tp)[1])  # refused before a rank is started
    return MultiProcessExecutor(setup, progress)
