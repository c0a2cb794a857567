"""How many blocks the KV cache has: what was asked for, or what is free once the model has been loaded."""

import logging

import torch

from ladder.comm.base import Comm
from ladder.config import ModelConfig
from ladder.engine.options import EngineOptions
from ladder.errors import LadderError
from ladder.layers.cache import BLOCK, FP8, RESERVED, KVCache
from ladder.perf.memory import check_host, free_bytes

GPU_SHARE, GPU_REST = 0.9, 1 << 30  # of what is free; bytes of that for activations, CUDA graphs and libraries
CPU_SHARE = 0.25

logger = logging.getLogger(__name__)


def cache_dtype(options: EngineOptions, config: ModelConfig) -> torch.dtype:
    """The dtype of keys and values in the cache."""
    model: torch.dtype = getattr(torch, config.dtype)
    return FP8 if options.cache_dtype == "fp8" else model


def cache_blocks(options: EngineOptions, config: ModelConfig, comm: Comm, device: torch.device) -> int:
    """The same on all ranks, which must have loaded their shards."""
    size = KVCache.block_bytes(config, comm.size, cache_dtype(options, config))
    most = options.max_num_seqs * -(-config.context // BLOCK)
    given = options.memory
    mine = int(given * 1e9) if given is not None else _free(device, comm.size, options.device)
    found = min(most, mine // size - RESERVED)
    counts = comm.all_gather(torch.tensor([[float(found)]], device=device))
    blocks = int(counts.min())
    if blocks < 1:
        raise _too_little(size, mine, "use more ranks")
    if comm.rank == 0:
        logger.info("KV cache: %d tokens, %.2f GB on each rank", blocks * BLOCK, blocks * size / 1e9)
    return RESERVED + blocks


def check_memory(options: EngineOptions, config: ModelConfig) -> None:
    """Refuse a budget that is too small for one block, before anything is loaded."""
    size = KVCache.block_bytes(config, options.tp, cache_dtype(options, config))
    if options.memory is not None and int(options.memory * 1e9) < (RESERVED + 1) * size:
        raise _too_little(size, int(options.memory * 1e9), "raise --memory")


def _too_little(size: int, there: int, remedy: str) -> LadderError:
    return LadderError(
        f"no memory for a KV cache: a block of {BLOCK} tokens takes {size / 1e6:.1f} MB on each rank, and three are "
        f"the least; there are {there / 1e6:.1f} MB: {remedy}"
    )


def _free(device: torch.device, size: int, named: str) -> int:
    """Bytes that the cache of one of `size` ranks may take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        shared = size > 1 and (":" in named or torch.cuda.device_count() < size)
        return int((GPU_SHARE * free - GPU_REST) / (size if shared else 1))
    return int(CPU_SHARE * free_bytes() / size)


def check_machine(options: EngineOptions, config: ModelConfig, weight_bytes: int, share: float = 1.0) -> None:
    """Refuse ranks that this machine's CPUs cannot hold. `weight_bytes`: of all ranks together, of which a `share` is
    here. The cache takes what is left.
    """
    tables = options.tp * options.max_num_seqs * -(-config.context // BLOCK) * 4
    ways = "use a smaller model or a narrower --dtype"
    if tables > weight_bytes:
        ways = "give a smaller --max-num-seqs"
    check_host(f"{options.model} at TP {options.tp}", share * (weight_bytes + tables), ways)
