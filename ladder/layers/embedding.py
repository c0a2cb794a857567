"""Vocabulary-parallel embedding and head: each rank has a block of the vocabulary's rows."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ladder.comm.base import Comm
from ladder.layers.shard import Shard


class VocabularyRows(nn.Module):
    """Rows [start, start + step) of a [vocab, hidden] table; what the last rank has beyond the table is zero."""

    def __init__(
        self,
        name: str,
        vocab: int,
        hidden: int,
        comm: Comm,
        dtype: torch.dtype,
        weight: nn.Parameter | None = None,  # another table's, to share it
    ) -> None:
        super().__init__()
        self.name = name
        self.vocab = vocab
        self.step = -(-vocab // comm.size)
        self.start = min(comm.rank * self.step, vocab)
        if weight is None:
            weight = nn.Parameter(torch.zeros(self.step, hidden, dtype=dtype), requires_grad=False)
        self.weight = weight

    def shards(self, parent: str) -> Iterator[Shard]:
        stop = min(self.start + self.step, self.vocab)
        hidden = self.weight.shape[1]
        target = self.weight.data[: stop - self.start]
        index = (slice(self.start, stop), slice(0, hidden))
        yield Shard(f"{parent}{self.name}.weight", (self.vocab, hidden), index, target)


class Embedding(VocabularyRows):
    """This rank's term of the embedding: the rows it has, zero for the tokens of other ranks."""

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] ids -> [..., hidden] partial sum."""
        local = tokens - self.start
        mine = (local >= 0) & (local < self.step)
        return F.embedding(local.where(mine, 0), self.weight).where(mine.unsqueeze(-1), 0)


class Head(VocabularyRows):
    """This rank's block of the logits."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., step]; joined over the ranks and cut to the vocabulary, these are the logits."""
        return F.linear(x, self.weight)
