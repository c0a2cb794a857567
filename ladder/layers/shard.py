"""Which slice of a Hugging Face tensor a rank reads, and where it is copied to."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

# the types whose values convert to the model's without meaning more than themselves
FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class Shard:
    """`target` <- `whole[index]`, where `whole` is the tensor `name` of a checkpoint. Several may share a name."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    index: tuple[slice, ...]
    target: Tensor  # a view of this rank's parameter, of the slice's shape
    convert: Callable[[Tensor], Tensor] | None = None  # of the slice, before it is copied
    types: frozenset[torch.dtype] = FLOATS  # that `whole` may have
    holds: Callable[[], Tensor] | None = None  # what `whole` must be; it is compared, and not copied


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


def part(total: int, size: int, rank: int) -> slice:
    """Rank `rank`'s share of `total` rows that `size` ranks divide evenly."""
    step = total // size
    return slice(rank * step, (rank + 1) * step)
