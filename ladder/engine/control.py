"""How ranks agree on what to do next: the first rank says, the others hear."""

import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ladder.comm.base import Comm, Solo
from ladder.comm.distributed import Distributed
from ladder.comm.symmetric import Symmetric
from ladder.engine.core import Command
from ladder.errors import LadderError

# Ranks wait as long as the first has nothing to say; that it has died they notice at once.
PATIENCE = timedelta(days=365)


class Control(Protocol):
    """The ranks' common ear."""

    def share(self, commands: Sequence[Command]) -> Sequence[Command]:
        """The first rank's commands, on every rank."""
        ...


class Alone:
    """One rank hears itself."""

    def share(self, commands: Sequence[Command]) -> Sequence[Command]:
        return commands


class Broadcast:
    """Over a process group that carries CPU tensors. No commands cost one message of a single number."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._first = dist.get_rank(group) == 0

    def share(self, commands: Sequence[Command]) -> Sequence[Command]:
        message = pickle.dumps(list(commands)) if self._first and commands else b""
        size = torch.tensor([len(message)])
        dist.broadcast(size, group=self._group, group_src=0)
        if not int(size):
            return ()
        body = torch.frombuffer(bytearray(message or bytes(int(size))), dtype=torch.uint8)
        dist.broadcast(body, group=self._group, group_src=0)
        heard: list[Command] = pickle.loads(body.numpy().tobytes())
        return heard


@dataclass(frozen=True)
class World:
    """Where torchrun has put this process."""

    rank: int
    size: int
    local: int  # the rank among those of this machine
    here: int  # how many these are


def torchrun_world() -> World | None:
    """torchrun's world, where it started this process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return World(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))


def backend(wire: str, own_gpu: bool) -> str:
    """Whose process group carries the sums, and what symmetric memory leaves of them: gloo where GPUs are shared."""
    if wire == "nccl" and not own_gpu:
        raise LadderError("wire 'nccl' needs a GPU for every rank, some would share one: use --wire gloo")
    return "nccl" if own_gpu and wire != "gloo" else "gloo"


def join(
    rank: int,
    size: int,
    device: torch.device,
    own_gpu: bool,
    wire: str,
    timeout: float,
    store: TCPStore | None = None,
) -> tuple[Comm, Control]:
    """Enter the process group (torchrun's, or the one that meets at `store`): the wire for sums, and the common ear.

    `wire` is one of the options' WIRES. auto: where every rank has a GPU of its own, symmetric memory if it can be
    had, else NCCL; gloo elsewhere. Ranks that share a GPU have symmetric memory on request only, and only where torch
    was told to allow it.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # streams and events are those of the current device
    if size == 1:
        return Solo(), Alone()
    limit = timedelta(seconds=timeout)
    place: dict[str, Any] = {} if store is None else {"store": store, "rank": rank, "world_size": size}
    if backend(wire, own_gpu) == "nccl":
        # sums travel on a stream of their own that the compute stream's kernels cannot hold up
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        dist.init_process_group("nccl", timeout=limit, device_id=device, pg_options=options, **place)
    else:
        dist.init_process_group("gloo", timeout=limit, **place)
    comm: Comm = Distributed()
    ear = dist.new_group(backend="gloo", timeout=PATIENCE)
    if wire == "symmetric" or (wire == "auto" and own_gpu):
        comm = Symmetric.build(comm, ear, device, required=wire == "symmetric")
    return comm, Broadcast(ear)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def own_device(device: torch.device, local: int, here: int) -> tuple[torch.device, bool]:
    """The device of rank `local` of the `here` ranks on this machine, and whether it is a GPU of its own.

    `cuda` means one GPU each, as far as they go; a numbered device is shared by all.
    """
    if device.type != "cuda":
        return device, False
    if device.index is not None:
        return device, here == 1
    count = torch.cuda.device_count()
    return torch.device("cuda", local % count), count >= here
