"""ladder quantize: a checkpoint whose matrices are quantized, written without loading the model.

Matrices of layers are read some rows at a time, rounded and written; other tensors (embedding, head, norms, routers,
biases) are copied. Everything is checked before the first byte is written, and the folder appears when it is complete.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import sqrt
from time import perf_counter
from typing import TypeAlias

import torch
from torch import Tensor

from ladder.checkpoint import TYPES, Directory, beside, check_space
from ladder.config.card import quantized_card
from ladder.config.fields import read_config
from ladder.config.lock import locked, unlocked
from ladder.config.quantization import GROUPS, Quantization, Storage
from ladder.errors import LadderError
from ladder.files import check_new, new_folder, write_json, write_text
from ladder.layers.quantized import Quantized
from ladder.model import Decoder
from ladder.progress import Progress
from ladder.quantize.options import FORMATS, QuantizeOptions, check_not_quantized
from ladder.quantize.packing import WORD, packed, planned, settings
from ladder.quantize.rounding import Rounded, dequantized, round_to_nearest
from ladder.quantize.tensors import Entry, Output, Spec, entries, side_by_side

AT_A_TIME = 1 << 19  # weights that a thread rounds, about: what caches keep, and few enough calls of torch
THREADS = 8  # at most: memory grows with them
COPIED = 4 << 20  # bytes of what is not rounded
IN_TRANSFORMERS = ("fp8", "int4")  # formats of experts that it reads, without zero points
# a matrix's name, where the rows begin, and the rows -> their codes
Rounder = Callable[[str, int, Tensor], Rounded]
Numbered: TypeAlias = tuple[int, Tensor]
Written: TypeAlias = tuple[dict[str, Tensor], float, float]
Each = Callable[[Callable[[Numbered], Written], Iterable[Numbered]], Iterator[Written]]  # map, or one by threads


@dataclass(frozen=True)
class QuantizeResult:
    """What was written, from what."""

    wiring: str
    matrices: int
    bytes_before: int  # of all tensors
    bytes_after: int
    seconds: float
    relative_error: float  # of all quantized weights together: root mean square of the error over that of the weights


def quantize(
    options: QuantizeOptions,
    progress: Progress | None = None,
    rounder: Rounder | None = None,
    pattern: str | None = None,
) -> QuantizeResult:
    """Write `options.out`, or refuse, and leave nothing behind. `rounder`: what rounds, if not to the nearest code: it
    gets the matrices in the order of the layers. `pattern`: the wiring that its result is for, if not the model's.
    """
    begun, out, storage = perf_counter(), options.out.resolve(), options.storage
    check_new(out)
    raw = read_config(options.model)
    check_not_quantized(options.model, raw)
    source = Directory(options.model)
    config, matrices = source.config, _matrices(source, options)
    wiring, plain = config.wiring, {key: value for key, value in unlocked(raw).items() if key != "auto_map"}  # no code
    if pattern is not None or not wiring.is_standard:
        from ladder.hf.convert import rewired  # imports for seconds: not for the standard wiring

        plain, wiring = rewired(raw, pattern)
    plain = locked(plain) if "wiring" in plain else plain
    tensors = entries(source)
    plan: dict[str, Spec] = {}
    for name, entry in tensors.items():
        if name in matrices:
            parts = planned(entry.shape, TYPES[entry.kind], storage)
            plan |= {f"{name.removesuffix('weight')}{end}": part for end, part in parts.items()}
        else:
            plan[name] = entry
    others = beside(options.model, source.files.values())
    before, after = (sum(each.size for each in found.values()) for found in (tensors, plan))
    check_space(out, after + sum(file.stat().st_size for file in others))
    error, done = _Error(), 0
    with new_folder(out) as folder:
        # a rounder needs its matrices one after the other, and has torch's threads for itself
        threads = side_by_side(THREADS) if rounder is None else nullcontext(map)
        with Output(folder, plan) as output, threads as each:
            for name, entry in sorted(tensors.items(), key=_place) if rounder is not None else tensors.items():
                if name in matrices:
                    _quantize(name, entry, storage, output, rounder, error, each)
                else:
                    for piece in entry.pieces(COPIED):
                        output.write(name, piece)
                done += entry.size
                if progress is not None:
                    progress(done, before, "quantizing")
        for file in others:
            shutil.copyfile(file, folder / file.name)
        ignore = sorted({"lm_head", config.names.head})  # transformers gives all heads one name
        if config.experts is not None:
            ignore.append(rf"re:.*\.{re.escape(config.names.router)}$")
        write_json(folder / "config.json", {**plain, "quantization_config": settings(storage, ignore)})
        how = "rounding to the nearest code" if rounder is None else str(rounder)
        form = f"{storage}, for fp8 activations" if storage.activations else str(storage)
        card = quantized_card(options.model.resolve().name, out.name, config.family, wiring, form, error.relative, how)
        write_text(folder / "README.md", card)
        if out.exists():
            out.rmdir()  # empty, as was seen
        folder.rename(out)
    seconds = perf_counter() - begun
    return QuantizeResult(str(wiring), len(matrices), before, after, seconds, error.relative)


def _place(named: tuple[str, Entry]) -> list[tuple[int, str]]:
    """Layer 10 comes behind layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in named[0].split(".")]


def _matrices(source: Directory, options: QuantizeOptions) -> set[str]:
    """The names of the tensors that are quantized: the matrices of layers. Refuses what cannot be."""
    config, storage = source.config, options.storage
    if config.names.transposed:
        raise LadderError(
            f"{options.model}: the matrices of {config.family} are stored transposed, and cannot be quantized"
        )
    if config.experts is not None and (options.format not in IN_TRANSFORMERS or storage.zero):
        raise LadderError(
            f"{options.model} has experts, of which transformers reads no {options.format}"
            f"{' with zero points' * storage.zero}: choose {' or '.join(IN_TRANSFORMERS)}"
        )
    source.check(Decoder(config, device="meta").shards())
    form = replace(config, weights=Quantization(((("Linear",), FORMATS["int8"]),), (config.names.head,)))
    modules = (each for each in Decoder(form, device="meta").modules() if isinstance(each, Quantized))
    shapes = {piece.name: piece.shape for module in modules for piece in module.pieces}
    widths = {inputs for _, inputs in shapes.values()}
    for name, (_, inputs) in shapes.items() if storage.kind == "int4" else ():
        if inputs % storage.unit:
            work = [group for group in GROUPS if not any(width % group for width in widths)]
            work += [0] * (not any(width % WORD for width in widths))
            hint = f"--group {' or '.join(map(str, work))} works" if work else "choose another format"
            shared = f"groups of {storage.group}" if storage.group else f"words of {WORD}"
            raise LadderError(f"{name} has {inputs} inputs, which {shared} do not divide: {hint}")
    return {f"{name}.weight" for name in shapes}


def _quantize(
    name: str, entry: Entry, storage: Storage, output: Output, rounder: Rounder | None, error: "_Error", each: Each
) -> None:
    module = name.removesuffix(".weight")
    unit = max(storage.rows, WORD)  # rows of a block, or those whose zero points are a word
    count = max(1, AT_A_TIME // entry.shape[1] // unit) * unit

    def written(numbered: Numbered) -> Written:
        number, weight = numbered
        exact = weight.float()
        if rounder is None:
            rounded = round_to_nearest(exact, storage, dtype=weight.dtype)
        else:
            rounded = rounder(module, number * count, weight)
        if not bool(rounded.scales.isfinite().all()):
            raise LadderError(f"the tensor {name!r} holds values that are not finite (NaN or infinity)")
        wrong = dequantized(rounded, storage, torch.float32).sub_(exact)
        return packed(rounded, storage), _square(wrong), _square(exact)

    for parts, wrong, whole in each(written, enumerate(entry.rows(count))):
        error.add(wrong, whole)
        for end, part in parts.items():
            output.write(f"{module}.{end}", part)
    if storage.kind == "int4":
        output.write(f"{module}.weight_shape", torch.tensor(entry.shape))


def _square(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) ** 2


class _Error:
    """The error of all weights so far."""

    def __init__(self) -> None:
        self._wrong, self._all = 0.0, 0.0

    def add(self, wrong: float, whole: float) -> None:
        """Sums of squares: of the error of some weights, and of these weights."""
        self._wrong += wrong
        self._all += whole

    @property
    def relative(self) -> float:
        return sqrt(self._wrong / self._all) if self._all else 0.0
