"""ladder fit: a checkpoint under another wiring, its weights by least squares; no training."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ladder.config.card import fitted_card
from ladder.config.families import FAMILIES as NATIVE
from ladder.data.shards import EvenSample, Sequences, Shards
from ladder.errors import LadderError
from ladder.files import check_new, new_folder
from ladder.hf import rewire
from ladder.hf.load import pretrained, quiet
from ladder.hf.measures import Distance, distance, perplexity
from ladder.progress import Progress
from ladder.scan.checkpoints import (
    read_original,
    read_tokenizer,
    refuse_not_finite,
    refuse_quantized,
    write_model,
)
from ladder.scan.early import refuse_local, refuse_standard
from ladder.scan.options import FitOptions
from ladder.scan.solve import FitFailed, solve
from ladder.wiring import Wiring

PER_INPUT = 64  # tokens for each unknown of an equation
MEASURED = 8  # sequences to measure on, the last ones of the data


@dataclass(frozen=True)
class FitResult:
    """The original, the rewired and the fitted model, measured on the end of the data."""

    tokens: int  # to fit on
    original: float  # its perplexity
    rewired: Distance
    fitted: Distance


def fit(options: FitOptions, progress: Progress) -> FitResult:
    """Write `options.out`, or refuse, and leave nothing behind."""
    out = options.out.resolve()
    check_new(out)
    with quiet():
        Shards.open(options.data)  # a folder that is not there is told of first
        config, wiring, length = read_original(options.model, options.wiring, options.seq_len)
        options = replace(options, seq_len=length)
        refuse_quantized(options.model, config, "fit the model that they were made from and quantize what comes out")
        refuse_standard(wiring)
        refuse_local(wiring)
        tokenizer = read_tokenizer(options.model, config, options.data)
        wanted = options.tokens or tokens_for(config)
        sequences, text = data_sequences(options.data, length, options.batch, wanted)
        with new_folder(out) as folder:
            with enough_memory(f"two copies of {options.model}", sequences):
                model, found = _fitted(options, wiring, sequences, text, progress)
            write_model(model, folder)
            tokenizer.save_pretrained(folder)
            kind = config.model_type
            rewired, fitted = found.rewired.kl.value, found.fitted.kl
            result = f"KL to the original {rewired:.4g} rewired, {fitted.value:.4g} fitted, on {fitted.n} tokens of "
            result += f"text; fitted on {found.tokens} others"
            card = fitted_card(options.model, out.name, kind, wiring, kind in NATIVE, result)
            (folder / "README.md").write_text(card, encoding="utf-8")
            if out.exists():
                out.rmdir()  # empty, as was seen
            folder.rename(out)
    return found


@contextmanager
def enough_memory(what: str, sequences: Tensor) -> Iterator[None]:
    """One sentence where memory ends."""
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):
            raise
        problem = f"{what} and the streams of {sequences.numel()} tokens do not fit into memory"
        raise FitFailed(problem, "give fewer --tokens, or a smaller --batch") from None


def computing_dtype(dtype: str, device: str) -> str:
    """An option's dtype: auto is the checkpoint's, on a CPU float32."""
    return "auto" if dtype == "auto" and device != "cpu" else dtype.replace("auto", "float32")


def _fitted(
    options: FitOptions, wiring: Wiring, sequences: Tensor, text: Tensor, progress: Progress
) -> tuple[Any, FitResult]:
    """The model, its weights of the original's dtype, and what was measured."""
    dtype = computing_dtype(options.dtype, options.device_type)
    original = pretrained(AutoModelForCausalLM, options.model, dtype=dtype).to(options.device_type)
    refuse_not_finite(original, options.model)
    own = pretrained(AutoConfig, options.model).dtype or torch.float32
    model = rewire(copy.deepcopy(original), wiring)

    def measured() -> Distance:
        return distance(model, original, text, window=options.seq_len, batch=options.batch)

    before, rewired = perplexity(original, text, window=options.seq_len, batch=options.batch).value, measured()
    solve(model, wiring, sequences, options.ridge, options.batch, progress)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(own))  # what is written is what is measured
    found = FitResult(sequences.numel(), before, rewired, measured())
    if not found.fitted.kl.value <= rewired.kl.value:  # equal: a family whose blocks are parallel in any case
        farther = f"fitted on {found.tokens} tokens the model is farther from its original "
        farther += f"(KL {found.fitted.kl.value:.4g}) than merely rewired ({rewired.kl.value:.4g})"
        raise FitFailed(farther, "give more --tokens, or a larger --ridge")
    return model.to("cpu", own), found


def tokens_for(config: Any) -> int:
    """How many tokens determine the widest of a model's projections."""
    widest = max(config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    return PER_INPUT * int(widest)


def parted(shards: Shards, seq_len: int, batch: int) -> tuple[int, int, int]:
    """Of sequences: all, how many there are to fit on, a multiple of a batch, and to measure on. Neither may be 0."""
    total = len(Sequences(shards, seq_len))
    measured = min(MEASURED, total // 10)
    spare = max(measured, total // 100)  # what ladder adapt evaluates on, if nothing else is named
    return total, (total - spare) // batch * batch, measured


def data_sequences(data: Path, seq_len: int, batch: int, wanted: int) -> tuple[Tensor, Tensor]:
    """[n, seq_len] to fit on, about `wanted` tokens, n a multiple of a batch; and the text to measure on."""
    shards = Shards.open(data)
    total, most, measured = parted(shards, seq_len, batch)
    if not most or not measured:
        raise LadderError(
            f"{data} has {shards.tokens} tokens: a batch of {batch} sequences of {seq_len} and a tenth to measure on "
            "are needed; give more data, or a smaller --batch or --seq-len"
        )
    count = min(most, -(-wanted // (batch * seq_len)) * batch)
    chosen = EvenSample(Sequences(shards, seq_len, limit=most), count)
    sequences = torch.stack([chosen[index]["input_ids"] for index in range(count)])
    return sequences, shards.read((total - measured) * seq_len, measured * seq_len)
