"""Vocabulary-parallel embedding and head: each rank has a block of the vocabulary's rows."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ladder.comm.base import Comm
from ladder.config import ModelConfig
from ladder.config.quantization import DENSE
from ladder.errors import LadderError
from ladder.layers.quantized import Quantized
from ladder.layers.shard import Piece, Shard
from ladder.layers.weight import Packed


class VocabularyRows(nn.Module):
    """Rows [start, start + step) of a [vocab, hidden] table; what the last rank has beyond the table is zero."""

    def __init__(
        self, name: str, config: ModelConfig, comm: Comm, dtype: torch.dtype, weight: nn.Parameter | None = None
    ) -> None:
        """`weight`: another table's, to share it."""
        super().__init__()
        self.name, self.vocab = name, config.vocab
        self.step = -(-config.vocab // comm.size)
        self.start = min(comm.rank * self.step, config.vocab)
        if weight is None:
            weight = nn.Parameter(torch.zeros(self.step, config.hidden, dtype=dtype), requires_grad=False)
        self.weight = weight

    @property
    def count(self) -> int:
        """How many of this rank's rows are in the vocabulary."""
        return max(0, min(self.step, self.vocab - self.start))

    def shards(self) -> Iterator[Shard]:
        index = (slice(self.start, self.start + self.count), slice(0, self.weight.shape[1]))
        shape = (self.vocab, self.weight.shape[1])
        yield Shard(f"{self.name}.weight", shape, index, self.weight.data[: self.count])


class Embedding(VocabularyRows):
    """This rank's term of the embedding: the rows it has, zero for the tokens of other ranks. The first rank adds the
    learned embedding of the positions, where the family has one.
    """

    def __init__(self, config: ModelConfig, comm: Comm, dtype: torch.dtype) -> None:
        if config.weights.of(config.names.embed, "Embedding") != DENSE:
            raise LadderError(f"{config.names.embed} is quantized: only embeddings of plain floats are supported")
        super().__init__(config.names.embed, config, comm, dtype)
        self.scale = config.embedding_scale
        if config.family_row.root_embedding:  # rounded, as the families' own code does
            self.scale = float(torch.tensor(self.scale, dtype=dtype, device="cpu"))
        self.positions_name = config.names.positions
        self.positions: nn.Parameter | None = None
        if self.positions_name is not None and comm.rank == 0:
            self.positions = nn.Parameter(torch.empty(config.context, config.hidden, dtype=dtype), requires_grad=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[rows] ids and their positions -> [rows, hidden] partial sum."""
        local = tokens - self.start
        mine = (local >= 0) & (local < self.step)
        x = F.embedding(local.where(mine, 0), self.weight).where(mine.unsqueeze(-1), 0)
        x = x if self.scale == 1 else x * self.scale
        # what fills up a batch may stand beyond the context
        return x if self.positions is None else x + self.positions[positions.clamp(max=len(self.positions) - 1)]

    def shards(self) -> Iterator[Shard]:
        yield from super().shards()
        if self.positions is not None:
            shape = tuple(self.positions.shape)
            yield Shard(f"{self.positions_name}.weight", shape, tuple(map(slice, shape)), self.positions.data)


class Head(VocabularyRows):
    """This rank's block of the logits: cap * tanh( x W^T / divisor / cap ), or without a cap x W^T / divisor. Keeps the
    protocol `Weight`.
    """

    bias = None

    def __init__(self, config: ModelConfig, comm: Comm, dtype: torch.dtype, weight: nn.Parameter | None) -> None:
        storage = DENSE if weight is not None else config.weights.of(config.names.head)
        if storage != DENSE:  # the table itself has no rows then
            weight = nn.Parameter(torch.empty(0, config.hidden, dtype=dtype), requires_grad=False)
        super().__init__(config.names.head, config, comm, dtype, weight)
        self.divisor, self.cap = config.logit_divisor, config.logit_softcap
        self.outputs, self.inputs, self.dtype = self.step, config.hidden, dtype
        self.quantized: Quantized | None = None
        if storage != DENSE:
            shape, mine = (config.vocab, config.hidden), slice(self.start, self.start + self.count)
            piece = Piece(self.name, shape, mine, slice(0, config.hidden), 0)
            self.quantized = Quantized(storage, self.step, config.hidden, False, dtype, [piece])

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., step]; joined over the ranks and cut to the vocabulary, these are the logits."""
        return self.finish(self.multiply(x))

    def multiply(self, x: Tensor, group: int | None = None) -> Tensor:
        return F.linear(x, self.weight) if self.quantized is None else self.quantized.multiply(x)

    @property
    def dense(self) -> Tensor | None:
        return self.weight if self.quantized is None else None

    @property
    def packed(self) -> Packed | None:
        return None if self.quantized is None else self.quantized.packed

    def shards(self) -> Iterator[Shard]:
        return super().shards() if self.quantized is None else iter(())  # `quantized` has its own

    def finish(self, product: Tensor) -> Tensor:
        """The logits from x W^T."""
        product = product if self.divisor == 1 else product / self.divisor
        return product if self.cap is None else self.cap * torch.tanh(product / self.cap)
