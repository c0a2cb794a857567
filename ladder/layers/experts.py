"""The MLP of a mixture of experts."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ladder.comm.base import Comm
from ladder.config import ModelConfig
from ladder.layers.activation import activate
from ladder.layers.cache import KVCache, Metadata
from ladder.layers.formats import Dense, new_weight
from ladder.layers.norm import Norm, new_norm
from ladder.layers.ops import Ops
from ladder.layers.shard import Piece, part
from ladder.residual import ResidualStream
from ladder.wiring import SubBlock


class ExpertMLP(nn.Module):
    """The sub-block sum over the chosen experts e of p_e down_e( activation(gate_e(x)) * up_e(x) ): this rank's term.

    p = softmax( router(x) ) in float32, of which the top_k largest are chosen, and made to add up to one where the
    family does so. Each rank has a slice of every expert's inner width; or, `expert_parallel`, some experts as a whole:
    the results join the same partial sum, so the wiring does not change.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        comm: Comm,
        dtype: torch.dtype,
        expert_parallel: bool = False,
        norm: Norm | None = None,
    ) -> None:
        """`norm`: the attention's, to share it."""
        super().__init__()
        experts = config.experts
        assert experts is not None
        names, prefix, hidden = config.names, f"{config.names.layers}.{layer}.", config.hidden
        self.activation, self.residual_scale = config.activation, config.residual_scale
        self.top_k, self.normalize, self.count = experts.top_k, experts.normalize, experts.count
        mine, inner = slice(0, experts.count), part(experts.ffn, comm.size, comm.rank)
        if expert_parallel:
            mine, inner = part(experts.count, comm.size, comm.rank), slice(0, experts.ffn)
        self.first, self.local = mine.start, mine.stop - mine.start  # experts of this rank
        self.width = inner.stop - inner.start
        everything = slice(0, hidden)
        router = Piece(prefix + names.router, (experts.count, hidden), slice(0, experts.count), everything, 0)
        self.router = Dense(experts.count, hidden, False, dtype, [router])
        up, down = [], []
        for number, expert in enumerate(range(mine.start, mine.stop)):
            for half, name in enumerate(names.expert_up):
                at, shape = (2 * number + half) * self.width, (experts.ffn, hidden)
                up.append(Piece(prefix + name.format(expert), shape, inner, everything, at))
            name, shape = prefix + names.expert_down.format(expert), (hidden, experts.ffn)
            down.append(Piece(name, shape, everything, inner, number * hidden))
        self.up_proj = new_weight(config.weights, len(down) * 2 * self.width, hidden, False, dtype, up, len(down))
        self.down_proj = new_weight(config.weights, len(down) * hidden, self.width, False, dtype, down, len(down))
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
        """`read` is for layers without experts: see `Attention`."""
        ops.experts(stream, wiring.out, self, ops.norm(stream, wiring.lag, self.norm))

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row: the chosen experts' numbers [rows, top_k] and weights, float32."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return chosen(F.linear(x.to(wide), self.router.dense.to(wide)), self.top_k, self.normalize)

    def apply_experts(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """This rank's term, expert by expert. The reference implementation, and what prefill uses."""
        y = torch.zeros_like(x)
        for expert in range(self.local):
            rows, place = torch.where(numbers == self.first + expert)
            hidden = activate(self.up_proj.multiply(x[rows], expert), self.activation, gated=True)
            part = self.down_proj.multiply(hidden, expert) * weights[rows, place, None]
            y = y.index_add(0, rows, part.to(y.dtype))
        return y


def chosen(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The numbers and weights of the `top_k` experts that the router prefers, [rows, top_k] each."""
    shares = F.softmax(logits, dim=-1)
    weights, numbers = torch.topk(shares, top_k, dim=-1)
    return numbers, weights / weights.sum(-1, keepdim=True) if normalize else weights
