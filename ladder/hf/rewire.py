"""One call: a loaded transformers model becomes a wired one."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from ladder.config.lock import wiring_of
from ladder.errors import LadderError
from ladder.hf.register import set_wiring
from ladder.hf.wire import set_staleness, wire_layers
from ladder.wiring import Wiring


def rewire(model: Any, wiring: str | Wiring | None = None, staleness: float | Sequence[float] = 1.0) -> Any:
    """Wire a loaded model in place, same parameters, same names; returns it.

    Without `wiring`: as its config says (`wiring`, or the paper's `ladder_layers`). Where a family was born parallel
    (GPT-NeoX, Falcon), a `standard` layer stays as it was born. One that has been wired may be wired anew.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's wrapping
    if not isinstance(inner, PreTrainedModel):
        raise LadderError(f"a transformers model is needed, not {type(model).__name__}")
    layers = inner.config.num_hidden_layers
    if wiring is None:
        wiring = wiring_of(vars(inner.config), layers)
    elif isinstance(wiring, str):
        wiring = Wiring.parse(wiring, layers)
    wire_layers(inner, wiring, staleness)
    set_wiring(inner.config, wiring, _plain(staleness))
    return model


def restale(model: Any, staleness: float | Sequence[float]) -> None:
    """Change how stale a wired model's layers are, from 0 (reads everything) to 1 (its wiring); one for all or each."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    set_staleness(inner, staleness)
    wiring = wiring_of(vars(inner.config), inner.config.num_hidden_layers)
    set_wiring(inner.config, wiring, _plain(staleness))


def _plain(staleness: float | Sequence[float]) -> float | list[float]:
    """As config.json can hold it: one number where all are the same."""
    values = [float(staleness)] if isinstance(staleness, int | float) else [float(value) for value in staleness]
    return values[0] if len(set(values)) == 1 else values
