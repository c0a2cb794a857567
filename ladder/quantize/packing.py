"""Rounded matrices as compressed-tensors stores them: names, shapes and packing; what config.json says of them."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ladder.config.quantization import Storage
from ladder.layers.quantized import CODES
from ladder.quantize.rounding import Rounded
from ladder.quantize.tensors import Spec

FORMATS = {"fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized"}
WORD = 8  # codes of 4 bits in an int32


def planned(shape: tuple[int, ...], dtype: torch.dtype, storage: Storage) -> dict[str, Spec]:
    """The tensors of a matrix whose scales are of that dtype, by the ends of their names."""
    outputs, inputs = shape
    groups = -(-inputs // storage.group) if storage.group else 1
    found = {"weight_scale": Spec.of(dtype, -(-outputs // storage.rows), groups)}
    if storage.kind != "int4":
        return found | {"weight": Spec.of(CODES[storage.kind], outputs, inputs)}
    found |= {"weight_packed": Spec.of(torch.int32, outputs, inputs // WORD), "weight_shape": Spec.of(torch.int64, 2)}
    if storage.zero:
        found["weight_zero_point"] = Spec.of(torch.int32, -(-outputs // WORD), groups)
    return found


def packed(rounded: Rounded, storage: Storage) -> dict[str, Tensor]:
    """The same for some rows of a matrix: some rows of each tensor, but for weight_shape, which is of the whole.

    The first row is a multiple of those that share a scale or a word.
    """
    if storage.kind != "int4":
        return {"weight": rounded.codes, "weight_scale": rounded.scales}
    found = {"weight_packed": words(rounded.codes), "weight_scale": rounded.scales}
    if rounded.zeros is not None:
        found["weight_zero_point"] = words(rounded.zeros.t()).t()
    return found


def words(codes: Tensor) -> Tensor:
    """Codes of 4 bits [n, m] -> int32 [n, m / 8], the first in the lowest bits; the last word is filled with zeros."""
    pairs = pad(codes, (0, -codes.shape[1] % WORD)).flatten().view(torch.int16)  # the first in the low byte
    return (pairs | pairs >> 4).to(torch.uint8).view(torch.int32).view(len(codes), -1)


def settings(storage: Storage, ignore: list[str]) -> dict[str, Any]:
    """The quantization_config of a checkpoint whose linear layers are stored so, but for those that are ignored."""
    weights: dict[str, Any] = {"num_bits": 4 if storage.kind == "int4" else 8, "symmetric": not storage.zero}
    weights |= {"type": "float" if storage.kind == "fp8" else "int", "dynamic": False, "strategy": "channel"}
    if storage.rows > 1:
        weights |= {"strategy": "block", "block_structure": [storage.rows, storage.group]}
    elif storage.group:
        weights |= {"strategy": "group", "group_size": storage.group}
    activations: dict[str, Any] | None = None
    if storage.activations:
        activations = {"num_bits": 8, "symmetric": True, "type": "float", "dynamic": True, "strategy": "token"}
        activations |= {"strategy": "group", "group_size": storage.group} if storage.group else {}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    form = FORMATS[storage.kind]
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ignore,
        # the format here, too: else transformers infers one, of int8 without activations another
        "config_groups": {"group_0": {**scheme, "format": form}},
    }
