"""What torchrun says of this process. No torch here."""

import os
from dataclasses import dataclass, replace

from ladder.engine.options import EngineOptions
from ladder.errors import LadderError


@dataclass(frozen=True)
class TorchrunRank:
    """This process among those that torchrun has started."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this machine
    local_size: int


def torchrun_rank() -> TorchrunRank | None:
    """What torchrun says of this process; None where it did not start it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return TorchrunRank(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))


def adopt_torchrun_size(options: EngineOptions) -> EngineOptions:
    """Under torchrun the number of ranks is the number of its processes."""
    own = torchrun_rank()
    if own is None or options.tp == own.size:
        return options
    if options.tp != 1:
        raise LadderError(f"tp is {options.tp}, but torchrun started {own.size} ranks: leave out --tp")
    return replace(options, tp=own.size)
