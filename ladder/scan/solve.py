"""Weights that compensate for what a rewired layer no longer reads: by least squares, not by training.

A sub-block of the original reads n(t), the norm of its stream; rewired it reads n(s), a stream without its newest
results. As far as what is missing is a linear function of what is there, a weight can make up for it:

    C  = argmin  sum | C n(s) - n(t) |^2  +  ridge | C - 1 |^2                every weight W that reads becomes W C
    W' = argmin  sum | W' h + s - t' |^2 / |t'|^2  +  ridge | W' - W |^2      W, the projection back to the stream

over the tokens of a text; t' is the original's stream after the sub-block, h the projection's input. From the first
rewired layer on, sub-block after sub-block, each on the streams that those before it produce, so that it also corrects
what they could not. No gradients: a pass over the text and two systems of equations per sub-block. `ridge` is relative
to the mean square of the inputs. Where a norm follows the projection, or experts share it, it stays as it is.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.families import Branch
from ladder.hf.layer import LayerSpec, StreamState, WiredLayer, output_projection
from ladder.hf.wire import layers_of
from ladder.progress import Progress
from ladder.wiring import Wiring

RIDGE = 0.01


@torch.no_grad()
def solve(
    model: Any,
    wiring: str | Wiring,
    sequences: Tensor,
    ridge: float = RIDGE,
    batch: int = 8,
    progress: Progress | None = None,
) -> Any:
    """Rewire a model in place and fit its weights, which were trained as standard, on `sequences`, [n, length] tokens;
    returns it. `batch` sequences at a time, of which there must be a multiple. Keeps about ten streams of all tokens
    beside the model, and a copy of one layer.
    """
    if len(sequences) % batch or not len(sequences):
        raise LadderError(f"{len(sequences)} sequences are no multiple of a batch of {batch}")
    model.eval()
    rewire(model, "standard")
    layers: Sequence[Any] = layers_of(model)
    if isinstance(wiring, str):
        wiring = Wiring.parse(wiring, len(layers))
    calls, streams = _calls(model, layers, sequences.split(batch))
    specs = [layer.spec for layer in layers]
    rewire(model, wiring)
    first = next((index for index, name in enumerate(wiring.layers) if name != "standard"), len(layers))
    wired: list[Any] = list(streams)  # the rewired layers' own
    for index, layer in enumerate(layers):
        if index < first:
            wired = [_run(layer, stream, calls[index]) for stream in wired]
            streams = [_stream(stream) for stream in wired]
        else:
            streams = _fit_layer(layer, specs[index], calls[index], streams, wired, ridge)
            wired = [_run(layer, stream, calls[index]) for stream in wired]
        if progress is not None:
            progress(index + 1, len(layers), "fitting")
    return model


def _calls(model: Any, layers: Sequence[Any], batches: Sequence[Tensor]) -> tuple[list[dict[str, Any]], list[Tensor]]:
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


def _fit_layer(
    layer: Any, standard: LayerSpec, call: dict[str, Any], streams: list[Tensor], wired: list[Any], ridge: float
) -> list[Tensor]:
    """Fit one layer's weights; returns the original's streams after it."""
    layout = layer.spec.layout
    scale = 1.0 if layout.scale is None else float(getattr(layer, layout.scale))
    original = copy.deepcopy(layer)
    original.spec = standard
    wanted = [_record(original, stream, call) for stream in streams]
    for branch in (layout.attention, layout.mlp):
        if branch.out is not None and (branch.block, "adds") not in wanted[0].at:
            raise LadderError(
                f"the model does not call its {branch.block}.{branch.out} (slow_but_exact?): turn that off"
            )
    for branch in (layout.attention, layout.mlp):
        equations = _NormalEquations()
        for goal, stream in zip(wanted, wired, strict=True):
            x = _record(layer, stream, call, until=(branch.block, "reads")).at[branch.block, "reads"]
            equations.add(x, _wide(goal.at[branch.block, "reads"]) - _wide(x))
        move = equations.solve(ridge)  # C = (1 + move) transposed
        for weight, across in _readers(layer, branch):
            wide = _wide(weight)
            weight.copy_(wide + (move.to(wide) @ wide if across else wide @ move.to(wide).mT))
        if (out := _projection(layer, branch)) is not None:
            equations = _NormalEquations()
            for goal, stream, before in zip(wanted, wired, streams, strict=True):
                seen = _record(layer, stream, call, until=(branch.block, "adds"))
                end = _wide(before) + scale * goal.added(branch, layout.attention)
                own = _wide(_stream(stream)) + scale * seen.added(branch, layout.attention)
                gap = (end - own) / scale
                equations.add(seen.at[branch.block, "holds"], gap, end.square().mean(-1, keepdim=True).rsqrt())
            wide = _wide(out.weight)
            move = equations.solve(ridge).to(wide)
            out.weight.copy_(wide + (move if isinstance(out, Conv1D) else move.mT))
    return [goal.end for goal in wanted if goal.end is not None]


@dataclass(frozen=True)
class _Activations:
    """Of a layer's pass: what a block `reads`, the input that its output projection `holds`, and what that `adds`."""

    at: dict[tuple[str, str], Tensor]
    end: Tensor | None  # the stream after the layer; None: the pass was stopped before

    def added(self, branch: Branch, attention: Branch) -> Tensor:
        """To the stream, up to this sub-block, included."""
        added = _wide(self.at[attention.block, "adds"])
        return added if branch is attention else added + _wide(self.at[branch.block, "adds"])


class _Stop(Exception):
    """The rest of a pass is not needed."""


def _record(layer: Any, stream: Any, call: dict[str, Any], until: tuple[str, str] | None = None) -> _Activations:
    at: dict[tuple[str, str], Tensor] = {}

    def keep(block: str, what: str, value: Tensor) -> None:
        at[block, what] = value
        if until == (block, what):
            raise _Stop

    handles = []
    for branch in (layer.spec.layout.attention, layer.spec.layout.mlp):
        name = branch.block

        def reads(block: nn.Module, arguments: Any, named: dict[str, Any], name: str = name) -> None:
            keep(name, "reads", arguments[0] if arguments else named["hidden_states"])

        def adds(out: nn.Module, arguments: Any, y: Tensor, name: str = name) -> None:
            if until is not None:  # not needed of the original, and large
                at[name, "holds"] = arguments[0]
            keep(name, "adds", y)

        handles.append(layer.get_submodule(name).register_forward_pre_hook(reads, with_kwargs=True))
        if (out := _projection(layer, branch)) is not None:
            handles.append(out.register_forward_hook(adds))
    try:
        end = _until(partial(_run, layer, stream, call))
    finally:
        for handle in handles:
            handle.remove()
    return _Activations(at, None if end is None else _stream(end))


def _until(pass_: Callable[[], Any]) -> Any:
    try:
        return pass_()
    except _Stop:
        return None


def _run(layer: Any, stream: Any, call: dict[str, Any]) -> Any:
    found = layer(stream, **call)
    return found[0] if layer.spec.layout.returns_weights else found


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _stream(output: Any) -> Tensor:
    return output.stream if isinstance(output, StreamState) else output


def _readers(layer: WiredLayer, branch: Branch) -> list[tuple[nn.Parameter, bool]]:
    """The parameters that read the stream, and whether the stream is their first dimension (GPT-2's)."""
    block = layer.get_submodule(branch.block)
    found = []
    for name, parameter in block.named_parameters():
        if name in branch.reads:
            found.append((parameter, isinstance(block.get_submodule(name.rpartition(".")[0]), Conv1D)))
    assert found, f"{branch.block} has none of {branch.reads}"
    return found


def _projection(layer: WiredLayer, branch: Branch) -> Any:
    """The projection back to the stream, if nothing but a factor follows it."""
    return None if branch.out is None else output_projection(layer, branch)


class _NormalEquations:
    """x^T x and x^T gap, summed over tokens."""

    def __init__(self) -> None:
        self._square: Tensor | None = None
        self._cross: Tensor | None = None

    def add(self, x: Tensor, gap: Tensor, weight: Tensor | None = None) -> None:
        """[..., inputs], [..., outputs], [..., 1]."""
        x = _wide(x)
        if weight is not None:
            x, gap = x * weight, gap * weight
        x, gap = x.flatten(0, -2), gap.flatten(0, -2)
        square, cross = (x.mT @ x).double(), (x.mT @ gap).double()
        self._square = square if self._square is None else self._square + square
        self._cross = cross if self._cross is None else self._cross + cross

    def solve(self, ridge: float) -> Tensor:
        """[inputs, outputs]: M with x M nearest to the gap."""
        assert self._square is not None and self._cross is not None
        if not bool(self._square.isfinite().all() and self._cross.isfinite().all()):
            raise LadderError("the model's streams are not finite: check its weights, or take a wider dtype")
        square = self._square + ridge * self._square.diagonal().mean() * torch.eye(len(self._square)).to(self._square)
        factor, bad = torch.linalg.cholesky_ex(square)
        if bad:
            raise LadderError("the equations have no one solution: give more --tokens, or a larger --ridge")
        return torch.cholesky_solve(self._cross, factor)
