"""The ranks of a run: each group of `tp` neighbours shares one model, and the groups share the data."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ladder.comm.base import Comm, Solo
from ladder.comm.distributed import Distributed
from ladder.config import ModelConfig
from ladder.engine.executors.torchrun import TorchrunRank, torchrun_rank
from ladder.errors import LadderError
from ladder.train.options import ScratchOptions, TrainingOptions


@dataclass(frozen=True)
class Mesh:
    """One rank's two communicators: with the ranks that share its model, and with those that hold the same part of
    another copy of it.
    """

    tp: Comm = field(default_factory=Solo)
    data: Comm = field(default_factory=Solo)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def size(self) -> int:
        return self.tp.size * self.data.size

    @property
    def first(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.tp.rank == self.data.rank == 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def checked_world(config: ModelConfig, options: ScratchOptions, training: TrainingOptions) -> TorchrunRank:
    """torchrun's ranks. Refuses what they cannot do, before they meet."""
    tp, world = options.tp, torchrun_rank()
    refused = {
        "--fsdp": (training.fsdp, "shards what --tp has sharded already"),
        "--optimizer muon": (training.optimizer == "muon", "needs whole matrices, which --tp takes apart"),
        "--recompute": (training.recompute, "would repeat the all-reduces of --tp"),
        "--compile yes": (training.compile == "yes", "compiles the layers of transformers, and --tp trains our own"),
        "--ranks": (options.ranks > 1, "emulates tensor-parallel ranks, and --tp has real ones"),
    }
    for flag, (given, why) in refused.items():
        if given:
            raise LadderError(f"{flag} {why}: leave one out")
    config.check_degree(tp)
    if world is None:
        raise LadderError(f"--tp {tp} needs ranks: start it with torchrun --nproc-per-node {tp} -m ladder train")
    if world.size % tp:
        raise LadderError(f"--tp {tp} does not divide the {world.size} ranks that torchrun started")
    if training.device_type == "cuda" and world.local_size > torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise LadderError(
            f"{world.local_size} ranks need a GPU each, this machine has {count}: start fewer, or --device cpu"
        )
    training.micro_batches(world.size // tp)
    return world


@contextmanager
def joined(world: TorchrunRank, tp: int, device_type: str) -> Iterator[Mesh]:
    """The process groups of torchrun's ranks, gloo's on CPUs and NCCL's on GPUs, while the block runs."""
    if device_type == "cuda":
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)  # streams are those of the current device
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        grid = init_device_mesh(device_type, (world.size // tp, tp), mesh_dim_names=("data", "tp"))
        data, inner = (Distributed(grid.get_group(name)) for name in ("data", "tp"))
        yield Mesh(inner, data, device)
    finally:
        dist.destroy_process_group()
