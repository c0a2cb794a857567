"""Weights that compensate for what a rewired layer no longer reads: by least squares, not by training.

A sub-block of the original reads n(t), the norm of its stream; rewired it reads n(s), a stream without its newest
results. As far as what is missing is a linear function of what is there, a weight can make up for it:

    C  = argmin  sum | C n(s) - n(t) |^2  +  ridge | C - 1 |^2                every weight W that reads becomes W C
    W' = argmin  sum | W' h + s - t' |^2 / |t'|^2  +  ridge | W' - W |^2      W, the projection back to the stream

over the tokens of a text; t' is the original's stream after the sub-block, h the projection's input. In post-norm
models s and t' are taken before the norm that stands there, and n is nothing. From the first rewired layer on,
sub-block after sub-block, each on the streams that those before it produce, so that it also corrects what they could
not. No gradients: a pass over the text and two systems of equations per sub-block. `ridge` is relative to the mean
square of the inputs. Where a norm follows the projection, or experts share it, it stays as it is.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.layer import LayerSpec, WiredLayer
from ladder.hf.layouts.layout import Branch
from ladder.hf.stacks import Stack, parse_each, stacks_of
from ladder.progress import Progress
from ladder.scan.activations import (
    Activations,
    gain,
    input_calls,
    layer_calls,
    projection,
    record,
    run_layer,
    whole_stream,
    widened,
)
from ladder.wiring import Wiring

Call = dict[str, Any]  # a layer's arguments besides the stream
RIDGE = 0.01


class FitFailed(LadderError):
    """Equations without an answer that is of use. `what`: without what to do about it, which is of `ladder fit`."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}: {advice}")
        self.what = what


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
    stacks, wirings = _ready(model, wiring)
    layers = stacks[0].layers
    shared, streams = layer_calls(model, layers, sequences.split(batch))
    calls = [[call] * len(streams) for call in shared]
    standard: list[Any] = [layer.spec for layer in layers]
    rewire(model, wiring)
    _solve_stack(layers, wirings[0], standard, calls, calls, streams, ridge, _counted(progress, 0, len(layers)))
    return model


@torch.no_grad()
def solve_inputs(
    model: Any,
    wiring: str | Wiring,
    batches: Sequence[dict[str, Tensor]],
    ridge: float = RIDGE,
    progress: Progress | None = None,
) -> Any:
    """The same for models that are called with more than tokens: the arguments of each call. The stacks are fitted one
    after the other: a decoder reads what its fitted encoder says, and is to come near to what it was.
    """
    stacks, wirings = _ready(model, wiring)
    recorded = [input_calls(model, stack.layers, batches) for stack in stacks]
    specs: list[list[Any]] = [[layer.spec for layer in stack.layers] for stack in stacks]
    rewire(model, wiring)
    done, total = 0, sum(len(stack.layers) for stack in stacks)
    for stack, each, (calls, streams), standard in zip(stacks, wirings, recorded, specs, strict=True):
        present = input_calls(model, stack.layers, batches)[0] if done else calls
        _solve_stack(stack.layers, each, standard, calls, present, streams, ridge, _counted(progress, done, total))
        done += len(stack.layers)
    return model


def _ready(model: Any, wiring: str | Wiring) -> tuple[list[Stack], list[Wiring]]:
    """The stacks of a model, wired as standard, and the wirings that they are to have."""
    model.eval()
    rewire(model, "standard")
    stacks = stacks_of(model)
    return stacks, parse_each(wiring, [(stack.layout, len(stack.layers)) for stack in stacks])


def _counted(progress: Progress | None, done: int, total: int) -> Callable[[int], None]:
    return lambda index: None if progress is None else progress(done + index + 1, total, "fitting")


def _solve_stack(
    layers: Sequence[Any],
    wiring: Wiring,
    standard: Sequence[LayerSpec],
    calls: Sequence[Sequence[Call]],
    present: Sequence[Sequence[Call]],
    streams: list[Tensor],
    ridge: float,
    report: Callable[[int], None],
) -> None:
    """`calls`: of each layer, its arguments in each batch; `present`: those that it is given now."""
    first = next((index for index, name in enumerate(wiring.layers) if name != "standard"), len(layers))
    wired: list[Any] = list(streams)  # the rewired layers' own
    for index, (layer, call, own) in enumerate(zip(layers, calls, present, strict=True)):
        if index >= first:
            streams = _fit_layer(layer, standard[index], (call, own), streams, wired, ridge)
        elif call is not own:
            streams = [whole_stream(run_layer(layer, stream, each)) for stream, each in zip(streams, call, strict=True)]
        wired = [run_layer(layer, stream, each) for stream, each in zip(wired, own, strict=True)]
        if index < first and call is own:
            streams = [whole_stream(stream) for stream in wired]
        report(index)


def _fit_layer(
    layer: Any,
    standard: LayerSpec,
    calls: tuple[Sequence[Call], Sequence[Call]],
    streams: list[Tensor],
    wired: list[Any],
    ridge: float,
) -> list[Tensor]:
    """Fit one layer's weights; returns the original's streams after it. `calls`: the original's, and the layer's."""
    layout, (before, call) = layer.spec.layout, calls
    original = copy.deepcopy(layer)
    original.spec = standard
    wanted = [record(original, stream, each) for stream, each in zip(streams, before, strict=True)]
    for branch in layout.branches:
        if branch.out is not None and (branch.entry, "adds") not in wanted[0].at:
            raise LadderError(
                f"the model does not call its {branch.block}.{branch.out} (slow_but_exact?): turn that off"
            )
    for branch in layout.branches:
        move = reading_equations(layer, branch, call, wanted, wired).solve(ridge)  # C = (1 + move) transposed
        for weight, across in _readers(layer, branch):
            wide = widened(weight)
            weight.copy_(wide + (move.to(wide) @ wide if across else wide @ move.to(wide).mT))
        if (out := projection(layer, branch)) is not None:
            wide = widened(out.weight)
            move = adding_equations(layer, branch, call, wanted, streams, wired).solve(ridge).to(wide)
            out.weight.copy_(wide + (move if isinstance(out, Conv1D) else move.mT))
    return [whole_stream(goal.end) for goal in wanted]


def _each(call: Call | Sequence[Call], count: int) -> Sequence[Call]:
    """A layer's arguments in each batch, or in all of them."""
    return [call] * count if isinstance(call, dict) else call


def reading_equations(
    layer: Any, branch: Branch, call: Call | Sequence[Call], wanted: list[Activations], wired: list[Any]
) -> "NormalEquations":
    """From what a sub-block reads to what the original's does: the difference."""
    equations = NormalEquations()
    for goal, stream, each in zip(wanted, wired, _each(call, len(wired)), strict=True):
        x = record(layer, stream, each, until=(branch.entry, "reads")).at[branch.entry, "reads"]
        equations.add(x, widened(goal.at[branch.entry, "reads"]) - widened(x))
    return equations


def adding_equations(
    layer: Any,
    branch: Branch,
    call: Call | Sequence[Call],
    wanted: list[Activations],
    before: list[Any],
    wired: list[Any],
) -> "NormalEquations":
    """From the input of a sub-block's projection to what its result lacks for the original's stream behind it; in
    post-norm models for that stream before its norm.

    `before`: the original's streams before the layer.
    """
    equations, scale = NormalEquations(), gain(layer, branch)
    for goal, stream, start, each in zip(wanted, wired, before, _each(call, len(wired)), strict=True):
        seen = record(layer, stream, each, until=(branch.entry, "adds" if branch.norm is None else "sums"))
        end, own = goal.behind(layer, branch, start), seen.behind(layer, branch, stream)
        gap = (end - own) / scale
        if branch.gain is not None:  # what is multiplied by nothing cannot be corrected
            gap = gap.masked_fill(scale == 0, 0)
        equations.add(seen.at[branch.entry, "holds"], gap, end.square().mean(-1, keepdim=True).rsqrt())
    return equations


def _readers(layer: WiredLayer, branch: Branch) -> list[tuple[nn.Parameter, bool]]:
    """The parameters that read the stream, and whether the stream is their first dimension (GPT-2's)."""
    block = layer.get_submodule(branch.block)
    found = []
    for name, parameter in block.named_parameters():
        if name in branch.reads:
            found.append((parameter, isinstance(block.get_submodule(name.rpartition(".")[0]), Conv1D)))
    assert found, f"{branch.block} has none of {branch.reads}"
    return found


class NormalEquations:
    """x^T x and x^T gap, summed over tokens."""

    def __init__(self) -> None:
        self._square: Tensor | None = None
        self._cross: Tensor | None = None

    def add(self, x: Tensor, gap: Tensor, weight: Tensor | None = None) -> None:
        """[..., inputs], [..., outputs], [..., 1]."""
        x = widened(x)
        if weight is not None:
            x, gap = x * weight, gap * weight
        x, gap = x.flatten(0, -2), gap.flatten(0, -2)
        square, cross = (x.mT @ x).double(), (x.mT @ gap).double()
        self._square = square if self._square is None else self._square + square
        self._cross = cross if self._cross is None else self._cross + cross

    def square(self, ridge: float) -> Tensor:
        """x^T x, its diagonal larger by `ridge`."""
        assert self._square is not None and self._cross is not None
        if not bool(self._square.isfinite().all() and self._cross.isfinite().all()):
            raise LadderError("the model's streams are not finite: check its weights, or take a wider dtype")
        return self._square + ridge * self._square.diagonal().mean() * torch.eye(len(self._square)).to(self._square)

    def solve(self, ridge: float) -> Tensor:
        """[inputs, outputs]: M with x M nearest to the gap."""
        assert self._cross is not None
        factor, bad = torch.linalg.cholesky_ex(self.square(ridge))
        if bad:
            raise FitFailed("the equations have no one solution", "give more --tokens, or a larger --ridge")
        return torch.cholesky_solve(self._cross, factor)
