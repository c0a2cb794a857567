"""One decoder for every wiring.

    standard   every sub-block waits          ladder   every sub-block reads one sum behind

    r ──┬───────────────┐                     r ──┬───────────────┬───────────────┐
        attention       │                         attention       MLP             attention
        all-reduce      │                         all-reduce ┐    all-reduce ┐    ...
        (wait)          │                                    │               │
    r ──┴──── + ────────┘                     r ─────────────┴ + ────────────┴ + ──
        MLP ...                                 the sum travels beside the next sub-block

Which of these happens is not written here: a layer reads the stream with the lag and writes it with the out of its two
rows of the wiring's table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ladder.comm.base import Comm, Solo
from ladder.config import ModelConfig
from ladder.layers.attention import Attention, KVCache, Place
from ladder.layers.embedding import Embedding, Head
from ladder.layers.mlp import MLP
from ladder.layers.norm import RMSNorm
from ladder.layers.rope import frequencies
from ladder.layers.shard import Shard, Sharded
from ladder.residual import ResidualStream
from ladder.wiring import SubBlock, Wiring


class Layer(nn.Module):
    """Attention, then MLP, each around the residual stream."""

    def __init__(
        self, config: ModelConfig, index: int, wiring: tuple[SubBlock, SubBlock], comm: Comm, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.wiring = wiring
        self.input_layernorm = RMSNorm("input_layernorm", config.hidden, config.norm_eps, dtype)
        self.self_attn = Attention(config, index, comm, dtype)
        self.post_attention_layernorm = RMSNorm("post_attention_layernorm", config.hidden, config.norm_eps, dtype)
        self.mlp = MLP(config, comm, dtype)

    def forward(self, stream: ResidualStream, place: Place, cache: KVCache | None) -> None:
        attention, mlp = self.wiring
        x = self.input_layernorm(stream.read(attention.lag))
        stream.write(self.self_attn(x, place, cache), attention.out)
        x = self.post_attention_layernorm(stream.read(mlp.lag))
        stream.write(self.mlp(x), mlp.out)


class Decoder(nn.Module):
    """Rank `comm.rank` of a decoder shared by `comm.size` ranks. Weights are not initialized: load or draw them."""

    def __init__(
        self,
        config: ModelConfig,
        comm: Comm | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        comm = comm or Solo()
        config.check_degree(comm.size)
        dtype = dtype or getattr(torch, config.dtype)
        self.config = replace(config, dtype=str(dtype).removeprefix("torch."))
        self.comm = comm
        with torch.device(device):
            self.embed_tokens = Embedding("embed_tokens", config.vocab, config.hidden, comm, dtype)
            self.layers = nn.ModuleList(
                Layer(config, index, wiring, comm, dtype) for index, wiring in enumerate(config.wiring.sub_blocks())
            )
            self.norm = RMSNorm("norm", config.hidden, config.norm_eps, dtype)
            tied = self.embed_tokens.weight if config.tied else None
            self.lm_head = Head("lm_head", config.vocab, config.hidden, comm, dtype, tied)
        self.register_buffer("frequencies", frequencies(config.rope, config.head_dim).to(device), persistent=False)

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        last: Tensor | None = None,
        slots: Sequence[int] | None = None,
    ) -> Tensor:
        """This rank's block of the logits.

        `tokens` [batch, tokens] follow what the cache's `slots` hold (without a cache: nothing; without `slots`: line i
        has slot i); lines shorter than the longest are filled up at the right with any id. `last` [batch] picks one
        token of each line, [batch, 1, block]; without it all of them are answered, [batch, tokens, block].
        """
        frequencies: Tensor = self.frequencies  # type: ignore[assignment]
        place = Place.of(tokens.shape, cache, slots, self.config, frequencies, self.embed_tokens.weight.dtype)
        stream = ResidualStream.from_partial(self.comm, self.embed_tokens(tokens))
        for layer in self.layers:
            layer(stream, place, cache)
        x = stream.read(lag=0)
        if last is not None:
            x = x[torch.arange(len(last), device=x.device), last].unsqueeze(1)
        block: Tensor = self.lm_head(self.norm(x))
        return block

    def shards(self) -> Iterator[Shard]:
        """Every parameter of this rank, by its Hugging Face name."""
        for path, module in self.named_modules():
            if module is self or not isinstance(module, Sharded) or (module is self.lm_head and self.config.tied):
                continue
            room = "" if module is self.lm_head else "model."
            yield from module.shards(room + path[: path.rfind(".") + 1])

    def rewire(self, pattern: str) -> None:
        """Give the layers another wiring; no tensor changes."""
        for layer, wiring in zip(self.layers, Wiring.parse(pattern, len(self.layers)).sub_blocks(), strict=True):
            layer.wiring = wiring  # type: ignore[assignment]

    def new_cache(self, slots: int, capacity: int) -> KVCache:
        """An empty cache for this rank's heads."""
        weight = self.embed_tokens.weight
        return KVCache(self.config, self.comm.size, slots, capacity, weight.device, weight.dtype)
