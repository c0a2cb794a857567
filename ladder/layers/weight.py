"""A matrix however it is stored: how it multiplies, and what every storage format has. formats.py has the formats.

Code outside a format touches the stored tensor only through `dense`, which is for kernels that read it as it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from ladder.layers.shard import Piece, Shard


class Weight(Protocol):
    """One rank's share of a matrix [outputs, inputs] and of its bias; or of `groups` matrices, one after the other."""

    outputs: int  # of all groups together
    inputs: int

    def multiply(self, x: Tensor, group: int | None = None) -> Tensor:
        """x W^T + b, [..., inputs] -> [..., outputs]; or of one group."""
        ...

    def multiply_into(self, x: Tensor, out: Tensor) -> None:
        """`multiply` with its result in `out`."""
        ...

    def shards(self) -> Iterator[Shard]: ...

    @property
    def dense(self) -> Tensor | None:
        """The matrix itself, [outputs, inputs], for kernels that read it so; None: `multiply` is the only way."""
        ...

    @property
    def bias(self) -> Tensor | None: ...


class StoredWeight(nn.Module, ABC):
    """One rank's share of a matrix in some storage format: what all formats have. They keep the protocol `Weight`."""

    def __init__(
        self, outputs: int, inputs: int, bias: bool, dtype: torch.dtype, pieces: Iterable[Piece], groups: int = 1
    ) -> None:
        super().__init__()
        self.outputs, self.inputs, self.groups = outputs, inputs, groups
        self.pieces = tuple(pieces)
        added = nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False) if bias else None
        self.bias: nn.Parameter | None = added

    @abstractmethod
    def multiply(self, x: Tensor, group: int | None = None) -> Tensor: ...

    def multiply_into(self, x: Tensor, out: Tensor) -> None:
        out.copy_(self.multiply(x))

    @abstractmethod
    def shards(self) -> Iterator[Shard]: ...

    def bias_shards(self, piece: Piece) -> Iterator[Shard]:
        """The bias of a piece, where there is one."""
        if self.bias is not None:
            here = slice(piece.at, piece.at + piece.rows.stop - piece.rows.start)
            yield Shard(f"{piece.name}.bias", piece.shape[:1], (piece.rows,), self.bias.data[here])

    @property
    def dense(self) -> Tensor | None:
        return None
