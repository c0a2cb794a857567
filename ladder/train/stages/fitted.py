"""The first stage of `ladder adapt`: the weights fitted by least squares, into the folder of the run. They stay there:
a run that was stopped goes on from the same weights.
"""

import gc
import logging
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ladder.data.shards import Shards
from ladder.errors import LadderError
from ladder.files import write_text
from ladder.hf.load import quantizer_of, weight_count
from ladder.perf.memory import USABLE, size_text
from ladder.progress import Progress
from ladder.scan.checkpoints import read_original
from ladder.scan.fit import fit, parted
from ladder.scan.options import FitOptions
from ladder.scan.solve import FitFailed
from ladder.train.folder import CHECKPOINTS, FITTED, RUN
from ladder.train.options import STALENESS_WAYS, AdaptOptions, TrainingOptions

logger = logging.getLogger(__name__)
FAILED = "fitted.failed"  # why it failed, for the other ranks
STREAMS = 10  # of all tokens, that `solve` keeps
_EVERY = 0.5  # seconds between two looks of a rank that waits


def decided(options: AdaptOptions, training: TrainingOptions, config: Any) -> tuple[AdaptOptions, str | None]:
    """Options that fit only what can be fitted, the same on every rank; and why that is nothing, where the user did not
    ask for that.
    """
    if not options.fit_tokens or options.init_from is not None:
        return options, None
    reason = _chosen(options) or _impossible(options, training, config)
    if reason is None:
        return options, None
    try:
        return replace(options, fit_tokens=0), reason
    except LadderError as error:  # staleness rises then, for which other options may leave no room
        raise LadderError(f"the weights cannot be fitted first ({reason}), and then {error}") from None


def _chosen(options: AdaptOptions) -> str | None:
    """What the options say instead."""
    if options.method == "side":
        return "--method side leaves the model's weights as they are"
    if options.staleness is not None or options.staleness_way != STALENESS_WAYS[0]:
        return "--staleness begins with the original's weights"
    return "emulated --ranks have no weights of their own" if options.ranks > 1 else None


def _impossible(options: AdaptOptions, training: TrainingOptions, config: Any) -> str | None:
    """What `ladder fit` refuses, and `ladder adapt` does not: what both refuse is left to the latter."""
    if (method := quantizer_of(config)) is not None:
        return f"the weights of {options.model} are quantized ({method})"
    try:
        _, wiring, length = read_original(options.model, options.wiring, training.seq_len)
        _, most, measured = parted(shards := Shards.open(training.data), length, FitOptions.batch)
    except LadderError:
        return None
    if wiring.is_standard:
        return "the wiring is standard, as the model is"
    if wiring.local:
        return f"{str(wiring)!r} leaves partial sums on their ranks"
    return None if most and measured else f"{training.data} has {shards.tokens} tokens, too few to fit on"


def fit_first(options: AdaptOptions, training: TrainingOptions, args: Any, progress: Progress) -> None:
    """OUT/fitted is there when this returns, on every rank. The first one fits; the others look into the folder: a
    collective that they waited in would time out. Where it fails, all ranks do.
    """
    out, failed, first = options.out, options.out / FAILED, args.process_index == 0
    if first:
        failed.unlink(missing_ok=True)
    args.distributed_state.wait_for_everyone()
    if not (out / RUN).exists():
        raise LadderError(f"this rank does not see {out} as others do: all machines must")
    while not (out / FITTED / "config.json").exists() and not failed.exists():
        if not first:
            time.sleep(_EVERY)
            continue
        try:
            _fit(options, training, progress)
        except Exception as error:
            write_text(failed, " ".join(str(error).split()))
            args.distributed_state.wait_for_everyone()
            failed.unlink()
            if not (out / CHECKPOINTS).exists():  # nothing stays of a run that has not begun
                with suppress(OSError):
                    (out / RUN).unlink()
                    out.rmdir()
            raise
    if failed.exists():
        told = failed.read_text(encoding="utf-8")
        args.distributed_state.wait_for_everyone()
        raise LadderError(told)


def _fit(options: AdaptOptions, training: TrainingOptions, progress: Progress) -> None:
    folder = options.out / FITTED
    shutil.rmtree(folder.with_name(f"{FITTED}.partial"), ignore_errors=True)  # of a run that was killed
    wish = FitOptions(
        options.model, folder, options.wiring, training.data, options.fit_tokens, training.seq_len,
        dtype=_dtype(options, training), device=training.device,
    )  # fmt: skip
    try:
        found = fit(wish, progress)
    except FitFailed as error:
        raise LadderError(f"{error.what}: give other --fit-tokens, or 0 to train without") from None
    kls = f"{found.rewired.kl.value:.4g} rewired, {found.fitted.kl.value:.4g} fitted"
    logger.info("fitted on %d tokens: KL to the original %s", found.tokens, kls)
    gc.collect()
    if training.device_type == "cuda":
        torch.cuda.empty_cache()


def _dtype(options: AdaptOptions, training: TrainingOptions) -> str:
    """float32, or the checkpoint's where a GPU cannot hold that."""
    if training.device_type != "cuda":
        return "float32"
    config, *_ = read_original(options.model, options.wiring, training.seq_len)
    room, own = USABLE * torch.cuda.mem_get_info()[0], (config.dtype or torch.float32).itemsize
    numbers = fit_numbers(weight_count(AutoModelForCausalLM, config), options.fit_tokens, config.hidden_size)
    if 4 * numbers <= room:
        return "float32"
    if own * numbers > room:
        raise LadderError(
            f"fitting {options.model} on {options.fit_tokens} tokens needs {size_text(own * numbers)} on one GPU, "
            f"which has {size_text(room)} to use: give fewer --fit-tokens, or 0 to train without"
        )
    logger.warning("%s is fitted in its own dtype: float32 does not fit on a GPU", options.model)
    return "auto"


def fit_numbers(weights: int, tokens: int, hidden: int) -> int:
    """How many numbers a fit keeps: two copies of the weights, and about ten streams of all tokens."""
    return 2 * weights + STREAMS * tokens * hidden


def fitted_weights(options: AdaptOptions) -> Path | None:
    """The folder of the weights that the training begins with; None: those of the original."""
    return options.out / FITTED if options.fits else options.init_from
