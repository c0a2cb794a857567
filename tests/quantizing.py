"""Quantized checkpoints made on the spot, and what they mean, read value by value from their tensors.

Nothing of the product is used here but the names of its formats.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ladder.config import ModelConfig
from ladder.config.quantization import Quantization, Storage

Tensors = dict[str, Tensor]
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs the lowest four bits of a word hold, the next four, ...


@dataclass(frozen=True)
class Recipe:
    """A format: how matrices are stored, what config.json says, and both ways."""

    storage: Storage
    settings: Mapping[str, Any]
    pack: Callable[[Tensor, Storage], Tensors]  # by the ends of the tensors' names
    unpack: Callable[[Tensors, Storage], Tensor]


def spread(shared: Tensor, rows: int, columns: int, storage: Storage) -> Tensor:
    """Scales or zeros, one for each weight."""
    unit = torch.arange(rows) // (storage.rows or rows)
    return shared[unit[:, None], torch.arange(columns) // (storage.group or columns)]


def regions(weight: Tensor, storage: Storage) -> tuple[Tensor, Tensor]:
    """The least and the largest weight of those that share a scale, [units of outputs, groups]."""
    rows, columns = storage.rows or len(weight), storage.group or weight.shape[1]
    parts = [part.aminmax(dim=1) for part in weight.split(columns, dim=1)]
    low, high = torch.stack([part.min for part in parts], 1), torch.stack([part.max for part in parts], 1)
    if rows > 1:
        low = torch.stack([part.amin(0) for part in low.split(rows)])
        high = torch.stack([part.amax(0) for part in high.split(rows)])
    return low.clamp(max=0), high.clamp(min=0)


def pack_eights(weight: Tensor, storage: Storage) -> Tensors:
    low, high = regions(weight, storage)
    scale = torch.maximum(-low, high) / (448 if storage.kind == "fp8" else 127)
    codes = weight / spread(scale, *weight.shape, storage)
    kind = torch.float8_e4m3fn if storage.kind == "fp8" else torch.int8
    name = "weight_scale_inv" if storage.layout == "fp8" else "weight_scale"
    return {
        "weight": (codes if storage.kind == "fp8" else codes.round()).to(kind),
        name: scale if storage.rows else scale.view(1),
    }


def unpack_eights(tensors: Tensors, storage: Storage) -> Tensor:
    scale = tensors.get("weight_scale", tensors.get("weight_scale_inv"))
    assert scale is not None
    return tensors["weight"].float() * spread(scale.view(-1, 1) if scale.dim() == 1 else scale,
                                              *tensors["weight"].shape, storage)  # fmt: skip


def pack_words(weight: Tensor, storage: Storage) -> Tensors:
    """Codes of 8 bits, four in an int32, the first in the lowest bits; 128 is the zero."""
    tensors = pack_eights(weight, storage)
    codes = tensors.pop("weight").long() + 128
    packed = sum(codes[:, number::4] << 8 * number for number in range(4))
    assert isinstance(packed, Tensor)
    return tensors | {"weight_packed": packed.to(torch.int32), "weight_shape": torch.tensor(weight.shape)}


def unpack_words(tensors: Tensors, storage: Storage) -> Tensor:
    packed = tensors["weight_packed"].long()
    codes = torch.stack([((packed >> 8 * number) & 255) - 128 for number in range(4)], dim=-1).flatten(1)
    return unpack_eights(tensors | {"weight": codes}, storage)


def fours(weight: Tensor, storage: Storage) -> tuple[Tensor, Tensor, Tensor]:
    """Codes from 0 to 15, scales and zeros of the same range, [outputs, inputs] and [outputs, groups]."""
    low, high = regions(weight, storage)
    scale, zero = torch.maximum(-low / 8, high / 7), torch.full_like(low, 8)
    if storage.zero:
        scale = (high - low) / 14
        zero = (-low / scale).round().clamp(1, 15)
    wide = spread(scale, *weight.shape, storage), spread(zero, *weight.shape, storage)
    return (weight / wide[0] + wide[1]).round().clamp(0, 15).int(), scale, zero.int()


def words(codes: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight neighbours in an int32; what is missing of the last eight is nothing."""
    codes = codes.transpose(dim, -1).long()
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 8))
    found = sum(codes[..., place::8] << 4 * number for number, place in enumerate(order))
    assert isinstance(found, Tensor)
    return found.to(torch.int32).transpose(dim, -1).contiguous()  # the highest bit becomes the sign


def values(packed: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    packed = packed.transpose(dim, -1).long()
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 8)
    for number, place in enumerate(order):
        out[..., place::8] = ((packed >> 4 * number) & 15).float()
    return out.transpose(dim, -1)


def pack_fours(weight: Tensor, storage: Storage) -> Tensors:
    codes, scale, zero = fours(weight, storage)
    found = {"weight_packed": words(codes, 1), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    return found | ({"weight_zero_point": words(zero, 0)} if storage.zero else {})


def unpack_fours(tensors: Tensors, storage: Storage) -> Tensor:
    rows, columns = tensors["weight_shape"].tolist()
    codes, zero = values(tensors["weight_packed"], 1)[:, :columns], torch.tensor(8.0)
    if storage.zero:
        zero = spread(values(tensors["weight_zero_point"], 0)[:rows], rows, columns, storage)
    return (codes - zero) * spread(tensors["weight_scale"], rows, columns, storage)


def pack_awq(weight: Tensor, storage: Storage) -> Tensors:
    codes, scale, zero = fours(weight, storage)
    packed = {"qweight": words(codes.t(), 1, AWQ), "qzeros": words(zero.t(), 1, AWQ)}
    return packed | {"scales": scale.t().contiguous()}


def unpack_awq(tensors: Tensors, storage: Storage) -> Tensor:
    codes, zero = values(tensors["qweight"], 1, AWQ).t(), values(tensors["qzeros"], 1, AWQ).t()
    return (codes - spread(zero, *codes.shape, storage)) * spread(tensors["scales"].t(), *codes.shape, storage)


def pack_gptq(weight: Tensor, storage: Storage) -> Tensors:
    codes, scale, zero = fours(weight, storage)
    numbers = torch.tensor([number // (storage.group or weight.shape[1]) for number in range(weight.shape[1])])
    packed = {"qweight": words(codes.t(), 0), "qzeros": words(zero.t() - 1, 1)}
    return packed | {"scales": scale.t().contiguous(), "g_idx": numbers.int()}


def unpack_gptq(tensors: Tensors, storage: Storage) -> Tensor:
    codes, zero = values(tensors["qweight"], 0).t(), values(tensors["qzeros"], 1).t() + 1
    return (codes - spread(zero, *codes.shape, storage)) * spread(tensors["scales"].t(), *codes.shape, storage)


def compressed(storage: Storage, form: str, **weights: Any) -> Recipe:
    bits, kind = (4 if storage.kind == "int4" else 8), ("float" if storage.kind == "fp8" else "int")
    weights |= {"num_bits": bits, "type": kind, "symmetric": not storage.zero}
    settings = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head", "embed_out"]}
    settings |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    settings["quantization_status"] = "compressed"
    if storage.layout == "packed":
        return Recipe(storage, settings, pack_words, unpack_words)
    if bits == 8:
        return Recipe(storage, settings, pack_eights, unpack_eights)
    return Recipe(storage, settings, pack_fours, unpack_fours)


def _recipes() -> dict[str, Recipe]:
    found = {}
    for kind, form in (("fp8", "float-quantized"), ("int8", "int-quantized")):
        storage = Storage(kind, "compressed")
        found[f"{kind}-tensor"] = compressed(replace(storage, rows=0), form, strategy="tensor")
        found[f"{kind}-channel"] = compressed(storage, form, strategy="channel")
        found[f"{kind}-group"] = compressed(replace(storage, group=32), form, strategy="group", group_size=32)
        block = replace(storage, rows=48, group=128)  # 48 divides nothing here
        found[f"{kind}-block"] = compressed(block, form, strategy="block", block_structure=[48, 128])
    storage = Storage("int8", "packed")  # what compressed-tensors chooses where activations are not quantized
    found["int8-packed"] = compressed(storage, "pack-quantized", strategy="channel")
    found["int8-packed-32"] = compressed(replace(storage, group=32), "pack-quantized", strategy="group", group_size=32)
    for zero in (False, True):
        storage, end = Storage("int4", "compressed", zero=zero), "-zero" if zero else ""
        found[f"int4-channel{end}"] = compressed(storage, "pack-quantized", strategy="channel")
        for group in (32, 64, 128):
            own = replace(storage, group=group)
            found[f"int4-{group}{end}"] = compressed(own, "pack-quantized", strategy="group", group_size=group)
    settings: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    storage = Storage("fp8", "fp8", 128, 128)
    found["deepseek"] = Recipe(storage, settings, pack_eights, unpack_eights)
    for group in (-1, 32, 64, 128):
        own = Storage("int4", "awq", max(group, 0), zero=True)
        settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
        found[f"awq-{group}"] = Recipe(own, settings, pack_awq, unpack_awq)
        for zero in (False, True):
            own = Storage("int4", "gptq", max(group, 0), zero=zero)
            settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": not zero, "desc_act": False}
            found[f"gptq-{group}{'-zero' if zero else ''}"] = Recipe(own, settings, pack_gptq, unpack_gptq)
    return found


RECIPES = _recipes()


def is_quantized(name: str, weight: Tensor, head: bool) -> bool:
    """Matrices of layers; the head where it is said."""
    table = "embed" in name or "lm_head" in name or name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight"))
    return weight.dim() == 2 and (not table or (head and name.startswith(("lm_head", "embed_out"))))


def quantized(weights: Mapping[str, Tensor], recipe: Recipe, head: bool = False) -> tuple[Tensors, Tensors]:
    """The tensors of a quantized checkpoint, and the dense ones that they mean."""
    stored, dense = dict(weights), dict(weights)
    for name, weight in weights.items():
        if is_quantized(name, weight, head):
            parts = recipe.pack(weight, recipe.storage)
            del stored[name]
            stored |= {f"{name.removesuffix('weight')}{end}": part for end, part in parts.items()}
            dense[name] = recipe.unpack(parts, recipe.storage)
            assert 0 < (dense[name] - weight).abs().max() < 0.35 * weight.abs().max()  # it is quantized, and sensibly
    return stored, dense


def with_format(config: ModelConfig, recipe: Recipe, head: bool = False) -> ModelConfig:
    """A configuration whose matrices are stored so, made without reading a quantization_config."""
    ignore = () if head else ("lm_head", "embed_out")
    return replace(config, weights=Quantization(((("Linear",), recipe.storage),), ignore))


def write(folder: Path, config: ModelConfig, tensors: Tensors, settings: Mapping[str, Any] | None = None) -> Path:
    """A checkpoint's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    raw = replace(config, weights=Quantization()).to_hf() | ({"quantization_config": settings} if settings else {})
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
