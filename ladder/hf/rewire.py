"""One call: a loaded transformers model becomes a wired one."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ladder.config.lock import checked_ranks, ranks_of, shared_norm_of
from ladder.errors import LadderError
from ladder.hf.layer import WiredLayer
from ladder.hf.layouts.layout import Branch
from ladder.hf.load import quantizer_of
from ladder.hf.names import IN_MEMORY, mark_adapters, mark_in_memory
from ladder.hf.register import plain_type, set_wiring
from ladder.hf.stacks import as_text, named_wiring, stacks_of
from ladder.hf.wire import (
    layers_of,
    refuse_part,
    set_layers_staleness,
    sharing_norm,
    staleness_of,
    unwrapped,
    wire_layers,
)
from ladder.wiring import Wiring

__all__ = ["IN_MEMORY", "rewire", "set_staleness", "share_norm"]


def rewire(
    model: Any,
    wiring: str | Wiring | None = None,
    staleness: float | Sequence[float] | None = None,
    ranks: int | None = None,
) -> Any:
    """Wire a loaded model in place, same parameters, same names; returns it.

    Without `wiring`: as its config says (`wiring`, or the paper's `ladder_layers`, `staleness` and `wiring_ranks`).
    Where a family's own layers are parallel (GPT-NeoX, Falcon), a `standard` layer stays parallel. A wired model may be
    rewired. `ranks`: compute what so many tensor-parallel ranks would; only a wiring that keeps partial sums local
    (desync) depends on their number. A model with several stacks (encoder and decoder, two towers) has the same wiring
    in each.
    """
    inner = unwrapped(model)
    if not isinstance(inner, PreTrainedModel):
        raise LadderError(f"a transformers model is needed, not {type(model).__name__}")
    refuse_part(inner)
    config = inner.config
    plain_type(config)
    before, staleness_before = configured(inner), getattr(config, "staleness", 1.0)
    if wiring is None:
        staleness = staleness_before if staleness is None else staleness
        ranks = ranks_of(vars(config)) if ranks is None else ranks
        wiring = before
    staleness = 1.0 if staleness is None else staleness
    ranks, ranks_before = 1 if ranks is None else checked_ranks(ranks), ranks_of(vars(config))
    wirings = wire_layers(inner, wiring, staleness, ranks)
    text = as_text(wirings, str(wiring))
    own_configs(inner)
    set_wiring(inner, text, _plain(staleness, len(layers_of(inner))), ranks)
    if (text, ranks, getattr(inner.config, "staleness", 1.0)) != (before, ranks_before, staleness_before):
        mark_in_memory(inner)
        mark_adapters(model, inner.name_or_path)
    return model


def configured(model: Any) -> str:
    """The wiring that a model's config names."""
    stacks = stacks_of(model)
    named = vars(model.config)
    return as_text(named_wiring(named, [(stack.layout, len(stack.layers)) for stack in stacks]), named.get("wiring"))


def own_configs(model: Any) -> None:
    """Give a model configs of its own: others may have been made of the same objects."""
    parts = [module for module in model.modules() if isinstance(getattr(module, "config", None), PreTrainedConfig)]
    configs = {id(module.config): module.config for module in parts}
    copies = dict(zip(configs, copy.deepcopy(list(configs.values())), strict=True))  # what they share, their copies do
    for key, config in configs.items():
        if hasattr(config, "quantization_config"):  # its quantizer notes there whether weights are dequantized by now
            copies[key].quantization_config = config.quantization_config
    for module in parts:
        module.config = copies[id(module.config)]
    for module in model.modules():
        if isinstance(module, WiredLayer):
            module.spec = replace(module.spec, config=copies.get(id(module.spec.config), module.spec.config))


def set_staleness(model: Any, staleness: float | Sequence[float]) -> None:
    """Set the staleness of a wired model's layers, one for all or each: 0 reads everything, 1 is the wiring."""
    inner = unwrapped(model)
    refuse_part(inner)
    set_layers_staleness(inner, staleness)
    before = getattr(inner.config, "staleness", 1.0)
    set_wiring(inner, configured(inner), _plain(staleness, len(layers_of(inner))), ranks_of(vars(inner.config)))
    if getattr(inner.config, "staleness", 1.0) != before:
        mark_in_memory(inner)
        mark_adapters(model, inner.name_or_path)


@torch.no_grad()
def share_norm(model: Any) -> Any:
    """Give every layer one norm, which attention and MLP both read through (`shared_norm`), in place; returns it. The
    function stays what it was under every wiring, up to rounding: what the MLP's norm did otherwise goes into the
    weights that read through it. With n without gains, in float64:

        W ( g' n(x) + b' ) + c  =  W diag(g'/g) ( g n(x) + b )  +  c + W b' - W diag(g'/g) b
    """
    if not isinstance(model, PreTrainedModel):
        raise LadderError(f"a transformers model is needed, not {type(model).__name__}")
    refuse_part(model)
    stacks = stacks_of(model)
    for stack in stacks:
        sharing_norm(stack.layout, model.config.model_type)
    if not stacks or shared_norm_of(vars(model.config)):
        raise LadderError(f"the layers of the {model.config.model_type} model have no two norms")
    if (method := quantizer_of(model.config)) is not None:
        raise LadderError(
            f"the weights are quantized ({method}): share the norms of the model that they were made from"
        )
    folded = [
        _folded(layer, stack.layout.attention, stack.layout.mlp, index)
        for stack in stacks
        for index, layer in enumerate(stack.layers)
    ]
    for parameter, value in (pair for pairs in folded for pair in pairs):  # nothing is changed before all is known
        parameter.copy_(value)
    wiring = configured(model)
    own_configs(model)
    model.config.shared_norm = True
    rewire(model, wiring, getattr(model.config, "staleness", 1.0), ranks_of(vars(model.config)))
    mark_in_memory(model)
    return model


def _folded(layer: nn.Module, attention: Branch, mlp: Branch, index: int) -> list[tuple[nn.Parameter, Tensor]]:
    """New values of what reads through the MLP's norm, so that it can read through the attention's."""
    shared, own = (layer.get_submodule(branch.before[0]) for branch in (attention, mlp))
    (kept, shift), (gain, other) = _affine(shared), _affine(own)
    if bool(((kept == 0) & (gain != 0)).any()):
        raise LadderError(f"a gain of layer {index}'s first norm is 0, that of its second is not: it cannot be shared")
    ratio = torch.where(kept == 0, torch.ones_like(kept), gain / kept)
    found = []
    block: Any = layer.get_submodule(mlp.block)
    modules, held = dict(block.named_modules()), dict(block.named_parameters())
    for name in mlp.reads:
        if name.endswith(".weight") and name not in held and name.removesuffix(".weight") in modules:
            raise LadderError(f"{mlp.block}.{name} of layer {index} was replaced (by an adapter?): merge it first")
    for name, weight in block.named_parameters():
        if name not in mlp.reads:
            continue
        reader = block.get_submodule(name.rpartition(".")[0])
        wide = weight.double().mT if isinstance(reader, Conv1D) else weight.double()
        found.append((weight, (wide * ratio).mT if isinstance(reader, Conv1D) else wide * ratio))
        if bool((lost := wide @ (other - ratio * shift)).any()):
            bias = getattr(reader, "bias", None)
            if bias is None:
                raise LadderError(f"{mlp.block}.{name} of layer {index} has no bias for that of its norm: it stays")
            found.append((bias, bias.double() + lost))
    return found


def _affine(norm: Any) -> tuple[Tensor, Tensor]:
    """The gain and the bias of a norm. Gemma's gain is its weight and one: a weight of zero does not silence it."""
    silent = copy.deepcopy(norm)
    for parameter in silent.parameters():
        parameter.zero_()
    gain = norm.weight.double() + float(bool(silent(torch.ones_like(norm.weight).cumsum(0)[None]).any()))
    bias = getattr(norm, "bias", None)
    return gain, torch.zeros_like(gain) if bias is None else bias.double()


def _plain(staleness: float | Sequence[float], layers: int) -> float | list[float]:
    """As config.json can hold it: one number where all are the same."""
    values = staleness_of(staleness, layers)
    return values[0] if len(set(values)) == 1 else values
