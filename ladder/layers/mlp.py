"""The MLP."""

import torch
from torch import Tensor, nn

from ladder.comm.base import Comm
from ladder.config import ModelConfig
from ladder.layers.cache import KVCache, Metadata
from ladder.layers.formats import new_weight
from ladder.layers.norm import Norm, new_norm
from ladder.layers.ops import Ops
from ladder.layers.shard import Piece, part
from ladder.residual import ResidualStream
from ladder.wiring import SubBlock


class MLP(nn.Module):
    """The sub-block down( activation(gate(x)) * up(x) ), or down( activation(up(x)) ): this rank's term of it."""

    def __init__(
        self, config: ModelConfig, layer: int, comm: Comm, dtype: torch.dtype, norm: Norm | None = None
    ) -> None:
        """`norm`: the attention's, to share it."""
        super().__init__()
        names, prefix = config.names, f"{config.names.layers}.{layer}."
        self.activation, self.gated = config.activation, config.family_row.gated
        self.residual_scale = config.residual_scale
        mine = part(config.ffn, comm.size, comm.rank)
        width, parts = mine.stop - mine.start, 1 + self.gated
        everything = slice(0, config.hidden)
        pieces = []
        for number in range(parts):
            inside = number if len(names.up) < parts else 0  # gate and up in one matrix
            rows = slice(inside * config.ffn + mine.start, inside * config.ffn + mine.stop)
            shape = (config.ffn * parts // len(names.up), config.hidden)
            name = prefix + names.up[0 if inside else number]
            pieces.append(Piece(name, shape, rows, everything, number * width, names.transposed))
        self.up_proj = new_weight(config.weights, parts * width, config.hidden, config.mlp_bias, dtype, pieces)
        down = Piece(prefix + names.down, (config.hidden, config.ffn), everything, mine, 0, names.transposed)
        bias = config.mlp_bias and comm.rank == 0  # it is added once
        self.down_proj = new_weight(config.weights, config.hidden, width, bias, dtype, [down])
        self.norm = norm or new_norm(prefix, names.mlp_norm, config, dtype)
        self.post_norm = new_norm(prefix, names.mlp_post_norm, config, dtype)

    def forward(
        self,
        ops: Ops,
        stream: ResidualStream,
        wiring: SubBlock,
        metadata: Metadata,
        cache: KVCache | None,
        read: Tensor | None = None,
    ) -> None:
        """`read`: the product of what it reads, where the attention's is the same one."""
        y = read
        if y is None:
            y = ops.norm_project(stream, wiring.lag, self.norm, self.up_proj, "gate_up", self.activation, self.gated)
        ops.project(stream, wiring.out, y, self.down_proj, self.residual_scale, self.post_norm)
