"""What a sweep cannot be, whatever machine it runs on: refused before torch is imported. No torch here."""

from collections.abc import Iterator
from dataclasses import replace

from ladder.bench.sweep.options import REAL, BenchOptions
from ladder.config import SIZES, ModelConfig
from ladder.config.quantization import named_format
from ladder.errors import LadderError, check_known
from ladder.files import check_appendable
from ladder.perf.arms import wiring_of
from ladder.perf.plan import check_degree, known_link


def check_sweep(options: BenchOptions) -> None:
    """Refuse what is not known, does not fit a size, or has no place to be written to."""
    chosen = options.chosen
    for _, _, config in sized(options):
        for tp in chosen.tp:
            for weights in chosen.weights:
                check_degree(replace(config, weights=named_format(weights)), tp)
    for tp in chosen.tp:
        for name in chosen.emulate_link if tp > 1 else ():
            check_link(name.replace("{tp}", str(tp)))
    check_appendable(options.out)


def sized(options: BenchOptions) -> Iterator[tuple[str, ModelConfig, ModelConfig]]:
    """Of each size its name, the whole model, and what is measured of it."""
    chosen = options.chosen
    for size in chosen.size:
        check_known("size", size, SIZES)
        whole = ModelConfig.named(size)
        if options.layers is not None and options.layers > whole.layers:
            raise LadderError(f"layers must be at most {size}'s {whole.layers}, not {options.layers}")
        config = whole if options.layers is None else whole.first(options.layers)
        if chosen.prompt + chosen.new > config.context:
            raise LadderError(
                f"a prompt of {chosen.prompt} and {chosen.new} new tokens are more than {size}'s context of "
                f"{config.context}: the longest prompt is {max(0, config.context - chosen.new)}"
            )
        for arm in chosen.arm:
            wiring_of(arm, config.layers)
        yield size, whole, config


def check_link(name: str) -> None:
    """Refuse what is neither a link nor the one that is there."""
    if name != REAL:
        known_link(name, more=(REAL,))
