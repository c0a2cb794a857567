"""One call: a loaded transformers model becomes a wired one."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from ladder.config.lock import checked_ranks, ranks_of, wiring_of
from ladder.errors import LadderError
from ladder.hf.layer import WiredLayer
from ladder.hf.names import IN_MEMORY, mark_adapters, mark_in_memory
from ladder.hf.register import plain_type, set_wiring
from ladder.hf.wire import set_layers_staleness, staleness_of, unwrapped, wire_layers
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
    (desync) depends on their number.
    """
    inner = unwrapped(model)
    if not isinstance(inner, PreTrainedModel):
        raise LadderError(f"a transformers model is needed, not {type(model).__name__}")
    config = inner.config
    plain_type(config)
    before = wiring_of(vars(config), config.num_hidden_layers)
    staleness_before = getattr(config, "staleness", 1.0)
    if wiring is None:
        staleness = staleness_before if staleness is None else staleness
        ranks = ranks_of(vars(config)) if ranks is None else ranks
        wiring = before
    elif isinstance(wiring, str):
        wiring = Wiring.parse(wiring, config.num_hidden_layers)
    staleness = 1.0 if staleness is None else staleness
    ranks, ranks_before = 1 if ranks is None else checked_ranks(ranks), ranks_of(vars(config))
    wire_layers(inner, wiring, staleness, ranks)
    own = copy.deepcopy(config)  # another model may have been made of the same object
    if hasattr(config, "quantization_config"):  # where its quantizer notes whether the weights are dequantized by now
        own.quantization_config = config.quantization_config
    for module in inner.modules():
        if getattr(module, "config", None) is config:
            module.config = own
        if isinstance(module, WiredLayer):
            module.spec = replace(module.spec, config=own)
    set_wiring(own, wiring, _plain(staleness, own.num_hidden_layers), ranks)
    if (wiring, ranks, getattr(own, "staleness", 1.0)) != (before, ranks_before, staleness_before):
        mark_in_memory(inner)
        mark_adapters(model, inner.name_or_path)
    return model


def set_staleness(model: Any, staleness: float | Sequence[float]) -> None:
    """Set the staleness of a wired model's layers, one for all or each: 0 reads everything, 1 is the wiring."""
    inner = unwrapped(model)
    set_layers_staleness(inner, staleness)
    layers, named = inner.config.num_hidden_layers, vars(inner.config)
    before = getattr(inner.config, "staleness", 1.0)
    set_wiring(inner.config, wiring_of(named, layers), _plain(staleness, layers), ranks_of(named))
    if getattr(inner.config, "staleness", 1.0) != before:
        mark_in_memory(inner)


def _plain(staleness: float | Sequence[float], layers: int) -> float | list[float]:
    """As config.json can hold it: one number where all are the same."""
    values = staleness_of(staleness, layers)
    return values[0] if len(set(values)) == 1 else values
