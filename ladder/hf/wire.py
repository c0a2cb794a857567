"""Walk a transformers model and wire its layers."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ladder.config.lock import shared_norm_of
from ladder.errors import LadderError
from ladder.hf.families import LAYOUTS, LayerLayout, is_parallel, layout_of
from ladder.hf.layer import LayerSpec, RankSlice, RankSlices, WiredLayer, set_layer_staleness, unwrap_states, wire_layer
from ladder.wiring import ROWS, Out, SubBlock, Wiring


def wire_layers(model: Any, wiring: Wiring, staleness: float | Sequence[float] = 1.0, ranks: int = 1) -> None:
    """Wire every layer, as `ranks` ranks would compute it. No tensor changes."""
    config = model.config
    layout = layout_of(config.model_type)
    if shared_norm_of(vars(config)):
        layout = sharing_norm(layout, config.model_type)
    refuse_settings(config)
    layers = layers_of(model)
    if len(wiring.layers) != len(layers):
        raise LadderError(f"the wiring is for {len(wiring.layers)} layers, the model has {len(layers)}")
    # refused before anything is changed
    slices: Sequence[RankSlices] = [(None, None)] * len(layers)
    if ranks > 1:
        refuse_ranks(config, ranks)
        slices = rank_slices(wiring, ranks)
    _refuse_staleness(wiring.sub_blocks(), staleness_of(staleness, len(layers)), ranks)
    if layout.returns_weights and not any(hook is unwrap_states for hook in model.base_model._forward_hooks.values()):
        model.base_model.register_forward_hook(unwrap_states)
    born = ROWS["parallel"] if is_parallel(config) else None
    for index, (name, layer, rows) in enumerate(zip(wiring.layers, layers, wiring.sub_blocks(), strict=True)):
        for norm in set(layout_of(config.model_type).mlp.before) - set(layout.mlp.before):
            layer._modules.pop(norm, None)  # its config.json has no such norm
        if born is not None and name == "standard":
            rows = (born[0], born[1])
        wire_layer(layer, LayerSpec.of(layer, layout, rows, index, config, ranks, slices[index]))
    set_layers_staleness(model, staleness)


def sharing_norm(layout: LayerLayout, model_type: str) -> LayerLayout:
    """The layout where a layer's MLP reads through the attention's norm, and has none of its own."""
    if len(layout.attention.before) != 1 or len(layout.mlp.before) != 1:
        raise LadderError(f"shared_norm is not for {model_type}: it is for families with a norm before each block")
    return replace(layout, mlp=replace(layout.mlp, before=layout.attention.before))


def refuse_ranks(config: Any, ranks: int) -> None:
    """Refuse a family whose sub-blocks cannot be divided among ranks, and a number of ranks that does not divide it."""
    if not layout_of(config.model_type).divisible:
        known = ", ".join(name for name, row in LAYOUTS.items() if row.divisible)
        raise LadderError(f"{config.model_type} cannot be divided among emulated ranks: those that can are {known}")
    heads, ffn = config.num_attention_heads, config.intermediate_size
    kv = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks or ffn % ranks or (kv % ranks and ranks % kv):
        what = f"{heads} heads, {kv} key/value heads and ffn {ffn}"
        raise LadderError(f"{ranks} ranks cannot share {what} evenly: choose a divisor of them")


def check_ranks(wiring: Wiring, ranks: int) -> None:
    """Refuse to train a wiring that depends on the TP degree without that degree."""
    if ranks > 1:
        rank_slices(wiring, ranks)
    elif wiring.local:
        raise LadderError(
            f"{str(wiring)!r} keeps partial sums local, which is another model at every TP degree: give --ranks, the "
            "degree that it is for"
        )


def rank_slices(wiring: Wiring, ranks: int) -> list[RankSlices]:
    """How each sub-block is divided among the ranks: not at all where all read the same, and their partial sums are
    reduced at once. Refuses a wiring that ends with drift: transformers' head has one stream to read.
    """
    in_flight: deque[bool] = deque()  # for each all-reduce: whether it carries drift
    drift = False
    found: list[RankSlice | None] = []
    for block in (half for layer in wiring.sub_blocks() for half in layer):
        while len(in_flight) > block.lag:
            in_flight.popleft()
        alike = not drift and not any(in_flight)
        found.append(None if alike and block.out is not Out.LOCAL else RankSlice(ranks, alike))
        if block.out is Out.LOCAL:
            drift = True
        elif block.out is Out.REDUCE:
            in_flight.append(drift)
            drift = False
    if drift:
        raise LadderError(
            f"wiring {str(wiring)!r} ends with partial sums that are kept local, so that each of {ranks} ranks would "
            "have other logits: choose one whose last MLP reduces"
        )
    return list(zip(found[::2], found[1::2], strict=True))


def _refuse_staleness(rows: Sequence[tuple[SubBlock, SubBlock]], values: Sequence[float], ranks: int) -> None:
    for index, (blocks, value) in enumerate(zip(rows, values, strict=True)):
        if ranks > 1 and value != 1 and any(block.out is Out.LOCAL for block in blocks):
            raise LadderError(
                f"layer {index} keeps partial sums local (desync), which staleness cannot undo: its staleness must "
                f"be 1, not {value}"
            )


def refuse_settings(config: Any) -> None:
    """Refuse settings that leave no residual stream to wire."""
    for setting, reason in layout_of(config.model_type).unsupported.items():
        if getattr(config, setting, False):
            raise LadderError(f"{config.model_type} with {setting} cannot be wired: {reason}")


def unwrapped(model: Any) -> Any:
    """The transformers model inside PEFT's model or a side network's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def layers_of(model: Any) -> list[nn.Module]:
    """The decoder layers, in order."""
    return list(getattr(model.base_model, layout_of(model.config.model_type).layers))


def set_layers_staleness(model: Any, staleness: float | Sequence[float]) -> None:
    """How much each layer leaves out of what its wiring leaves out: 1 is the wiring, 0 the original model.
    (`parallel` leaves nothing of the stream out: staleness does not change it.)
    """
    layers = layers_of(model)
    values = staleness_of(staleness, len(layers))
    specs = [layer.spec for layer in layers if isinstance(layer, WiredLayer)]
    if len(specs) != len(layers):
        raise LadderError("the model is not wired: rewire it first")
    _refuse_staleness([spec.wiring for spec in specs], values, specs[0].ranks)
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
