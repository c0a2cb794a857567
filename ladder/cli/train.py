"""`ladder fit`, `ladder adapt` and `ladder train`: models that are made to fit their wiring."""

from typing import Any

import typer

from ladder.cli.verbs import steps_bar, verb
from ladder.train.options import AdaptOptions, FitOptions, ScratchOptions, TrainingOptions


@verb(FitOptions)
def fit(options: FitOptions) -> None:
    """Fit a model's weights to another wiring by least squares, layer by layer: no training. What damage is left is for
    ladder adapt --begin.
    """
    from ladder.scan.fit import fit

    with steps_bar("loading") as progress:
        found = fit(options, progress)
    far = [each.kl.value for each in (found.rewired, found.fitted)]
    perplexed = [each.perplexity.value for each in (found.rewired, found.fitted)]
    typer.echo(
        f"wrote {options.out}, fitted on {found.tokens} tokens: KL to the original {far[0]:.4g} rewired, {far[1]:.4g} "
        f"fitted; perplexity {found.original:.5g} original, {perplexed[0]:.5g} rewired, {perplexed[1]:.5g} fitted"
    )


@verb(AdaptOptions, TrainingOptions)
def adapt(options: AdaptOptions, training: TrainingOptions) -> None:
    """Retrain a model under another wiring by self-distillation, until it is what it was. Continues a run that was
    stopped; under torchrun on as many GPUs and machines as it is given.
    """
    from ladder.train.distill import adapt

    with steps_bar("loading") as progress:
        found = adapt(options, training, progress)
    _tell(found, f"wrote {options.out}")


@verb(ScratchOptions, TrainingOptions)
def train(options: ScratchOptions, training: TrainingOptions, named: frozenset[str]) -> None:
    """Train a model of any wiring from scratch."""
    from ladder.train.scratch import train

    with steps_bar("loading") as progress:
        found = train(options, training, progress, named)
    _tell(found, f"wrote {options.out}")


def _tell(found: dict[str, Any], done: str) -> None:
    """The last evaluation, once: torchrun starts this on every rank."""
    tokens = found.pop("tokens")  # of whole steps
    if found.pop("main"):
        figures = ", ".join(f"{name.removeprefix('eval_')} {value:.4f}" for name, value in found.items())
        typer.echo(f"{done}, {tokens} tokens: {figures}")
