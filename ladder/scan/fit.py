"""ladder fit: a checkpoint under another wiring, its weights by least squares; no training."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ladder.config.families import FAMILIES as NATIVE
from ladder.data.shards import EvenSample, Sequences, Shards
from ladder.errors import LadderError
from ladder.files import check_new, new_folder
from ladder.hf import rewire
from ladder.hf.card import fitted_card
from ladder.hf.load import pretrained, quiet
from ladder.hf.measures import Distance, distance, perplexity
from ladder.progress import Progress
from ladder.scan.checkpoints import read_original, read_tokenizer, refuse_quantized, write_model
from ladder.scan.options import FitOptions
from ladder.scan.solve import solve
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
        config, wiring = read_original(options.model, options.wiring, options.seq_len)
        refuse_quantized(options.model, config, "fit the model that they were made from and quantize what comes out")
        if wiring.is_standard:
            raise LadderError("the wiring is standard, as the model is: there is nothing to fit")
        if wiring.local:
            raise LadderError(
                f"{str(wiring)!r} leaves partial sums on their ranks, each of which would need weights of its own"
            )
        tokenizer = read_tokenizer(options.model, config, options.data)
        sequences, text = _sequences(options, _widest(config))
        with new_folder(out) as folder:
            try:
                model, found = _fitted(options, wiring, sequences, text, progress)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):
                    raise
                raise LadderError(
                    f"two copies of {options.model} and the streams of {sequences.numel()} tokens do not fit into "
                    "memory: give fewer --tokens, or a smaller --batch"
                ) from None
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


def _fitted(
    options: FitOptions, wiring: Wiring, sequences: Tensor, text: Tensor, progress: Progress
) -> tuple[Any, FitResult]:
    """The model, its weights of the original's dtype, and what was measured."""
    dtype = (
        "auto" if options.dtype == "auto" and options.device_type != "cpu" else options.dtype.replace("auto", "float32")
    )
    original = pretrained(AutoModelForCausalLM, options.model, dtype=dtype).to(options.device_type)
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
        raise LadderError(
            f"fitted on {found.tokens} tokens the model is farther from its original (KL {found.fitted.kl.value:.4g}) "
            f"than merely rewired ({rewired.kl.value:.4g}): give more --tokens, or a larger --ridge"
        )
    return model.to("cpu", own), found


def _widest(config: Any) -> int:
    return int(max(config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size))


def _sequences(options: FitOptions, widest: int) -> tuple[Tensor, Tensor]:
    """[n, seq_len] to fit on, n a multiple of a batch, and the text to measure on."""
    shards = Shards.open(options.data)
    total = len(Sequences(shards, options.seq_len))
    measured = min(MEASURED, total // 10)
    spare = max(measured, total // 100)  # what ladder adapt evaluates on, if nothing else is named
    wanted = options.tokens or PER_INPUT * widest
    most = (total - spare) // options.batch * options.batch
    if not most or not measured:
        raise LadderError(
            f"{options.data} has {shards.tokens} tokens: a batch of {options.batch} sequences of {options.seq_len} and "
            "a tenth to measure on are needed; give more data, or a smaller --batch or --seq-len"
        )
    count = min(most, -(-wanted // (options.batch * options.seq_len)) * options.batch)
    chosen = EvenSample(Sequences(shards, options.seq_len, limit=most), count)
    sequences = torch.stack([chosen[index]["input_ids"] for index in range(count)])
    return sequences, shards.read((total - measured) * options.seq_len, measured * options.seq_len)
