"""ladder fit: a checkpoint under another wiring, its weights solved for; no training."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ladder.config.families import FAMILIES as NATIVE
from ladder.data.shards import Shards, Spread, Windows
from ladder.errors import LadderError
from ladder.files import check_new, new_folder
from ladder.hf import rewire
from ladder.hf.card import fitted_card
from ladder.hf.load import pretrained, quiet
from ladder.hf.measures import Distance, distance, perplexity
from ladder.progress import Progress
from ladder.scan.original import read_original, read_tokenizer
from ladder.scan.solve import solve
from ladder.train.options import FitOptions
from ladder.train.work import write
from ladder.wiring import Wiring

PER_INPUT = 64  # tokens for each unknown of an equation
MEASURED = 8  # windows, the last ones of the data


@dataclass(frozen=True)
class Fitted:
    """How far three models are from the original, on the end of the data."""

    tokens: int  # that were fitted on
    original: float  # its perplexity
    rewired: Distance
    fitted: Distance


def fit(options: FitOptions, progress: Progress) -> Fitted:
    """Write `options.out`, or refuse, and leave nothing behind."""
    out = options.out.resolve()
    check_new(out)
    with quiet():
        config, wiring = read_original(options.model, options.wiring, options.window)
        if wiring.is_standard:
            raise LadderError("the wiring is standard, as the model is: there is nothing to fit")
        if wiring.local:
            raise LadderError(f"{str(wiring)!r} keeps sums on their ranks, each of which would need weights of its own")
        tokenizer = read_tokenizer(options.model, config, options.data)
        rows, text = _rows(options, _widest(config))
        with new_folder(out) as folder:
            try:
                model, found = _fitted(options, wiring, rows, text, progress)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):
                    raise
                raise LadderError(
                    f"two copies of {options.model} and the streams of {rows.numel()} tokens do not fit into memory: "
                    "give fewer --tokens, or a smaller --batch"
                ) from None
            write(model, folder)
            tokenizer.save_pretrained(folder)
            kind = config.model_type
            told = f"KL to the original {found.rewired.kl.value:.4g} rewired, {found.fitted.kl.value:.4g} fitted, on "
            told += f"{found.fitted.kl.n} tokens of text; fitted on {found.tokens} others"
            card = fitted_card(options.model, out.name, kind, wiring, kind in NATIVE, told)
            (folder / "README.md").write_text(card, encoding="utf-8")
            if out.exists():
                out.rmdir()  # empty, as was seen
            folder.rename(out)
    return found


def _fitted(options: FitOptions, wiring: Wiring, rows: Tensor, text: Tensor, progress: Progress) -> tuple[Any, Fitted]:
    """The model, its weights of the original's type, and what it is worth."""
    wide = "auto" if options.dtype == "auto" and options.place != "cpu" else options.dtype.replace("auto", "float32")
    original = pretrained(AutoModelForCausalLM, options.model, dtype=wide).to(options.place)
    own = pretrained(AutoConfig, options.model).dtype or torch.float32
    model = rewire(copy.deepcopy(original), wiring)

    def measured() -> Distance:
        return distance(model, original, text, window=options.window, batch=options.batch)

    perplexed, rewired = perplexity(original, text, window=options.window, batch=options.batch).value, measured()
    solve(model, wiring, rows, options.ridge, options.batch, progress)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(own))  # what is written is what is measured
    found = Fitted(rows.numel(), perplexed, rewired, measured())
    if not found.fitted.kl.value <= rewired.kl.value:  # equal: a family that was born so
        raise LadderError(
            f"fitted on {found.tokens} tokens the model is farther from its original (KL {found.fitted.kl.value:.4g}) "
            f"than merely rewired ({rewired.kl.value:.4g}): give more --tokens, or a larger --ridge"
        )
    return model.to("cpu", own), found


def _widest(config: Any) -> int:
    return int(max(config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size))


def _rows(options: FitOptions, widest: int) -> tuple[Tensor, Tensor]:
    """[rows, window] to fit on, a multiple of a batch, and the text to measure on."""
    shards = Shards.open(options.data)
    windows = len(Windows(shards, options.window))
    measured = min(MEASURED, windows // 10)
    spare = max(measured, windows // 100)  # what ladder adapt evaluates on, if nothing else is named
    wanted = options.tokens or PER_INPUT * widest
    most = (windows - spare) // options.batch * options.batch
    if not most or not measured:
        raise LadderError(
            f"{options.data} has {shards.tokens} tokens: a batch of {options.batch} windows of {options.window} and a "
            "tenth to measure on are needed; give more data, or a smaller --batch or --window"
        )
    count = min(most, -(-wanted // (options.batch * options.window)) * options.batch)
    chosen = Spread(Windows(shards, options.window, limit=most), count)
    rows = torch.stack([chosen[index]["input_ids"] for index in range(count)])
    return rows, shards.read((windows - measured) * options.window, measured * options.window)
