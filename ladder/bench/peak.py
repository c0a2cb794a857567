"""How fast this GPU reads its memory: the ceiling of every decoding step."""

import statistics

import torch

from ladder.jit import tl, triton


@triton.jit
def _read(x, out, n, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.int32)
    for at in tl.range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK, num_stages=4):
        total ^= tl.load(x + at.to(tl.int64) + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.xor_sum(total, axis=0))


def read_bytes_per_second(device: torch.device, gigabytes: int = 4) -> float:
    """xor over `gigabytes` of random words, each read once: bytes per second, the median of 20."""
    n = gigabytes * 2**30 // 4 // 65536 * 65536
    x = torch.randint(-(2**31), 2**31 - 1, (n,), dtype=torch.int32, device=device)
    programs = 4 * torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.empty(programs, dtype=torch.int32, device=device)
    found = []
    for _ in range(23):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        _read[(programs,)](x, out, n, BLOCK=4096, num_warps=8)
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e-3)
    return n * 4 / float(statistics.median(found[3:]))
