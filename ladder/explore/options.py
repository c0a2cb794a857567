"""Options of `ladder explore`. No torch here."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from ladder.errors import LadderError
from ladder.explore.choices import Offer
from ladder.options import option


@dataclass(frozen=True)
class ExploreOptions:
    """What the page offers: the first of each is chosen at first. Several with commas, or the option repeated."""

    inputs: tuple[Path, ...] = field(
        default=(),
        metadata={
            "argument": True,
            "help": "Files of measurements, as for `ladder report`, to show beside predictions.",
        },
    )
    size: tuple[str, ...] = option((), "Named sizes to offer; default: the usual ones, llama-3-70b first.")
    chip: tuple[str, ...] = option((), "Chips to offer, as in `ladder plan`; default: all, h200 first.")
    tp: tuple[str, ...] = option((), "Numbers of GPUs that share a model; default: 1,2,4,8,16, 8 first.")
    link: tuple[str, ...] = option((), "Links to offer, as in `ladder plan`; default: all, nvlink_nccl first.")
    batch: tuple[str, ...] = option((), "Batches to offer; default: 1,2,4, ... 256.")
    prompt: tuple[str, ...] = option((), "Contexts to offer: tokens of a prompt; default: 1024,128,4096,32768.")
    new: int = option(512, "New tokens after each prompt.")
    weights: tuple[str, ...] = option((), "Formats of weights to offer; default: bf16,fp8,int8,int4.")
    out: Path | None = option(
        None, "Write the page to this HTML file instead, with every answer inside; the defaults are then fewer."
    )
    port: int = option(0, "Port on 127.0.0.1; default: any that is free.")
    open: bool = option(True, "Open the page in the browser.")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise LadderError(f"--port must be from 0 to 65535, not {self.port}")

    def offer(self) -> Offer:
        """Checked; what is not given comes from the defaults of a page that asks, or of a file."""
        base = Offer.of_a_file() if self.out is not None else Offer.of_a_server()
        names = {name: _texts(getattr(self, name)) for name in ("size", "chip", "link", "weights")}
        if re.search("[0-9]GB,", "".join(self.chip)):  # a free entry has commas of its own
            names["chip"] = self.chip
        names["link"] = _links(self.link)
        numbers = {name: _numbers(name, getattr(self, name)) for name in ("tp", "batch", "prompt")}
        given = {name: values for name, values in (names | numbers).items() if values}
        return base.with_(new=self.new, **given)


def _texts(given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for text in given for part in text.split(",") if part.strip()))


def _links(given: tuple[str, ...]) -> tuple[str, ...]:
    """A link's times have a comma of their own."""
    found: list[str] = []
    for text in given:
        found += re.findall(r"[0-9.]+\s*(?:us|ms|s)\s*,\s*[0-9.]+\s*[KMG]B/s|[^,\s]+", text)
    return tuple(dict.fromkeys(found))


def _numbers(name: str, given: tuple[str, ...]) -> tuple[int, ...]:
    texts = _texts(given)
    if not all(re.fullmatch("[0-9]{1,7}", text) for text in texts):
        raise LadderError(f"--{name} {','.join(given)!r} is not numbers with commas between, as in 1,4,16")
    return tuple(dict.fromkeys(map(int, texts)))
