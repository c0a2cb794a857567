"""A model over a text, layer by layer: what its sub-blocks read, and what they add to the stream."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ladder.hf.layer import StreamState, WiredLayer
from ladder.hf.layouts.layout import Branch
from ladder.hf.ranks import output_projection


def layer_calls(
    model: Any, layers: Sequence[Any], batches: Sequence[Tensor]
) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """Each layer's arguments besides the stream, the same for every batch; each batch's embedding."""
    calls: list[dict[str, Any]] = []
    streams: list[Tensor] = []

    def call(layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.append(named)

    def begin(layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        streams.append(arguments[0])
        raise _Stop

    for hooks, some in ((dict.fromkeys(layers, call), batches[:1]), ({layers[0]: begin}, batches)):
        handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer, hook in hooks.items()]
        try:
            for ids in some:
                _until(partial(model, input_ids=ids.to(model.device), use_cache=False))
        finally:
            for handle in handles:
                handle.remove()
    return calls, streams


@dataclass(frozen=True)
class Activations:
    """Of a layer's pass: what a block `reads`, the input that its output projection `holds`, and what that `adds`."""

    at: dict[tuple[str, str], Tensor]
    end: Any  # what the layer returned; None: the pass was stopped before

    def behind(self, layer: Any, branch: Branch, before: Any) -> Tensor:
        """The stream behind a sub-block, from that before the layer. In post-norm models: what the norm there gets."""
        if branch.norm is not None:
            return widened(self.at[branch.entry, "sums"])
        stream: Tensor = widened(whole_stream(before))
        branches = layer.spec.layout.branches
        for each in branches[: branches.index(branch) + 1]:
            stream = stream + gain(layer, each) * widened(self.at[each.entry, "adds"])
        return stream


def input_calls(
    model: Any, layers: Sequence[Any], batches: Sequence[dict[str, Tensor]]
) -> tuple[list[list[dict[str, Any]]], list[Tensor]]:
    """The same of a stack of wired layers, of models that are called with more than tokens: each batch's own
    arguments.
    """
    calls: list[list[dict[str, Any]]] = [[] for _ in layers]
    streams: list[Tensor] = []
    place = {layer: index for index, layer in enumerate(layers)}
    more = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def call(layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if place[layer] == 0:
            streams.append(arguments[0])
        given = dict(zip(layer.spec.layout.differentiable, arguments[1:], strict=False))  # in `WiredLayer`'s order
        calls[place[layer]].append({**named, **given})

    handles = [layer.register_forward_pre_hook(call, with_kwargs=True) for layer in layers]
    try:
        for batch in batches:
            model(**batch, **more)
    finally:
        for handle in handles:
            handle.remove()
    return calls, streams


class _Stop(Exception):
    """The rest of a pass is not needed."""


def record(layer: Any, stream: Any, call: dict[str, Any], until: tuple[str, str] | None = None) -> Activations:
    at: dict[tuple[str, str], Tensor] = {}

    def keep(block: str, what: str, value: Tensor) -> None:
        at[block, what] = value
        if until == (block, what):
            raise _Stop

    handles = []
    for branch in layer.spec.layout.branches:
        name = branch.entry

        def reads(block: nn.Module, arguments: Any, named: dict[str, Any], name: str = name) -> None:
            keep(name, "reads", arguments[0] if arguments else named["hidden_states"])

        def adds(out: nn.Module, arguments: Any, y: Tensor, name: str = name) -> None:
            if until is not None:  # not needed of the original, and large
                at[name, "holds"] = arguments[0]
            keep(name, "adds", y)

        def sums(norm: nn.Module, arguments: Any, name: str = name) -> None:
            keep(name, "sums", arguments[0])

        handles.append(layer.get_submodule(name).register_forward_pre_hook(reads, with_kwargs=True))
        if (out := projection(layer, branch)) is not None:
            handles.append(out.register_forward_hook(adds))
        if branch.norm is not None:
            handles.append(layer.get_submodule(branch.norm).register_forward_pre_hook(sums))
    try:
        end = _until(partial(run_layer, layer, stream, call))
    finally:
        for handle in handles:
            handle.remove()
    return Activations(at, end)


def inputs_of(module: nn.Module, layer: Any, stream: Any, call: dict[str, Any]) -> Tensor:
    """What a module inside the layer gets; the pass ends there."""
    found: list[Tensor] = []

    def stop(module: nn.Module, arguments: Any) -> None:
        found.append(arguments[0])
        raise _Stop

    handle = module.register_forward_pre_hook(stop)
    try:
        _until(partial(run_layer, layer, stream, call))
    finally:
        handle.remove()
    return found[0]


def _until(pass_: Callable[[], Any]) -> Any:
    try:
        return pass_()
    except _Stop:
        return None


def run_layer(layer: Any, stream: Any, call: dict[str, Any]) -> Any:
    found = layer(stream, **call)
    return found[0] if layer.spec.layout.returns else found


def widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def whole_stream(output: Any) -> Tensor:
    return output.stream if isinstance(output, StreamState) else output


def gain(layer: Any, branch: Branch) -> Any:
    """What multiplies the output of a projection on its way to the stream: a number, or one for each output."""
    scale = layer.spec.layout.scale
    factor = 1.0 if scale is None else float(getattr(layer, scale))
    return factor if branch.gain is None else factor * widened(layer.get_parameter(branch.gain))


def projection(layer: WiredLayer, branch: Branch) -> Any:
    """The projection back to the stream, if nothing but a factor follows it, or a norm that stands on the stream."""
    if branch.projection is not None:
        return layer.get_submodule(branch.projection)
    return None if branch.out is None else output_projection(layer, branch)
