"""Walk a transformers model and wire its layers."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from torch import nn

from ladder.config.lock import shared_norm_of
from ladder.errors import LadderError
from ladder.hf.families import is_parallel, known_families, layouts_of
from ladder.hf.layer import LayerSpec, WiredLayer, set_layer_staleness, unwrap_states, wire_layer
from ladder.hf.layouts.layout import LayerLayout
from ladder.hf.ranks import RankSlice, RankSlices
from ladder.hf.stacks import Stack, parse_each, stacks_of
from ladder.wiring import ROWS, Out, Row, Wiring

PART = "_part_of"  # a model's attribute: the class of the model that it is in


def wire_layers(
    model: Any, wiring: str | Wiring, staleness: float | Sequence[float] = 1.0, ranks: int = 1
) -> list[Wiring]:
    """Wire every layer of every stack, as `ranks` ranks would compute it. No tensor changes. Returns the stacks'
    wirings.
    """
    refuse_settings(model.config)
    stacks = stacks_of(model)
    if not stacks:
        raise LadderError(f"the {model.config.model_type} model has no layers to wire")
    unread: set[str] = set()  # norms that a config.json with one norm a layer has not
    if shared_norm_of(vars(model.config)):
        unread = {name for stack in stacks for name in stack.layout.mlp.before}
        stacks = [replace(stack, layout=sharing_norm(stack.layout, model.config.model_type)) for stack in stacks]
    wirings = parse_each(wiring, [(stack.layout, len(stack.layers)) for stack in stacks])
    # refused before anything is changed
    if ranks > 1:
        refuse_ranks(model.config, ranks)
    tables = [each.layer_blocks(len(stack.layout.branches)) for stack, each in zip(stacks, wirings, strict=True)]
    slices = [_stack_slices(stack, each, ranks) for stack, each in zip(stacks, wirings, strict=True)]
    values = staleness_of(staleness, len(layers_of(model)))
    _refuse_staleness([rows for table in tables for rows in table], values, ranks)
    for stack, each, table, parts in zip(stacks, wirings, tables, slices, strict=True):
        for layer, norm in product(stack.layers, unread):
            layer._modules.pop(norm, None)
        _wire_stack(stack, each, table, parts, ranks)
    set_layers_staleness(model, staleness)
    return wirings


def _stack_slices(stack: Stack, wiring: Wiring, ranks: int) -> list[RankSlices]:
    if ranks == 1 or stack.layout.post_norm:  # whose rows reduce every partial sum at once: all ranks read the same
        return [()] * len(stack.layers)
    return rank_slices(wiring, ranks, len(stack.layout.branches))


def _wire_stack(stack: Stack, wiring: Wiring, table: Sequence[Row], slices: Sequence[RankSlices], ranks: int) -> None:
    layout, owner, count = stack.layout, stack.owner, len(stack.layers)
    if layout.returns and not any(hook is unwrap_states for hook in owner._forward_hooks.values()):
        owner.register_forward_hook(unwrap_states)
    ranks = 1 if layout.post_norm else ranks
    for index, (name, layer, rows) in enumerate(zip(wiring.layers, stack.layers, table, strict=True)):
        rows, last = row_of(stack, name, rows), index + 1 == count
        wire_layer(layer, LayerSpec.of(layer, layout, rows, index, last, stack.config, ranks, slices[index]))


def row_of(stack: Stack, name: str, blocks: Row) -> Row:
    """A layer's sub-blocks by the name of its row: where layers are born parallel, a standard one stays so."""
    return ROWS["parallel"] if name == "standard" and is_parallel(stack.config) else blocks


def refuse_part(model: Any) -> None:
    """Refuse a model inside another one, whose config would not learn of it."""
    if (whole := vars(model).get(PART)) is not None:
        raise LadderError(
            f"this {type(model).__name__} is a part of a {whole}, which would be saved and named as if nothing had "
            "changed: give the whole model"
        )


def sharing_norm(layout: LayerLayout, model_type: str) -> LayerLayout:
    """The layout where a layer's MLP reads through the attention's norm, and has none of its own."""
    if len(layout.attention.before) != 1 or len(layout.mlp.before) != 1 or layout.cross is not None:
        raise LadderError(f"shared_norm is not for {model_type}: it is for families with a norm before each block")
    return replace(layout, mlp=replace(layout.mlp, before=layout.attention.before))


def refuse_ranks(config: Any, ranks: int) -> None:
    """Refuse a family whose sub-blocks cannot be divided among ranks, and a number of ranks that does not divide it."""
    for layout in layouts_of(config.model_type):
        if not layout.divisible and not layout.post_norm:
            known = ", ".join(name for name in known_families() if all(row.divisible for row in layouts_of(name)))
            raise LadderError(f"{config.model_type} cannot be divided among emulated ranks: those that can are {known}")
        for part in layout.parts(config):
            _refuse_uneven(layout, part, ranks)


def _refuse_uneven(layout: LayerLayout, config: Any, ranks: int) -> None:
    heads, ffn = getattr(config, layout.heads), layout.width(config)
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


def rank_slices(wiring: Wiring, ranks: int, count: int = 2) -> list[RankSlices]:
    """How each sub-block is divided among the ranks: not at all where all read the same, and their partial sums are
    reduced at once. Refuses a wiring that ends with drift: transformers' head has one stream to read. `count`: the
    sub-blocks of a layer.
    """
    in_flight: deque[bool] = deque()  # for each all-reduce: whether it carries drift
    drift = False
    found: list[RankSlice | None] = []
    for block in (part for layer in wiring.layer_blocks(count) for part in layer):
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
    return [tuple(found[at : at + count]) for at in range(0, len(found), count)]


def _refuse_staleness(rows: Sequence[Row], values: Sequence[float], ranks: int) -> None:
    for index, (blocks, value) in enumerate(zip(rows, values, strict=True)):
        if ranks > 1 and value != 1 and any(block.out is Out.LOCAL for block in blocks):
            raise LadderError(
                f"layer {index} keeps partial sums local (desync), which staleness cannot undo: its staleness must "
                f"be 1, not {value}"
            )


def refuse_settings(config: Any) -> None:
    """Refuse settings that leave no residual stream to wire."""
    for layout in layouts_of(config.model_type):
        for setting, reason in layout.unsupported.items():
            if getattr(config, setting, False):
                raise LadderError(f"{config.model_type} with {setting} cannot be wired: {reason}")


def unwrapped(model: Any) -> Any:
    """The transformers model inside PEFT's model or a side network's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def layers_of(model: Any) -> list[nn.Module]:
    """The layers, in order, stack after stack."""
    return [layer for stack in stacks_of(model) for layer in stack.layers]


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
