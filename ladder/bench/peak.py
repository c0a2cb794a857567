"""How fast this GPU reads its memory: the bound of every decode step."""

import statistics

import torch
from torch import Tensor

from ladder.jit import tl, triton


@triton.jit
def _read(x, out, n, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    total = tl.zeros([BLOCK], tl.int32)
    for at in tl.range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK, num_stages=STAGES):
        total ^= tl.load(x + at.to(tl.int64) + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.xor_sum(total, axis=0))


def read_bytes_per_second(device: torch.device, gigabytes: int = 4) -> float:
    """xor over `gigabytes` of random words, each read once: bytes per second, the median of 20 in the best shape."""
    n = gigabytes * 2**30 // 4 // 65536 * 65536
    x = torch.randint(-(2**31), 2**31 - 1, (n,), dtype=torch.int32, device=device)
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    shapes = [(cores * each, block, stages) for each in (2, 4, 8) for block in (4096, 8192) for stages in (1, 3, 5)]
    return max(_rate(x, *shape) for shape in shapes)


def _rate(x: Tensor, programs: int, block: int, stages: int) -> float:
    out = torch.empty(programs, dtype=torch.int32, device=x.device)
    found = []
    for _ in range(23):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        _read[(programs,)](x, out, x.numel(), BLOCK=block, STAGES=stages, num_warps=8)
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e-3)
    return x.numel() * 4 / float(statistics.median(found[3:]))
