"""Sharded linear layers: column (a rank has some of the outputs) and row (some of the inputs: a partial sum)."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ladder.comm.base import Comm
from ladder.config import ModelConfig
from ladder.layers.shard import Shard, part


class ColumnLinear(nn.Module):
    """y = x W^T + b for this rank's rows of one or several fused weights.

    `parts` maps each Hugging Face weight to (its rows in all, the rows this rank has), in the order they are fused.
    """

    def __init__(self, inputs: int, parts: Mapping[str, tuple[int, slice]], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = dict(parts)
        self.widths = [rows.stop - rows.start for _, rows in parts.values()]
        self.weight = nn.Parameter(torch.empty(sum(self.widths), inputs, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(self.widths), dtype=dtype), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """One output per fused weight."""
        return torch.split(F.linear(x, self.weight, self.bias), self.widths, dim=-1)

    def shards(self, parent: str) -> Iterator[Shard]:
        begin = 0
        for (name, (total, rows)), width in zip(self.parts.items(), self.widths, strict=True):
            here = slice(begin, begin + width)
            begin += width
            shape = (total, self.weight.shape[1])
            yield Shard(f"{parent}{name}.weight", shape, (rows, slice(0, shape[1])), self.weight.data[here])
            if self.bias is not None:
                yield Shard(f"{parent}{name}.bias", (total,), (rows,), self.bias.data[here])


class QKVLinear(ColumnLinear):
    """Queries, keys and values in one product. With fewer key/value heads than ranks, neighbours share a copy."""

    def __init__(self, config: ModelConfig, comm: Comm, dtype: torch.dtype) -> None:
        copies = max(1, comm.size // config.kv_heads)
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        kv = (keys, part(keys, comm.size // copies, comm.rank // copies))
        q = (queries, part(queries, comm.size, comm.rank))
        super().__init__(config.hidden, {"q_proj": q, "k_proj": kv, "v_proj": kv}, config.qkv_bias, dtype)


class GateUpLinear(ColumnLinear):
    """The two input projections of a gated MLP in one product."""

    def __init__(self, config: ModelConfig, comm: Comm, dtype: torch.dtype) -> None:
        rows = (config.ffn, part(config.ffn, comm.size, comm.rank))
        super().__init__(config.hidden, {"gate_proj": rows, "up_proj": rows}, config.mlp_bias, dtype)


class RowLinear(nn.Module):
    """This rank's term of y = sum over ranks ( x_rank W_rank^T ) + b. Rank 0 has the bias: it is added once."""

    def __init__(self, name: str, inputs: int, outputs: int, bias: bool, comm: Comm, dtype: torch.dtype) -> None:
        super().__init__()
        self.name = name
        self.inputs = inputs
        self.columns = part(inputs, comm.size, comm.rank)
        self.weight = nn.Parameter(torch.empty(outputs, inputs // comm.size, dtype=dtype), requires_grad=False)
        has_bias = bias and comm.rank == 0
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def shards(self, parent: str) -> Iterator[Shard]:
        outputs = self.weight.shape[0]
        index = (slice(0, outputs), self.columns)
        yield Shard(f"{parent}{self.name}.weight", (outputs, self.inputs), index, self.weight.data)
        if self.bias is not None:
            yield Shard(f"{parent}{self.name}.bias", (outputs,), (slice(0, outputs),), self.bias.data)
