"""One decoder for every wiring.

    standard   every sub-block waits          ladder   every sub-block reads one all-reduce behind

    r ──┬───────────────┐                     r ──┬───────────────┬───────────────┐
        attention       │                         attention       MLP             attention
        all-reduce      │                         all-reduce ┐    all-reduce ┐    ...
        (wait)          │                                    │               │
    r ──┴──── + ────────┘                     r ─────────────┴ + ────────────┴ + ──
        MLP ...                             the all-reduce runs beside the next sub-block

Which of these happens is not written here: a sub-block reads the stream with the lag and writes it with the out of its
row of the wiring's table. How it is computed is not written here either: that is up to the backend (`Ops`).
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ladder.comm.base import Comm, Solo
from ladder.config import ModelConfig
from ladder.layers.attention import Attention
from ladder.layers.cache import KVCache, Metadata, PrefillMetadata
from ladder.layers.embedding import Embedding, Head
from ladder.layers.experts import ExpertMLP
from ladder.layers.formats import lay_together
from ladder.layers.mlp import MLP
from ladder.layers.norm import Norm
from ladder.layers.ops import Ops, Plain
from ladder.layers.rope import RopeTable
from ladder.layers.shard import Shard, Sharded
from ladder.residual import ResidualStream
from ladder.wiring import Out, SubBlock, read_together

logger = logging.getLogger(__name__)


class Layer(nn.Module):
    """Attention, then MLP or experts, each around the residual stream."""

    def __init__(
        self, config: ModelConfig, index: int, rope: int, comm: Comm, dtype: torch.dtype, expert_parallel: bool
    ) -> None:
        super().__init__()
        self.wiring: tuple[SubBlock, SubBlock] = config.sub_blocks()[index]
        self.attention = Attention(config, index, rope, comm, dtype)
        self.mlp: MLP | ExpertMLP
        shared = self.attention.norm if config.names.shared_norm else None
        if config.has_experts(index):
            self.mlp = ExpertMLP(config, index, comm, dtype, expert_parallel, shared)
        else:
            self.mlp = MLP(config, index, comm, dtype, shared)
        # one product is enough for both where they read the same stream
        self.shares_norm = isinstance(self.mlp, MLP) and self.mlp.norm is self.attention.norm
        together = self.shares_norm and lay_together(self.attention.qkv_proj, self.mlp.up_proj)
        if self.shares_norm and not together and read_together(*self.wiring) and index == 0:
            logger.info("parallel layers have two products: their weights are quantized, or only one has a bias")

    def forward(self, ops: Ops, stream: ResidualStream, metadata: Metadata, cache: KVCache | None) -> None:
        both = None
        if self.shares_norm and read_together(*self.wiring):
            assert isinstance(self.mlp, MLP)
            both = ops.norm_project_both(stream, self.wiring[0].lag, self.attention, self.mlp)
        reads = (None, None) if both is None else tuple(ops.lanes.made(read) for read in both)
        # attention on the second lane, where there are two
        for lane, block, wiring, read in zip((1, 0), (self.attention, self.mlp), self.wiring, reads, strict=True):
            with ops.lanes.on(lane):
                block(ops, stream, wiring, metadata, cache, None if read is None else ops.lanes.use(read))


class Decoder(nn.Module):
    """Rank `comm.rank` of a decoder shared by `comm.size` ranks. Weights are not initialized: load or draw them."""

    def __init__(
        self,
        config: ModelConfig,
        comm: Comm | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        expert_parallel: bool = False,
    ) -> None:
        """`expert_parallel`: each rank has some experts as a whole, instead of a slice of every expert."""
        super().__init__()
        comm = comm or Solo()
        config.check_degree(comm.size, expert_parallel)
        dtype = dtype or getattr(torch, config.dtype)
        self.config = replace(config, dtype=str(dtype).removeprefix("torch."))
        self.comm = comm
        self.ropes = RopeTable(config, "cpu" if str(device) == "meta" else device)
        with torch.device(device):
            self.embed_tokens = Embedding(config, comm, dtype)
            self.layers = nn.ModuleList(
                Layer(config, index, self.ropes.of_layer[index], comm, dtype, expert_parallel)
                for index in range(config.layers)
            )
            self.norm = Norm(config.names.norm, config.hidden, config, dtype)
            self.lm_head = Head(config, comm, dtype, self.embed_tokens.weight if config.tied else None)

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        last: Tensor | None = None,
        slots: Sequence[int] | None = None,
        ops: Ops | None = None,
    ) -> Tensor:
        """This rank's block of the logits.

        `tokens` [batch, tokens] follow what the cache's `slots` hold (without a cache: nothing; without `slots`:
        sequence i has slot i); sequences shorter than the longest are filled up at the right with any id. `last`
        [batch] picks one token of each, [batch, 1, block]; without it all are answered, [batch, tokens, block].
        """
        ops = ops or Plain()
        batch, count = tokens.shape
        metadata = PrefillMetadata.of([count] * batch, cache, slots, self.config, self.ropes)
        if last is None:
            every: Tensor = self.run(ops, tokens.flatten(), metadata, cache, None)
            return every.view(*tokens.shape, -1)
        rows = torch.arange(len(last), device=last.device) * tokens.shape[1] + last
        return self.run(ops, tokens.flatten(), metadata, cache, rows).unsqueeze(1)

    def run(self, ops: Ops, tokens: Tensor, metadata: Metadata, cache: KVCache | None, last: Tensor | None) -> Tensor:
        """The pass itself, by the backend `ops`: `tokens` [rows] -> logits [rows `last`, or all, block]."""
        embedding = ops.embed(self.embed_tokens, tokens, metadata)
        stream = ResidualStream.from_partial(self.comm, embedding, self.reduces, ops.lanes)
        for layer in self.layers:
            layer(ops, stream, metadata, cache)
        ops.lanes.join()
        return ops.head(stream, self.norm, self.lm_head, last)

    @property
    def reduces(self) -> int:
        """All-reduces of a pass's sub-blocks."""
        return sum(block.out is Out.REDUCE for layer in self.layers for block in layer.wiring)  # type: ignore[union-attr]

    def rewire(self, pattern: str) -> None:
        """Another wiring, which changes no tensor."""
        self.config = self.config.rewired(pattern)
        for layer, wiring in zip(self.layers, self.config.sub_blocks(), strict=True):
            layer.wiring = wiring  # type: ignore[assignment]

    def shards(self) -> Iterator[Shard]:
        """Every parameter of this rank, by its Hugging Face name; `modules` has a shared one once."""
        tied = [self.lm_head] if self.config.tied else []
        for module in self.modules():
            if isinstance(module, Sharded) and module not in (self, *tied):
                yield from module.shards()

    def new_cache(
        self, slots: int, capacity: int, blocks: int | None = None, dtype: torch.dtype | None = None
    ) -> KVCache:
        """An empty cache for this rank's heads: see `KVCache`. Its `dtype` is the model's where none is given."""
        weight = self.embed_tokens.weight
        return KVCache(self.config, self.comm.size, slots, capacity, weight.device, dtype or weight.dtype, blocks)
