"""One call: a loaded transformers model becomes a wired one."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ladder.config.lock import checked_ranks, ranks_of
from ladder.errors import LadderError
from ladder.hf.layer import WiredLayer
from ladder.hf.names import IN_MEMORY, mark_adapters, mark_in_memory
from ladder.hf.register import plain_type, set_wiring
from ladder.hf.stacks import as_text, named_wiring, stacks_of
from ladder.hf.wire import layers_of, set_layers_staleness, staleness_of, unwrapped, wire_layers
from ladder.wiring import Wiring

__all__ = ["IN_MEMORY", "rewire", "set_staleness"]


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
    set_layers_staleness(inner, staleness)
    before = getattr(inner.config, "staleness", 1.0)
    set_wiring(inner, configured(inner), _plain(staleness, len(layers_of(inner))), ranks_of(vars(inner.config)))
    if getattr(inner.config, "staleness", 1.0) != before:
        mark_in_memory(inner)


def _plain(staleness: float | Sequence[float], layers: int) -> float | list[float]:
    """As config.json can hold it: one number where all are the same."""
    values = staleness_of(staleness, layers)
    return values[0] if len(set(values)) == 1 else values
