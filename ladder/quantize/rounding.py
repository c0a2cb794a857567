"""Matrices to codes and scales, by rounding to the nearest code.

Scales are those of compressed-tensors' own quantizers: from the least and the largest weight that share one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ladder.config.quantization import Storage
from ladder.layers.quantized import CODES, MIDDLE, numbers

# the least and the largest code, less by the zero of symmetric 4-bit codes
RANGES = {"fp8": (-448.0, 448.0), "int8": (-128.0, 127.0), "int4": (-8.0, 7.0)}


@dataclass(frozen=True)
class Rounded:
    """A matrix [outputs, inputs], or some rows of one: w = (code - zero) * scale."""

    codes: Tensor  # [outputs, inputs]: float8_e4m3fn, int8, or of int4 uint8 from 0 to 15, not packed
    scales: Tensor  # [outputs, groups], or [blocks of outputs, groups]; in the dtype that is written
    zeros: Tensor | None = None  # uint8 [outputs, groups], of asymmetric int4; without them the zero of int4 is 8

    def to(self, device: str) -> "Rounded":
        zeros = None if self.zeros is None else self.zeros.to(device)
        return Rounded(self.codes.to(device), self.scales.to(device), zeros)


def scales_of(weight: Tensor, storage: Storage, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
    """Scales, in the weight's dtype unless told, and zeros: the least and the largest weight are within the codes."""
    blocks = _blocks(weight.float(), storage)
    low, high = blocks.amin(dim=(1, 3)).clamp(max=0), blocks.amax(dim=(1, 3)).clamp(min=0)
    least, largest = RANGES[storage.kind]
    width = high - low if storage.zero else 2 * torch.maximum(-low, high)
    scales = (width / (largest - least)).to(dtype or weight.dtype)
    scales = torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)  # all weights are zero: any scale will do
    if not storage.zero:
        return scales, None
    return scales, (-low / scales.float()).round().clamp(0, largest - least).to(torch.uint8)


def round_to_nearest(
    weight: Tensor,
    storage: Storage,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Rounded:
    """Each weight as the code nearest to it; scales and zeros are `scales_of` unless given."""
    if scales is None:
        scales, zeros = scales_of(weight, storage, dtype)
    least, largest = RANGES[storage.kind]
    values = _by_block(torch.div, weight.float(), scales, storage)
    if storage.kind == "fp8":
        return Rounded(values.clamp_(least, largest).to(CODES["fp8"]), scales)
    if zeros is not None:
        values = _by_block(Tensor.add_, values, zeros.float() - MIDDLE, storage)
    values.clamp_(least, largest).round_()
    if storage.kind == "int4":
        values.add_(MIDDLE)
    # torch converts to int8 much faster than to uint8
    return Rounded(values.to(torch.int8).view(CODES[storage.kind]), scales, zeros)


def dequantized(rounded: Rounded, storage: Storage, dtype: torch.dtype) -> Tensor:
    """The matrix that readers get, computed in float32."""
    values = numbers(rounded.codes)
    if rounded.zeros is not None:
        values = _by_block(Tensor.sub_, values, rounded.zeros, storage)
    elif storage.kind == "int4":
        values -= MIDDLE
    return _by_block(Tensor.mul_, values, rounded.scales, storage).to(dtype)


def _by_block(operation: Callable[..., Tensor], values: Tensor, shared: Tensor, storage: Storage) -> Tensor:
    """`operation` of each weight, in float32, and what its block shares, [units of outputs, groups]: as of `spread`,
    which would be a matrix.
    """
    blocks = operation(_blocks(values, storage), shared.float()[:, None, :, None])
    return blocks.flatten(2).flatten(0, 1)[: values.shape[0], : values.shape[1]].contiguous()


def spread(shared: Tensor, shape: torch.Size, storage: Storage) -> Tensor:
    """Scales or zeros [units of outputs, groups] for each weight, in float32; broadcast where one serves a row."""
    found = shared.float()
    if storage.rows != 1:
        found = found.repeat_interleave(storage.rows or shape[0], dim=0)[: shape[0]]
    if storage.group:
        found = found[..., None].expand(-1, -1, storage.group).flatten(1)[:, : shape[1]]
    return found


def _blocks(weight: Tensor, storage: Storage) -> Tensor:
    """[outputs, inputs] -> [units of outputs, outputs of one, groups, inputs of one], filled up with zeros."""
    rows, columns = storage.rows or weight.shape[0], storage.group or weight.shape[1]
    fill = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
    weight = pad(weight, fill) if any(fill) else weight  # which would copy it
    return weight.view(len(weight) // rows, rows, -1, columns)
