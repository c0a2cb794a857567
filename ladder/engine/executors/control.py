"""How all ranks get the first rank's commands; their process groups; torchrun's environment of a process."""

import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ladder.comm.base import Comm, Solo
from ladder.comm.distributed import Distributed
from ladder.comm.symmetric import Symmetric
from ladder.engine.executors.messages import MOST_BYTES, decode, encode
from ladder.engine.executors.rendezvous import loopback
from ladder.engine.executors.seal import HEADER, Seal, greet
from ladder.engine.model_runner import Command
from ladder.errors import LadderError

logger = logging.getLogger(__name__)

# that NCCL may use in a decode step, one for each of its thread blocks: what is computed meanwhile has the others
MULTIPROCESSORS = 8
# Ranks wait for commands for as long as there are none; that another rank has died they notice at once.
NO_TIMEOUT = timedelta(days=365)


class Control(Protocol):
    """How commands get from the first rank to all ranks."""

    def share(self, commands: Sequence[Command]) -> Sequence[Command]:
        """The first rank's commands, on every rank."""
        ...


class LocalControl:
    """For a single rank."""

    def share(self, commands: Sequence[Command]) -> Sequence[Command]:
        return commands


class BroadcastControl:
    """Over a process group that carries CPU tensors, sealed. No commands cost one header. A piece of a message of the
    full length is always followed by another one, which may be empty.
    """

    def __init__(self, group: dist.ProcessGroup, key: bytes) -> None:
        self._group = group
        self._first = dist.get_rank(group) == 0
        self._seal = Seal(key)

    def share(self, commands: Sequence[Command]) -> Sequence[Command]:
        if self._first:
            message = encode(commands)
            for begin in range(0, len(message) + 1, MOST_BYTES):
                piece = message[begin : begin + MOST_BYTES]
                self._broadcast(self._seal.header(piece))
                if piece:
                    self._broadcast(piece)
            return commands
        received = bytearray()
        while True:
            header = self._broadcast(bytes(HEADER))
            if length := self._seal.length(header):
                received += self._seal.check(header, self._broadcast(bytes(length)))
            if length < MOST_BYTES:
                return decode(bytes(received))

    def _broadcast(self, message: bytes) -> bytes:
        """The first rank's, of the same length on all ranks."""
        body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        dist.broadcast(body, group=self._group, group_src=0)
        return body.numpy().tobytes()


def group_backend(comm_backend: str, own_gpu: bool) -> str:
    """The backend of the process group, which also carries what symmetric memory does not: gloo on shared GPUs."""
    if comm_backend == "nccl" and not own_gpu:
        raise LadderError("comm_backend 'nccl' needs a GPU for every rank, some share one: use --comm-backend gloo")
    return "nccl" if own_gpu and comm_backend != "gloo" else "gloo"


def join(
    rank: int,
    size: int,
    device: torch.device,
    own_gpu: bool,
    comm_backend: str,
    timeout: float,
    store: Store | None = None,
    token: bytes = b"",
) -> tuple[Comm, Control]:
    """Join the process group (torchrun's, or the one of `store`): a communicator, and the control of commands.

    Before anything else is received, all ranks prove to each other that they hold the `token`.

    `comm_backend` is one of the options' COMM_BACKENDS. auto: where every rank has a GPU of its own, symmetric memory
    if it is available, else NCCL; gloo elsewhere. Ranks that share a GPU use symmetric memory on request only, and
    only where torch was told to allow it.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # streams and events are those of the current device
    if size == 1:
        return Solo(), LocalControl()
    if device.type == "cuda" and comm_backend == "auto" and not own_gpu and rank == 0:
        logger.warning("gloo instead of symmetric memory or NCCL: ranks share a GPU, all-reduces go through the CPU")
    limit = timedelta(seconds=timeout)
    where: dict[str, Any] = {} if store is None else {"store": store, "rank": rank, "world_size": size}
    if group_backend(comm_backend, own_gpu) == "nccl":
        # all-reduces run on a stream of high priority: they must not queue behind the compute stream's kernels
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        dist.init_process_group("nccl", timeout=limit, device_id=device, pg_options=options, **where)
        comm: Comm = Distributed(None, _limited(limit), MULTIPROCESSORS)
    else:
        dist.init_process_group("gloo", timeout=limit, **where)
        greet(None, token, "all-reduces")
        comm = Distributed()
    control = dist.new_group(backend="gloo", timeout=NO_TIMEOUT)
    key = greet(control, token, "control")
    if comm_backend == "symmetric" or (comm_backend == "auto" and own_gpu):
        comm = Symmetric.build(comm, control, device, required=comm_backend == "symmetric")
    return comm, BroadcastControl(control, key)


def _limited(timeout: timedelta) -> dist.ProcessGroup | None:
    """A second group of all ranks, in which NCCL uses few thread blocks; None where the environment says how many."""
    if any(name in os.environ for name in ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_MIN_NCHANNELS")):
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MULTIPROCESSORS
    group: dist.ProcessGroup = dist.new_group(backend="nccl", timeout=timeout, pg_options=options)
    return group


def stay_on_this_machine() -> None:
    """In a process of ours whose peers are all on this machine: gloo and NCCL listen on loopback only, unless the
    environment names another interface. They would take the one that the machine's name resolves to.
    """
    if (interface := loopback()) is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def own_device(device: torch.device, local_rank: int, local_size: int) -> tuple[torch.device, bool]:
    """The device of one of the `local_size` ranks of this machine, and whether no other rank uses it (a GPU).

    `cuda` gives each rank its own GPU where there are enough; a numbered device is shared by all.
    """
    if device.type != "cuda":
        return device, False
    if device.index is not None:
        return device, local_size == 1
    count = torch.cuda.device_count()
    return torch.device("cuda", local_rank % count), count >= local_size
