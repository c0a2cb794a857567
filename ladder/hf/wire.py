"""Walk a transformers model and wire its layers."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import nn

from ladder.errors import LadderError
from ladder.hf.families import FAMILIES, family
from ladder.hf.layer import Place, Share, Shares, WiredLayer, set_layer_staleness, show, wire
from ladder.wiring import ROWS, Out, SubBlock, Wiring


def wire_layers(model: Any, wiring: Wiring, staleness: float | Sequence[float] = 1.0, ranks: int = 1) -> None:
    """Give every layer its place in the wiring, as `ranks` ranks would compute it. No tensor changes."""
    config = model.config
    row = family(config.model_type)
    refuse_settings(config)
    layers = layers_of(model)
    if len(wiring.layers) != len(layers):
        raise LadderError(f"the wiring is for {len(wiring.layers)} layers, the model has {len(layers)}")
    # refused before anything is changed
    shares: Sequence[Shares] = [(None, None)] * len(layers)
    if ranks > 1:
        refuse_ranks(config, ranks)
        shares = shares_of(wiring, ranks)
    _refuse_staleness(wiring.sub_blocks(), staleness_of(staleness, len(layers)), ranks)
    if row.answers and not any(hook is show for hook in model.base_model._forward_hooks.values()):
        model.base_model.register_forward_hook(show)
    born = ROWS["parallel"] if row.parallel(config) else None
    for index, (name, layer, rows) in enumerate(zip(wiring.layers, layers, wiring.sub_blocks(), strict=True)):
        if born is not None and name == "standard":
            rows = (born[0], born[1])
        wire(layer, Place.of(layer, row, rows, index, config, ranks, shares[index]))
    set_staleness(model, staleness)


def refuse_ranks(config: Any, ranks: int) -> None:
    """A family whose sub-blocks are no plain sums over ranks, and a number of ranks that cannot share the model."""
    if not family(config.model_type).shareable:
        known = ", ".join(name for name, row in FAMILIES.items() if row.shareable)
        raise LadderError(f"{config.model_type} cannot be shared by emulated ranks: those that can are {known}")
    heads, ffn = config.num_attention_heads, config.intermediate_size
    kv = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks or ffn % ranks or (kv % ranks and ranks % kv):
        what = f"{heads} heads, {kv} key/value heads and ffn {ffn}"
        raise LadderError(f"{ranks} ranks cannot share {what} evenly: choose a divisor of them")


def check_ranks(wiring: Wiring, ranks: int) -> None:
    """Refuse to learn a wiring that the ranks it is for would not compute."""
    if ranks > 1:
        shares_of(wiring, ranks)
    elif wiring.local:
        raise LadderError(
            f"{str(wiring)!r} keeps sums on their ranks, and on one rank is the standard model: give --ranks, the TP "
            "degree that it is for"
        )


def shares_of(wiring: Wiring, ranks: int) -> list[Shares]:
    """How each sub-block is divided among the ranks: not at all where all read the same, and what they leave is summed
    at once. Refuses a wiring that ends with drift: transformers' head has one stream to read.
    """
    wire: deque[bool] = deque()  # the sums on the wire: whether they carry drift
    drift = False
    found: list[Share | None] = []
    for block in (half for layer in wiring.sub_blocks() for half in layer):
        while len(wire) > block.lag:
            wire.popleft()
        alike = not drift and not any(wire)
        found.append(None if alike and block.out is not Out.LOCAL else Share(ranks, alike))
        if block.out is Out.LOCAL:
            drift = True
        elif block.out is Out.REDUCE:
            wire.append(drift)
            drift = False
    if drift:
        raise LadderError(
            f"wiring {str(wiring)!r} ends with sums that are kept local, so that each of {ranks} ranks would answer "
            "from a stream of its own: choose one whose last MLP reduces"
        )
    return list(zip(found[::2], found[1::2], strict=True))


def _refuse_staleness(rows: Sequence[tuple[SubBlock, SubBlock]], values: Sequence[float], ranks: int) -> None:
    for index, (blocks, value) in enumerate(zip(rows, values, strict=True)):
        if ranks > 1 and value != 1 and any(block.out is Out.LOCAL for block in blocks):
            raise LadderError(
                f"layer {index} keeps sums local (desync), which leads nowhere near the standard model: its staleness "
                f"must be 1, not {value}"
            )


def refuse_settings(config: Any) -> None:
    """Some settings of a family leave no residual stream to wire."""
    for setting, reason in family(config.model_type).refuses.items():
        if getattr(config, setting, False):
            raise LadderError(f"{config.model_type} with {setting} cannot be wired: {reason}")


def inside(model: Any) -> Any:
    """The transformers model in PEFT's wrapping, or in a side network's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def layers_of(model: Any) -> list[nn.Module]:
    """The decoder layers, in order."""
    return list(getattr(model.base_model, family(model.config.model_type).layers))


def set_staleness(model: Any, staleness: float | Sequence[float]) -> None:
    """How much of what its wiring leaves out each layer does leave out: 1 is the wiring, 0 the model as it was born.
    (`parallel` leaves nothing of the stream out: it has no way between.)
    """
    layers = layers_of(model)
    values = staleness_of(staleness, len(layers))
    places = [layer.place for layer in layers if isinstance(layer, WiredLayer)]
    if len(places) != len(layers):
        raise LadderError("the model is not wired: rewire it first")
    _refuse_staleness([place.wiring for place in places], values, places[0].ranks)
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
