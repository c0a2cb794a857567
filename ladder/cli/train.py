"""`ladder fit`, `ladder adapt` and `ladder train`: weights for a wiring, by least squares or by training."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from ladder.cli.verbs import steps_bar, verb
from ladder.config.early import check_model_named
from ladder.data.check import check_training_data
from ladder.engine.executors.torchrun import torchrun_rank
from ladder.files import check_new, writable
from ladder.scan.early import check_early, refuse_local, refuse_standard
from ladder.scan.options import FitOptions
from ladder.train.early import adapt_early, train_early
from ladder.train.options import AdaptOptions, ScratchOptions, TrainingOptions
from ladder.train.recipes import AdaptTrainingOptions


@verb(FitOptions)
def fit(options: FitOptions) -> None:
    """Fit a model's weights to another wiring by least squares, layer by layer: no training. Train the result further
    with ladder adapt --init-from.
    """
    check_model_named(options.model)
    check_new(options.out.resolve())
    check_training_data(options.data)
    if (known := check_early(options.model, options.wiring, options.seq_len)) is not None:
        refuse_standard(known[0])
        refuse_local(known[0])
    from ladder.scan.fit import fit  # imports for seconds: not for what can be refused at once
    from ladder.scan.fit_inputs import fit_inputs, reads_inputs

    with steps_bar("loading") as progress:
        if reads_inputs(options.model):
            typer.echo(f"wrote {options.out}, {fit_inputs(options, progress)}")
            return
        found = fit(options, progress)
    rewired, fitted = found.rewired, found.fitted
    typer.echo(
        f"wrote {options.out}, fitted on {found.tokens} tokens: KL to the original {rewired.kl.value:.4g} rewired, "
        f"{fitted.kl.value:.4g} fitted; perplexity {found.original:.5g} original, {rewired.perplexity.value:.5g} "
        f"rewired, {fitted.perplexity.value:.5g} fitted"
    )


@verb(AdaptOptions, AdaptTrainingOptions)
def adapt(options: AdaptOptions, training: AdaptTrainingOptions) -> None:
    """Fit a model's weights to another wiring, then train it by self-distillation from its original. Continues a run
    that was stopped; under torchrun on several GPUs and machines.
    """
    check_model_named(options.model)
    writable(options.out)
    adapt_early(options, training)
    _check_data(training)
    from ladder.scan.fit_inputs import reads_inputs  # imports for seconds: not for what can be refused at once
    from ladder.train.distill import adapt
    from ladder.train.distill_inputs import adapt_inputs

    with _stoppable(options.out), steps_bar("loading") as progress:
        found = (adapt_inputs if reads_inputs(options.model) else adapt)(options, training, progress)
    _print_evaluation(found, f"wrote {options.out}")


@verb(ScratchOptions, TrainingOptions)
def train(options: ScratchOptions, training: TrainingOptions, named: frozenset[str]) -> None:
    """Train a model of any wiring from scratch."""
    writable(options.out)
    train_early(options, training, named)
    _check_data(training)
    from ladder.train.scratch import train  # imports for seconds: not for what can be refused at once

    with _stoppable(options.out), steps_bar("loading") as progress:
        found = train(options, training, progress, named)
    _print_evaluation(found, f"wrote {options.out}")


@contextmanager
def _stoppable(out: Path) -> Iterator[None]:
    """Ctrl-C tells, once, where the same command goes on."""
    try:
        yield
    except KeyboardInterrupt:
        from ladder.train.folder import CHECKPOINTS, complete_checkpoints

        found, own = complete_checkpoints(out / CHECKPOINTS), torchrun_rank()
        step = found[-1].name.rpartition("-")[2] if found else None
        how = f"continues from step {step}" if step else "begins again, since no checkpoint was written yet"
        if own is None or own.rank == 0:
            typer.echo(f"ladder: stopped: the same command {how}", err=True)
        raise typer.Exit(130) from None


def _check_data(training: TrainingOptions) -> None:
    check_training_data(training.data)
    if training.valid is not None:
        check_training_data(training.valid)


def _print_evaluation(found: dict[str, Any], done: str) -> None:
    """The last evaluation, once: torchrun starts this on every rank."""
    what = "examples" if "examples" in found else "tokens"
    count = found.pop(what)  # of whole steps
    if found.pop("main"):
        figures = ", ".join(f"{name.removeprefix('eval_')} {value:.4f}" for name, value in found.items())
        typer.echo(f"{done}, {count} {what}: {figures}")
