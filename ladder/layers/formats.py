"""Storage formats of matrices: dense here, quantized in quantized.py. A format is a subclass of `StoredWeight`."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ladder.config.quantization import DENSE, Quantization, Storage
from ladder.errors import LadderError
from ladder.layers.quantized import Quantized
from ladder.layers.shard import Piece, Shard
from ladder.layers.weight import StoredWeight


class Dense(StoredWeight):
    """A matrix as it is, in the model's dtype."""

    def __init__(
        self, outputs: int, inputs: int, bias: bool, dtype: torch.dtype, pieces: Iterable[Piece], groups: int = 1
    ) -> None:
        super().__init__(outputs, inputs, bias, dtype, pieces, groups)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype), requires_grad=False)

    def multiply(self, x: Tensor, group: int | None = None) -> Tensor:
        if group is None:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight.unflatten(0, (self.groups, -1))[group])

    def shards(self) -> Iterator[Shard]:
        for piece in self.pieces:
            here = slice(piece.at, piece.at + piece.rows.stop - piece.rows.start)
            shape, index, target = piece.shape, (piece.rows, piece.columns), self.weight.data[here]
            if piece.transposed:
                shape, index, target = shape[::-1], index[::-1], target.t()
            yield Shard(f"{piece.name}.weight", shape, index, target)
            yield from self.bias_shards(piece)

    @property
    def dense(self) -> Tensor:
        return self.weight


def new_weight(
    weights: Quantization,
    outputs: int,
    inputs: int,
    bias: bool,
    dtype: torch.dtype,
    pieces: Iterable[Piece],
    groups: int = 1,
) -> StoredWeight:
    """A matrix as its checkpoint stores it, not yet filled."""
    pieces = _joined(pieces)
    stored: dict[Storage, str] = {}
    activations = True
    for each in pieces:
        found = weights.of(each.name, "Conv1D" if each.transposed else "Linear")
        stored.setdefault(found, each.name)
        activations = activations and found.activations
    if len(stored) > 1:
        (one, name), (other, another) = list(stored.items())[:2]
        raise LadderError(f"{name} is stored as {one}, {another} as {other}: they are one matrix here, of one format")
    storage = next(iter(stored), DENSE)
    if storage == DENSE:
        return Dense(outputs, inputs, bias, dtype, pieces, groups)
    return Quantized(replace(storage, activations=activations), outputs, inputs, bias, dtype, pieces, groups)


def lay_together(one: StoredWeight, other: StoredWeight) -> bool:
    """Have two dense weights that are not filled yet lie one behind the other, so that they can be multiplied as one
    (`as_one`). False: they are not dense, or only one has a bias.
    """
    if not isinstance(one, Dense) or not isinstance(other, Dense) or (one.bias is None) != (other.bias is None):
        return False
    for first, second in ((one.weight, other.weight), (one.bias, other.bias)):
        if first is not None and second is not None:
            both = first.new_empty(len(first) + len(second), *first.shape[1:])
            first.data, second.data = both[: len(first)], both[len(first) :]
    return True


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours in the checkpoint that stay neighbours become one piece."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if (
            last is not None
            and replace(last, rows=piece.rows, at=piece.at) == piece
            and last.rows.stop == piece.rows.start
            and last.at + last.rows.stop - last.rows.start == piece.at
        ):
            found[-1] = replace(last, rows=slice(last.rows.start, piece.rows.stop))
        else:
            found.append(piece)
    return found
