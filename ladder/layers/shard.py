"""Which slice of a Hugging Face tensor a rank reads, and where it is copied to; and what all storage formats share."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shard:
    """`target` <- `whole[index]`, where `whole` is the tensor `name` of a checkpoint. Several may share a name."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    index: tuple[slice, ...]
    target: Tensor  # a view of this rank's parameter, of the slice's shape


@dataclass(frozen=True)
class Piece:
    """Where some rows of a rank's matrix come from: `rows` x `columns` of the checkpoint's matrix `name`."""

    name: str  # without its suffix: ...q_proj
    shape: tuple[int, int]  # of the checkpoint's matrix, [outputs, inputs]
    rows: slice
    columns: slice
    at: int  # the first of the rank's rows that they become
    transposed: bool = False  # the checkpoint has it as [inputs, outputs]


@runtime_checkable
class Sharded(Protocol):
    """A module with parameters: the class that fuses or splits a weight also says how."""

    def shards(self) -> Iterator[Shard]: ...


class StoredWeight(nn.Module):
    """One rank's share of a matrix in some storage format: what all formats have. They keep the protocol `Weight`."""

    def __init__(
        self, outputs: int, inputs: int, bias: bool, dtype: torch.dtype, pieces: Iterable[Piece], groups: int = 1
    ) -> None:
        super().__init__()
        self.outputs, self.inputs, self.groups = outputs, inputs, groups
        self.pieces = tuple(pieces)
        added = nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False) if bias else None
        self.bias: nn.Parameter | None = added

    def multiply(self, x: Tensor, group: int | None = None) -> Tensor:
        raise NotImplementedError

    def multiply_into(self, x: Tensor, out: Tensor) -> None:
        out.copy_(self.multiply(x))

    def shards(self) -> Iterator[Shard]:
        raise NotImplementedError

    @property
    def dense(self) -> Tensor | None:
        return None


def part(total: int, size: int, rank: int) -> slice:
    """Rank `rank`'s share of `total` rows that `size` ranks divide evenly."""
    step = total // size
    return slice(rank * step, (rank + 1) * step)
