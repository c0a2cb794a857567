"""What flags are worth: one rank of Llama-3-70B at TP 8 on timed links, its sums seen by a flag or by an event.

python -m experiments.flags_gpu > results/flags_h200.jsonl

NCCL's kernels set no flags, and sums of more than 256 KB over symmetric memory set none either: a reader of those is
launched when the event of the sum has come. Medians of 25 steps, context 1024.
"""

import gc
import json
import statistics
from typing import Any

import torch
from ladder.bench.shard import Case, shard
from torch import Tensor

from ladder.bench import shard as shards
from ladder.bench.machine import machine
from ladder.bench.one_rank import decode
from ladder.comm.base import Pending
from ladder.comm.link import LINKS, Link
from ladder.comm.one_rank import OneRank
from ladder.kernels.ops import Kernels

PAIRS = [("none", None)]
_TIMED = ("nvlink_oneshot", "nvlink_nccl", "pcie_shm_tp8")
PAIRS += [(wiring, link) for link in _TIMED for wiring in ("standard", "ladder")]
PAIRS += [("ladder-1-2", "nvlink_nccl")]


class Plainly:
    """OneRank, but it sets no flag."""

    capturable = True

    def __init__(self, size: int, link: Link | None = None) -> None:
        self._inner = OneRank(size, link)
        self.size, self.rank = size, 0

    def all_reduce(self, x: Tensor) -> Pending:
        return self._inner.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._inner.all_gather(x)


def main() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    kernels = Kernels.on(device)
    for batch in (1, 64):
        model = shard(Case("llama-3-70b", 8, batch), OneRank(8), device)
        cache = model.new_cache(batch + 1, 1088)
        for _ in range(2):
            decode(model, cache, kernels, batch, "none", None)
        for wiring, link in PAIRS:
            row: dict[str, Any] = {"measure": "flags", "batch": batch, "wiring": wiring, "link_name": link}
            for name, kind in (("flags", OneRank), ("events", Plainly)):
                shards.OneRank = kind  # type: ignore[misc,assignment]
                times = decode(model, cache, kernels, batch, wiring, LINKS[link] if link else None)
                row[f"{name}_ms"] = round(statistics.median(times), 4)
            shards.OneRank = OneRank  # type: ignore[misc]
            print(json.dumps({**row, **machine(torch.device("cuda"))}), flush=True)
        del model, cache
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
