"""ladder fit: a checkpoint under another wiring, its weights solved for; minutes, and no training."""

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ladder.adapt.options import FitOptions
from ladder.adapt.original import read_original, read_tokenizer
from ladder.adapt.shards import Shards, Spread, Windows
from ladder.adapt.solve import Progress, solve
from ladder.adapt.work import write
from ladder.config.model import FAMILIES as NATIVE
from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.card import fitted_card
from ladder.hf.convert import check_new, new_folder
from ladder.hf.load import pretrained, quiet
from ladder.hf.measures import Distance, distance

PER_INPUT = 64  # tokens for each unknown of an equation
MEASURED = 8  # windows, the last ones of the data


def fit(options: FitOptions, progress: Progress) -> dict[str, Distance]:
    """Write `options.out`; returns how far the original, it rewired, and it fitted are from it, on the data's end."""
    check_new(options.out)
    with quiet():
        config, wiring = read_original(options.model, options.wiring, options.window)
        if wiring.is_standard:
            raise LadderError("the wiring is standard, as the model is: there is nothing to fit")
        if wiring.local:
            raise LadderError(f"{str(wiring)!r} keeps sums on their ranks, each of which would need weights of its own")
        tokenizer = read_tokenizer(options.model, config, options.data)
        rows, text = _rows(options, _widest(config))
        original = pretrained(AutoModelForCausalLM, options.model, dtype="auto")
        own = original.dtype
        if options.dtype != "auto" or options.place == "cpu":
            original.to(torch.bfloat16 if options.dtype == "bfloat16" else torch.float32)
        model = copy.deepcopy(original.to(options.place))

        def measured() -> Distance:
            return distance(model, original, text, window=options.window, batch=options.batch)

        found = {"original": measured()}
        rewire(model, wiring)
        found["rewired"] = measured()
        try:
            solve(model, wiring, rows, options.ridge, options.batch, progress)
        except torch.OutOfMemoryError:
            raise LadderError(
                f"the streams of {rows.numel()} tokens do not fit into the GPU's memory beside the model: give fewer "
                "--tokens, or --device cpu"
            ) from None
        found["fitted"] = measured()
        with new_folder(options.out) as folder:
            write(model.to("cpu", own), folder)
            tokenizer.save_pretrained(folder)
            card = fitted_card(options.model, options.out.name, config.model_type, wiring, config.model_type in NATIVE)
            (folder / "README.md").write_text(card, encoding="utf-8")
            if options.out.exists():
                options.out.rmdir()  # empty, as was seen
            folder.rename(options.out)
    return found


def _widest(config: Any) -> int:
    return int(max(config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size))


def _rows(options: FitOptions, widest: int) -> tuple[torch.Tensor, torch.Tensor]:
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
