"""The gated MLP."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ladder.comm.base import Comm
from ladder.config import ModelConfig
from ladder.layers.linear import GateUpLinear, RowLinear


class MLP(nn.Module):
    """This rank's term of down( silu(gate(x)) * up(x) )."""

    def __init__(self, config: ModelConfig, comm: Comm, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = GateUpLinear(config, comm, dtype)
        self.down_proj = RowLinear("down_proj", config.ffn, config.hidden, config.mlp_bias, comm, dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)
        partial: Tensor = self.down_proj(F.silu(gate) * up)
        return partial
