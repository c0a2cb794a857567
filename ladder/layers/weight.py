"""A matrix however it is stored: how it multiplies, and what every storage format has. formats.py has the formats.

Code outside a format touches the stored tensors only through `dense` and `packed`, which are for kernels.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ladder.layers.shard import Piece, Shard

RUN = 16  # inputs of 4 bits whose codes are the low halves of neighbouring bytes; the next as many are the high halves


@dataclass(frozen=True)
class Packed:
    """A quantized matrix as kernels read it: w[o, i] = (code[o, i] - zero[o, i // group]) * scale[o, i // group]."""

    codes: Tensor  # [outputs, inputs]; of 4 bits [outputs, inputs / 2]: input i and input i + RUN of 2 RUN in a byte
    scales: Tensor  # [outputs, groups]
    zeros: Tensor | None  # [outputs, groups] of 4 bits; None: 8 of those, 0 of others
    bits: int  # 8 or 4
    group: int  # inputs that share a scale
    activations: bool = False  # products may take fp8 activations
    rows: int = 1  # outputs that share their scales: so many from the first on, the next as many, ...

    @property
    def inputs(self) -> int:
        return self.codes.shape[1] * 8 // self.bits


class Weight(Protocol):
    """One rank's share of a matrix [outputs, inputs] and of its bias; or of `groups` matrices, one after the other."""

    outputs: int  # of all groups together
    inputs: int
    dtype: torch.dtype  # of the model

    def multiply(self, x: Tensor, group: int | None = None) -> Tensor:
        """x W^T + b, [..., inputs] -> [..., outputs]; or of one group."""
        ...

    def shards(self) -> Iterator[Shard]: ...

    @property
    def dense(self) -> Tensor | None:
        """The matrix itself, [outputs, inputs], for kernels that read it so; None: `multiply` is the only way."""
        ...

    @property
    def packed(self) -> Packed | None:
        """The matrix for kernels that dequantize it; None: it is not quantized, or not in a form that they read."""
        ...

    @property
    def bias(self) -> Tensor | None: ...


@dataclass(frozen=True)
class AsOne:
    """Two dense matrices with the same inputs as one: the first has `first` rows of it."""

    matrix: Tensor
    bias: Tensor | None
    first: int


def as_one(one: Weight, other: Weight) -> AsOne | None:
    """Two weights that lie one behind the other in memory (`formats.lay_together`), and so do their biases; None: they
    do not.
    """
    if one.dense is None or other.dense is None or (one.bias is None) != (other.bias is None):
        return None
    matrix = _behind(one.dense, other.dense)
    bias = None if one.bias is None or other.bias is None else _behind(one.bias, other.bias)
    if matrix is None or (one.bias is not None and bias is None):
        return None
    return AsOne(matrix, bias, len(one.dense))


def _behind(one: Tensor, other: Tensor) -> Tensor | None:
    """Both as one tensor, if the second begins where the first ends."""
    end = one.data_ptr() + one.numel() * one.element_size()
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr() or end != other.data_ptr():
        return None
    return one.detach().as_strided((len(one) + len(other), *one.shape[1:]), one.stride())


class StoredWeight(nn.Module, ABC):
    """One rank's share of a matrix in some storage format: what all formats have. They keep the protocol `Weight`."""

    def __init__(
        self, outputs: int, inputs: int, bias: bool, dtype: torch.dtype, pieces: Iterable[Piece], groups: int = 1
    ) -> None:
        super().__init__()
        self.outputs, self.inputs, self.groups, self.dtype = outputs, inputs, groups, dtype
        self.pieces = tuple(pieces)
        added = nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False) if bias else None
        self.bias: nn.Parameter | None = added

    @abstractmethod
    def multiply(self, x: Tensor, group: int | None = None) -> Tensor: ...

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

    @property
    def packed(self) -> Packed | None:
        return None
