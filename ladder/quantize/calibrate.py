"""A model's matrices rounded so that the model changes least on a text: GPTQ (gptq.py), layer after layer.

Each matrix is rounded on the inputs x that it gets from the matrices rounded before it, towards what the original has
in its place. These are the normal equations of `ladder fit` (scan/solve.py), and GPTQ rounds their solution:

    W* = argmin  sum | W x - y |^2 + ridge | W - W0 |^2          Q = argmin  (Q - W*) (x^T x + ridge) (Q - W*)^T

For a matrix that reads the stream, y is what the original's computes from its own input; for a projection back to the
stream, what the stream lacks for the original's. So each sub-block also corrects what those before it could not. Where
the original is wired differently, wiring and rounding are fitted in one go. A projection that a norm follows is rounded
for W0 x. Experts are not linear layers of transformers, and are left out.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ladder.config.quantization import DENSE, Storage
from ladder.hf import rewire
from ladder.hf.families import Branch
from ladder.hf.wire import layers_of
from ladder.progress import Progress
from ladder.quantize.gptq import gptq
from ladder.quantize.rounding import Rounded, dequantized
from ladder.scan.activations import Activations, inputs_of, layer_calls, projection, record, run_layer, widened
from ladder.scan.solve import RIDGE, NormalEquations, adding_equations, reading_equations
from ladder.wiring import Wiring


@torch.no_grad()
def calibrated(
    model: Any,
    storage_of: Callable[[str], Storage],
    sequences: Tensor,
    wiring: Wiring | None = None,
    *,
    dtype: torch.dtype | None = None,
    ridge: float = RIDGE,
    batch: int = 8,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Rounded]]:
    """Each linear layer that `storage_of` its name calls for, by that name, as soon as it is rounded; the model's own
    weights become the rounded ones. On `sequences`, [n, length] tokens, `batch` at a time; scales and rounded weights
    are of `dtype`, the model's unless told. `wiring`: the model gets this one, and is fitted to it in one go.
    """
    model.eval()
    rewire(model)
    layers: Sequence[Any] = layers_of(model)
    names = {module: name for name, module in model.named_modules()}
    calls, streams = layer_calls(model, layers, sequences.split(batch))
    specs = [layer.spec for layer in layers]
    if wiring is not None:
        rewire(model, wiring)
    theirs, ours = list[Any](streams), list[Any](streams)  # the original's, and those of the rounded layers
    for index, layer in enumerate(layers):
        original, call = copy.deepcopy(layer), calls[index]
        original.spec = specs[index]
        wanted = [record(original, state, call) for state in theirs]
        for branch in (layer.spec.layout.attention, layer.spec.layout.mlp):
            linear = [each for each in layer.get_submodule(branch.block).modules() if isinstance(each, nn.Linear)]
            stored = {each: storage for each in linear if (storage := storage_of(names[each])) != DENSE}
            for each, weight, square in _solved(layer, branch, list(stored), call, wanted, theirs, ours, ridge):
                kind = dtype or each.weight.dtype
                rounded = gptq(weight, square, stored[each], kind)
                each.weight.copy_(dequantized(rounded, stored[each], kind))
                yield names[each], rounded
        theirs = [goal.end for goal in wanted]
        ours = [run_layer(layer, state, call) for state in ours]
        if progress is not None:
            progress(index + 1, len(layers), "calibrating")


def _solved(
    layer: Any,
    branch: Branch,
    linear: list[nn.Linear],
    call: dict[str, Any],
    wanted: list[Activations],
    theirs: list[Any],
    ours: list[Any],
    ridge: float,
) -> Iterator[tuple[nn.Linear, Tensor, Tensor]]:
    """A sub-block's matrices, each with its W* and x^T x + ridge; the next ones when these have been rounded."""
    block = layer.get_submodule(branch.block)
    reading = [parameter for name, parameter in block.named_parameters() if name in branch.reads]
    readers = [each for each in linear if any(each.weight is other for other in reading)]
    if readers:
        equations = reading_equations(layer, branch, call, wanted, ours)
        move, square = equations.solve(ridge), equations.square(ridge)
        for each in readers:
            wide = widened(each.weight)
            yield each, wide + wide @ move.to(wide).mT, square
    for each in linear:
        if each is projection(layer, branch):
            equations = adding_equations(layer, branch, call, wanted, theirs, ours)
            wide = widened(each.weight)
            yield each, wide + equations.solve(ridge).to(wide).mT, equations.square(ridge)
        elif each not in readers:
            equations = NormalEquations()
            for state in ours:
                x = inputs_of(each, layer, state, call)
                equations.add(x, x[..., :0])
            yield each, widened(each.weight), equations.square(ridge)
