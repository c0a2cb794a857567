"""How ranks agree on what to do next: the first rank says, the others hear."""

import os
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ladder.comm.base import Comm, Solo
from ladder.comm.distributed import Distributed
from ladder.engine.core import Command
from ladder.errors import LadderError


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

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._first = dist.get_rank(group) == 0

    def share(self, commands: Sequence[Command]) -> Sequence[Command]:
        message = pickle.dumps(list(commands)) if self._first and commands else b""
        size = torch.tensor([len(message)])
        dist.broadcast(size, group=self._group, group_src=0)
        if not int(size):
            return ()
        body = torch.frombuffer(bytearray(message), dtype=torch.uint8) if self._first else torch.empty(int(size))
        body = body.to(torch.uint8)
        dist.broadcast(body, group=self._group, group_src=0)
        heard: list[Command] = pickle.loads(body.numpy().tobytes())
        return heard


def torchrun_world() -> tuple[int, int, int] | None:
    """(rank, size, rank on this machine) where torchrun started this process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return rank, size, local


def join(
    rank: int, size: int, device: torch.device, timeout: float, store: TCPStore | None = None
) -> tuple[Comm, Control]:
    """Enter the process group (torchrun's, or the one that meets at `store`): the wire for sums, and the common ear."""
    if size == 1:
        return Solo(), Alone()
    limit = timedelta(seconds=timeout)
    wire = backend(device, size)
    if store is None:
        dist.init_process_group(wire, timeout=limit)
    else:
        dist.init_process_group(wire, store=store, rank=rank, world_size=size, timeout=limit)
    ear = None if wire == "gloo" else dist.new_group(backend="gloo", timeout=limit)
    return Distributed(), Broadcast(ear)


def backend(device: torch.device, size: int) -> str:
    """NCCL where every rank of this machine has a GPU of its own, else gloo."""
    return "nccl" if device.type == "cuda" and torch.cuda.device_count() >= size else "gloo"


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def own_device(device: torch.device, local: int) -> torch.device:
    """`cuda` means the GPU with this rank's number, where there are enough; a numbered device is kept."""
    if device.type != "cuda" or device.index is not None:
        return device
    count = torch.cuda.device_count()
    if not count:
        raise LadderError("this machine has no CUDA device")
    return torch.device("cuda", local % count)
