"""How long an all-reduce takes between the GPUs of this machine, measured."""

from collections.abc import Iterator
from typing import Any

import torch

from ladder.bench.doctor.advice import HIDDEN
from ladder.bench.machine import milliseconds
from ladder.bench.ranks import stream_ranks
from ladder.comm.base import Comm
from ladder.errors import LadderError, RankError

IN_TURN = 16  # all-reduces that are timed together, so that launching one is hidden behind another


def all_reduce_us(ranks: int) -> dict[str, Any]:
    """Microseconds of one by the backend that the engine would choose, and by NCCL; or why not."""
    found: dict[str, Any] = {}
    for backend in ("auto", "nccl"):
        try:
            found |= dict(stream_ranks(ranks, torch.device("cuda"), timed, comm_backend=backend))
        except (LadderError, RankError, OSError) as error:
            found["failure"] = f"{backend}: {error}"
    return found


def timed(comm: Comm, device: torch.device) -> Iterator[tuple[str, float]]:
    """One rank's part: the name of what adds up, and its time."""
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device=device)

    def several() -> None:
        for _ in range(IN_TURN):
            comm.all_reduce(x).wait()

    found = sorted(milliseconds(several))
    name = {"Symmetric": "symmetric memory", "Distributed": "NCCL"}.get(type(comm).__name__, type(comm).__name__)
    yield name, round(found[len(found) // 2] / IN_TURN * 1e3, 2)
