"""Whether a model fits into memory, and which choice would. No torch here."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ladder.config import ModelConfig
from ladder.errors import LadderError


class TooLarge(LadderError):
    """A model that does not fit."""


class Need(NamedTuple):
    """Bytes of weights and of keys and values."""

    weights: float
    cache: float

    @property
    def total(self) -> float:
        return self.weights + self.cache


def check_memory(what: str, need: Need, room: float, where: str, ways: Callable[[], Iterable[str]]) -> None:
    """Refuse what needs more than `room` bytes; the message names the `ways` out."""
    if need.total <= room:
        return
    raise TooLarge(
        f"{what} needs {need.total / 1e9:.1f} GB on {where} ({need.weights / 1e9:.1f} GB of weights, "
        f"{need.cache / 1e9:.1f} GB of keys and values), which has {room / 1e9:.1f} GB to use: "
        f"try {' or '.join(ways())}"
    )


def more_ranks(config: ModelConfig, tp: int, most: int, fits: Callable[[int], bool]) -> list[str]:
    """The option for the smallest larger number of ranks, up to `most`, with which the model `fits`; none: empty."""
    found = next((n for n in config.degrees() if tp < n <= most and fits(n)), None)
    return [] if found is None else [f"--tp {found}"]
