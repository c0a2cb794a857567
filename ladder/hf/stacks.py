"""The stacks of a model: lists of layers, each around a residual stream of its own.

A decoder or an encoder has one. A model with an encoder and a decoder has two, and so has a model with a tower for
images and one for text. A wiring is said once and holds for every stack: `ladder` for any number of layers, and a
pattern that counts layers where it fits every stack.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ladder.errors import LadderError
from ladder.hf.families import layouts_of
from ladder.hf.layouts.layout import LayerLayout
from ladder.wiring import Out, Wiring


@dataclass(frozen=True)
class Stack:
    """Layers around one residual stream."""

    name: str  # the path of their list in the model
    layout: LayerLayout
    layers: Sequence[nn.Module]
    owner: nn.Module  # the module that calls them
    config: Any


def stacks_of(model: Any) -> list[Stack]:
    """The stacks of a model, in the order of its modules. A part of a model may have none: a head, say."""
    layouts = layouts_of(model.config.model_type)
    if layouts[0].layer_class is None:
        base, layout = model.base_model, layouts[0]
        if not hasattr(base, layout.layers):
            return []
        return [Stack(layout.layers, layout, list(getattr(base, layout.layers)), base, model.config)]
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        for layout in layouts:
            first: Any = module[0]
            if type(first).__name__ == layout.layer_class and (layout.chosen is None or layout.chosen(first)):
                owner = model.get_submodule(name.rpartition(".")[0])
                found.append(Stack(name, layout, list(module), owner, getattr(owner, "config", model.config)))
    return found


def stack_depths(config: Any) -> list[tuple[LayerLayout, int]]:
    """How many layers each stack of a config's model has."""
    layouts = layouts_of(config.model_type)
    return [(layout, int(getattr(part, layout.depth))) for layout in layouts for part in layout.parts(config)]


def parse_each(wiring: str | Wiring, depths: Sequence[tuple[LayerLayout, int]]) -> list[Wiring]:
    """A wiring for each stack; refuses what does not fit one of them."""
    if isinstance(wiring, Wiring) and len(set(wiring.layers)) == 1 and len(depths) > 1:
        wiring = str(wiring)  # one row: for any number of layers
    found = []
    for layout, depth in depths:
        if isinstance(wiring, Wiring) and len(wiring.layers) != depth:
            raise LadderError(f"the wiring is for {len(wiring.layers)} layers, the model has {depth}")
        found.append(wiring if isinstance(wiring, Wiring) else Wiring.parse(wiring, depth))
        refuse_post_norm(layout, found[-1])
    return found


def refuse_post_norm(layout: LayerLayout, wiring: Wiring) -> None:
    """Refuse rows that a norm on the stream itself rules out."""
    if not layout.post_norm:
        return
    for name in dict.fromkeys(wiring.layers):
        if any(block.out is not Out.REDUCE for block in Wiring((name,) * 2).layer_blocks(len(layout.branches))[0]):
            raise LadderError(
                f"{name!r} holds partial sums or keeps them local, which is impossible in a post-norm model: its norms "
                "stand on the stream itself, and each needs the whole sum; choose standard, ladder, ladder-N or "
                "ladder-A-M"
            )


def named_wiring(raw: Mapping[str, Any], depths: Sequence[tuple[LayerLayout, int]]) -> list[Wiring]:
    """The wirings that a config names: ours, or the paper's `ladder_layers`; silence is the standard one."""
    text, paper = raw.get("wiring"), raw.get("ladder_layers")
    if text is not None and paper is not None:
        raise LadderError("both 'wiring' and 'ladder_layers' are given: keep one")
    if text is not None:
        return parse_each(str(text), depths)
    found = [Wiring.from_ladder_layers(paper, depth) for _, depth in depths]
    for (layout, _), wiring in zip(depths, found, strict=True):
        refuse_post_norm(layout, wiring)
    return found


def as_text(wirings: Sequence[Wiring], given: str | None = None) -> str:
    """One text for all stacks: `given` where they differ in their number of layers."""
    texts = {str(wiring) for wiring in wirings}
    if len(texts) == 1:
        return texts.pop()
    assert given is not None
    return " ".join(given.split())
