"""Recipes: a size and how it is trained; and how each method adapts a model. A recipe is a row; options that are given
override it.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ladder.config import ModelConfig
from ladder.errors import LadderError, check_known
from ladder.options import option
from ladder.train.options import METHODS, WHOLE, TrainingOptions


@dataclass(frozen=True)
class Recipe:
    """A named size, and options of its training."""

    size: str
    what: str
    training: dict[str, Any] = field(default_factory=dict)  # fields of TrainingOptions

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.named(self.size)

    def filled(self, given: TrainingOptions, named: Collection[str] | None = None) -> TrainingOptions:
        """The recipe's values for every option that is not `named`; None: that has its default."""
        if named is None:
            named = {entry.name for entry in fields(given) if getattr(given, entry.name) != entry.default}
        return replace(given, **{name: value for name, value in self.training.items() if name not in named})


def recipe(name: str) -> Recipe:
    check_known("recipe", name, RECIPES)
    return RECIPES[name]


# arXiv 2501.06589: 25,000 steps of 4 Mi tokens of FineWeb-edu, AdamW, 2,000 steps of warm-up
_PAPER: dict[str, Any] = {"tokens": 25_000 << 22, "seq_len": 2048, "batch": 2048, "lr": 3e-4, "warmup": 0.08}
_PAPER |= {"micro_batch_size": 8}
_SMALL: dict[str, Any] = {"tokens": 300_000_000, "seq_len": 1024, "batch": 64, "lr": 1.5e-3, "warmup": 0.03}

RECIPES: dict[str, Recipe] = {
    "paper-1B": Recipe("1B", "the paper's smaller model from scratch", _PAPER),
    "paper-1.5B": Recipe("1.5B", "its larger ladder model of about the same speed", _PAPER),
    "paper-3B": Recipe("3B", "the paper's larger model from scratch", _PAPER | {"micro_batch_size": 4}),
    "paper-4.5B": Recipe("4.5B", "its larger ladder model of about the same speed", _PAPER | {"micro_batch_size": 4}),
    # experiments/scratch.py: wirings side by side
    "50M": Recipe("50M", "50 million parameters besides the embedding", _SMALL),
    "50M-long": Recipe("50M-long", "the same with 30% more layers", _SMALL),
    # the model inside the package
    "embedded": Recipe(
        "embedded",
        "small enough to be shipped: 8 heads, 4096 tokens",
        _SMALL | {"tokens": 600_000_000, "lr": 4e-3, "batch": 128, "micro_batch_size": 128},
    ),
}


def check_start(size: str | None, named: str | None) -> None:
    """Refuse what is not either a known size or a known recipe."""
    if (size is None) == (named is None):
        known = ", ".join(f"{name} ({row.what})" for name, row in RECIPES.items())
        raise LadderError(f"give either --size or --recipe; recipes are {known}")
    if size is not None:
        ModelConfig.named(size)
    else:
        recipe(str(named))


INPUTS = "inputs"  # beside the methods: any of them, of a model that reads a file of inputs
_TEXT: dict[str, Any] = {"batch": 16, "lr": 3e-4, "warmup": 0.05, "weight_decay": 0.01}
# how `ladder adapt` trains where nothing else is given; for text as docs/quality.md has measured it
ADAPT_DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(WHOLE, _TEXT),
    "lora": {**_TEXT, "lr": 1e-3},
    "side": {**_TEXT, "lr": 3e-3},
    INPUTS: {"batch": 64, "lr": 1e-3, "warmup": 0.02, "weight_decay": 0.1},
}


def _by_method(name: str) -> str:
    """The defaults of an option of `ladder adapt`, for its help."""
    own, inputs = ADAPT_DEFAULTS["full"][name], ADAPT_DEFAULTS[INPUTS][name]
    others = [(f"with {method}", ADAPT_DEFAULTS[method][name]) for method in METHODS]
    told = [f"{where} {value}" for where, value in [*others, ("for a file of inputs", inputs)] if value != own]
    return "; default: " + ", ".join([f"{own:g}", *told]) + "."


@dataclass(frozen=True)
class AdaptTrainingOptions(TrainingOptions):
    """The run itself, where defaults depend on what is trained."""

    batch: int | None = option(None, "Sequences of a step, over all ranks" + _by_method("batch"))  # type: ignore[assignment]
    lr: float | None = option(None, "Learning rate, at its peak" + _by_method("lr"))  # type: ignore[assignment]
    warmup: float | None = option(  # type: ignore[assignment]
        None, "Share of the steps in which the learning rate rises from 0" + _by_method("warmup")
    )
    weight_decay: float | None = option(  # type: ignore[assignment]
        None, "Weight decay, times the learning rate" + _by_method("weight_decay")
    )

    def filled(self, kind: str) -> TrainingOptions:
        given = {entry.name: getattr(self, entry.name) for entry in fields(TrainingOptions)}
        missing = {name: value for name, value in ADAPT_DEFAULTS[kind].items() if given[name] is None}
        return TrainingOptions(**{**given, **missing})
