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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ladder.config.quantization import DENSE, Storage
from ladder.data.texts import tokenize
from ladder.devices import device_type
from ladder.files import check_new
from ladder.hf import rewire
from ladder.hf.layouts.layout import Branch
from ladder.hf.load import pretrained, quiet
from ladder.hf.wire import layers_of
from ladder.progress import Progress
from ladder.quantize.gptq import gptq
from ladder.quantize.options import CalibrationOptions, QuantizeOptions
from ladder.quantize.rounding import Rounded, dequantized, round_to_nearest
from ladder.scan.activations import Activations, inputs_of, layer_calls, projection, record, run_layer, widened
from ladder.scan.checkpoints import read_original, read_tokenizer
from ladder.scan.early import refuse_local
from ladder.scan.fit import computing_dtype, data_sequences, enough_memory, tokens_for
from ladder.scan.solve import RIDGE, NormalEquations, adding_equations, reading_equations
from ladder.wiring import Wiring


class Calibration:
    """Rounds the matrices of a checkpoint as `calibrated` does, in the order of layers; experts to the nearest code.

    Made when all input has been checked. The model is loaded when the first matrix is asked for.
    """

    def __init__(self, options: QuantizeOptions, calibration: CalibrationOptions) -> None:
        assert calibration.calibrate is not None
        check_new(options.out.resolve())
        self._options, self._calibration = options, calibration
        self._device, name = device_type(calibration.device), str(options.model)
        with quiet():
            self._config, wiring, length = read_original(name, calibration.wiring, calibration.seq_len)
            refuse_local(wiring)
            self._wiring = None if calibration.wiring is None else wiring
            self._sequences = self._read(name, calibration.calibrate, length)
        self._results: Iterator[tuple[str, Rounded]] | None = None
        self._waiting: dict[str, Rounded] = {}
        self._linear: set[str] = set()

    def _read(self, name: str, text: Path, length: int) -> Tensor:
        """[n, length] tokens of a folder of shards or of a file."""
        calibration, wanted = self._calibration, self._calibration.tokens or tokens_for(self._config)
        with TemporaryDirectory() as folder:
            if not text.is_dir():
                text = tokenize([text], Path(folder) / text.name, name).folder
            read_tokenizer(name, self._config, text)
            return data_sequences(text, length, calibration.batch, wanted)[0]

    def __str__(self) -> str:
        return f"GPTQ on {self._sequences.numel()} tokens of text"

    def __call__(self, name: str, first: int, weight: Tensor) -> Rounded:
        """Rows of the matrix `name`, which are `weight` in the checkpoint."""
        storage = self._options.storage
        with quiet(), enough_memory(f"{self._options.model}", self._sequences):
            if self._results is None:
                self._results = self._calibrated()
            if name not in self._linear:
                return round_to_nearest(weight, storage)
            while name not in self._waiting:
                found, rounded = next(self._results)
                self._waiting[found] = rounded
        whole, last = self._waiting[name], first + len(weight)
        if last == len(whole.codes):
            del self._waiting[name]
        units = slice(first // storage.rows, -(-last // storage.rows))
        zeros = None if whole.zeros is None else whole.zeros[first:last]
        return Rounded(whole.codes[first:last], whole.scales[units].to(weight.dtype), zeros)

    def _calibrated(self) -> Iterator[tuple[str, Rounded]]:
        calibration, storage = self._calibration, self._options.storage
        dtype = computing_dtype(calibration.dtype, self._device)
        model = pretrained(AutoModelForCausalLM, str(self._options.model), dtype=dtype).to(self._device)
        layers = {module for layer in layers_of(model) for module in layer.modules() if isinstance(module, nn.Linear)}
        self._linear |= {name for name, module in model.named_modules() if module in layers}
        return calibrated(
            model,
            lambda name: storage if name in self._linear else DENSE,
            self._sequences,
            self._wiring,
            dtype=self._config.dtype or torch.float32,
            ridge=calibration.ridge,
            batch=calibration.batch,
        )


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
                yield names[each], rounded.to("cpu")
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
