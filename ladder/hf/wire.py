"""Walk a transformers model and wire its layers."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from ladder.errors import LadderError
from ladder.hf.families import family
from ladder.hf.layer import Place, WiredLayer, set_layer_staleness, show, wire
from ladder.wiring import ROWS, Wiring


def wire_layers(model: Any, wiring: Wiring, staleness: float | Sequence[float] = 1.0) -> None:
    """Give every layer its place in the wiring. No tensor changes."""
    config = model.config
    row = family(config.model_type)
    refuse_settings(config)
    layers = layers_of(model)
    if len(wiring.layers) != len(layers):
        raise LadderError(f"the wiring is for {len(wiring.layers)} layers, the model has {len(layers)}")
    staleness_of(staleness, len(layers))  # refused before anything is changed
    if row.answers and not any(hook is show for hook in model.base_model._forward_hooks.values()):
        model.base_model.register_forward_hook(show)
    born = ROWS["parallel"] if row.parallel(config) else None
    for index, (name, layer, rows) in enumerate(zip(wiring.layers, layers, wiring.sub_blocks(), strict=True)):
        if born is not None and name == "standard":
            rows = (born[0], born[1])
        wire(layer, Place.of(layer, row, rows, index, config))
    set_staleness(model, staleness)


def refuse_settings(config: Any) -> None:
    """Some settings of a family leave no residual stream to wire."""
    for setting, reason in family(config.model_type).refuses.items():
        if getattr(config, setting, False):
            raise LadderError(f"{config.model_type} with {setting} cannot be wired: {reason}")


def layers_of(model: Any) -> list[nn.Module]:
    """The decoder layers, in order."""
    return list(getattr(model.base_model, family(model.config.model_type).layers))


def set_staleness(model: Any, staleness: float | Sequence[float]) -> None:
    """How much of what its wiring leaves out each layer does leave out: 1 is the wiring, 0 the model as it was born.
    (`parallel` leaves nothing of the stream out: it has no way between.)
    """
    layers = layers_of(model)
    values = staleness_of(staleness, len(layers))
    if not all(isinstance(layer, WiredLayer) for layer in layers):
        raise LadderError("the model is not wired: rewire it first")
    for layer, value in zip(layers, values, strict=True):
        set_layer_staleness(layer, value)


def staleness_of(staleness: float | Sequence[float], layers: int) -> list[float]:
    """One value a layer, from one for all or from one each."""
    try:
        values = [float(staleness)] * layers  # type: ignore[arg-type]
    except (TypeError, ValueError):
        values = [float(value) for value in staleness]  # type: ignore[union-attr]
    if len(values) != layers:
        raise LadderError(f"{len(values)} values of staleness for {layers} layers")
    if wrong := [value for value in values if not 0 <= value <= 1]:
        raise LadderError(f"staleness must be from 0 to 1, not {wrong[0]}")
    return values
