"""What torch says of this machine: CPU, GPUs, peer-to-peer, NCCL, symmetric memory."""

import os
from dataclasses import dataclass
from itertools import permutations
from typing import Any


@dataclass(frozen=True)
class Devices:
    """`failure`: why torch cannot be used; then the rest is empty."""

    failure: str | None = None
    torch: str | None = None
    cuda: str | None = None  # that torch was built with; None: a build for CPUs
    cores: int = 0
    bf16_on_cpu: bool = False
    gpus: tuple[str, ...] = ()  # names
    gigabytes: tuple[float, ...] = ()
    capability: tuple[int, int] | None = None  # the lowest
    peer_to_peer: bool | None = None  # between all pairs; None: there is no pair
    nccl: str | None = None
    symmetric_memory: bool = False  # torch has it, and all GPUs can read each other's memory

    @property
    def ranks(self) -> int:
        """The most ranks that a model is usually shared by here: a power of two, a GPU each."""
        return 1 << (len(self.gpus).bit_length() - 1) if self.gpus else 0


def devices() -> Devices:
    """Of this machine. Whatever is missing or broken, this does not fail."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        import torch

        from ladder.devices import cpu_multiplies_bfloat16

        found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "cores": cores}
        found["bf16_on_cpu"] = cpu_multiplies_bfloat16()
        found |= _gpus(torch)
    except Exception as error:  # an installation can be broken in any way
        return Devices(failure=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", cores=cores)
    return Devices(**found)


def _gpus(torch: Any) -> dict[str, Any]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return {}
    about = [torch.cuda.get_device_properties(number) for number in range(count)]
    found: dict[str, Any] = {"gpus": tuple(each.name for each in about)}
    found["gigabytes"] = tuple(round(each.total_memory / 1e9, 1) for each in about)
    found["capability"] = min((each.major, each.minor) for each in about)
    pairs = list(permutations(range(count), 2))
    peers = all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs) if pairs else None
    distributed = torch.distributed.is_available()
    nccl = distributed and torch.distributed.is_nccl_available()
    version = torch.cuda.nccl.version() if nccl else None
    found |= {"peer_to_peer": peers, "nccl": ".".join(map(str, version)) if version else None}
    found["symmetric_memory"] = bool(peers and distributed and hasattr(torch.ops, "symm_mem"))
    return found
