"""What flags are worth: one rank of Llama-3-70B at TP 8 on emulated links, whose readers wait for a flag or an event.

python -m experiments.flags_gpu > results/flags_h200.jsonl

NCCL's kernels set no flags, and all-reduces of more than 256 KB over symmetric memory set none either: a reader of
those is launched after the event of the all-reduce. Medians of 25 steps, context 1024.
"""

import gc
import json
import statistics
from typing import Any

import torch
from torch import Tensor

from ladder.bench.machine import machine
from ladder.bench.model import Case, random_model
from ladder.bench.one_rank import CONTEXT, decode
from ladder.comm.base import Pending
from ladder.comm.link import LINKS, Link
from ladder.comm.one_rank import OneRank
from ladder.kernels.launch import Kernels

PAIRS = [("none", None)]
_EMULATED = ("nvlink_oneshot", "nvlink_nccl", "pcie_shm_tp8")
PAIRS += [(wiring, link) for link in _EMULATED for wiring in ("standard", "ladder")]
PAIRS += [("ladder-1-2", "nvlink_nccl")]


class WithoutFlags:
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
        model = random_model(Case("llama-3-70b", 8, batch), OneRank(8), device)
        cache = model.new_cache(batch + 1, CONTEXT + 64)
        for _ in range(2):
            decode(model, cache, kernels, batch, "none", None)
        for wiring, link in PAIRS:
            row: dict[str, Any] = {"measure": "flags", "batch": batch, "wiring": wiring, "link_name": link}
            for name, kind in (("flags", OneRank), ("events", WithoutFlags)):
                times = decode(model, cache, kernels, batch, wiring, LINKS[link] if link else None, rank=kind)
                row[f"{name}_ms"] = round(statistics.median(times), 4)
            print(json.dumps({**row, **machine(torch.device("cuda"))}), flush=True)
        del model, cache
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
