"""Activations by their names in config.json."""

from torch import Tensor
from torch.nn import functional as F

_TANH = {"gelu_pytorch_tanh", "gelu_new"}


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """activation(x); gated: activation(gate) * up for x = (gate, up)."""
    gate, up = x.chunk(2, dim=-1) if gated else (x, None)
    if activation == "silu":
        y = F.silu(gate)
    elif activation == "relu":
        y = F.relu(gate)
    else:
        y = F.gelu(gate, approximate="tanh" if activation in _TANH else "none")
    return y if up is None else y * up
