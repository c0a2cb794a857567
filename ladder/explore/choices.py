"""What a page offers to choose from, and one choice of it. No torch here."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ladder.comm.link import LINKS
from ladder.config.quantization import format_names
from ladder.errors import LadderError
from ladder.perf.chips import CHIPS, Chip
from ladder.perf.plan import Deployment, known_link, known_size
from ladder.perf.reach import across, named_for

# In the order in which they are drawn. `none` is no model: no communication.
WIRINGS = ("standard", "parallel", "desync-2x", "ladder", "ladder-1-2", "ladder-2", "parallel-1", "none")
SIZES = (
    *("llama-3-70b", "llama-3-8b", "llama-3.1-405b", "llama-3.2-1b", "llama-3.2-3b", "34B", "176B"),
    *("mixtral-8x7b", "qwen3-30b-a3b"),
)
WEIGHTS = ("bf16", "fp8", "int8", "int4")
ONE_MACHINE = 8  # GPUs
NVLINK = "nvlink"  # how the names of its links begin


@dataclass(frozen=True)
class Choice:
    """One setting of the page."""

    size: str
    chip: str
    tp: int
    link: str
    batch: int
    prompt: int
    weights: str
    new: int

    @classmethod
    def read(cls, given: dict[str, str]) -> "Choice":
        """From texts, as they come from a page."""
        texts = {name: given.get(name, "") for name in cls.__dataclass_fields__}
        if unknown := given.keys() - texts.keys():
            raise LadderError(f"unknown field {min(unknown)!r}: there are {', '.join(texts)}")
        numbers: dict[str, Any] = {}
        for name in ("tp", "batch", "prompt", "new"):
            if not re.fullmatch("[0-9]{1,7}", texts[name]):
                raise LadderError(f"{name} must be a number, not {texts[name]!r}")
            numbers[name] = int(texts[name])
        format_names((texts["weights"],))
        return cls(**{**texts, **numbers})

    def deployment(self, wiring: str) -> Deployment:
        given = (self.size, self.chip, self.tp, self.link, self.batch, self.prompt, self.new, wiring)
        return Deployment(*given, weights=self.weights)

    @property
    def key(self) -> str:
        """The name of its answer in a file. On one GPU no link is used."""
        link = "-" if self.tp == 1 else self.link
        return "|".join(map(str, (self.size, self.chip, self.tp, link, self.batch, self.prompt, self.weights)))

    @property
    def frontier_key(self) -> str:
        """The same of its frontier, which is over batches and GPUs."""
        return "|".join(map(str, (self.size, self.chip, self.link.split("_tp")[0], self.prompt, self.weights)))

    @property
    def command(self) -> str:
        """What predicts the same in a terminal."""
        size = f"ladder plan --size {self.size} --chip {_quoted(self.chip)} --tp {self.tp} --link {_quoted(self.link)}"
        return f"{size} --batch {self.batch} --prompt {self.prompt} --new {self.new} --weights {self.weights}"


def _quoted(text: str) -> str:
    return text if re.fullmatch(r"[\w.,/-]+", text) else f"'{text}'"


@dataclass(frozen=True)
class Offer:
    """Values of each field, the first of which is chosen at the beginning."""

    size: tuple[str, ...]
    chip: tuple[str, ...]
    tp: tuple[int, ...]
    link: tuple[str, ...]
    batch: tuple[int, ...]
    prompt: tuple[int, ...]
    weights: tuple[str, ...]
    new: int

    @classmethod
    def of_a_server(cls) -> "Offer":
        chips = ("h200", *(name for name in CHIPS if name != "h200"))
        links = ("nvlink_nccl", *(name for name in LINKS if name not in ("nvlink_nccl", "nvlink_fused")))
        batches = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        return cls(SIZES, chips, (8, 1, 2, 4, 16), links, batches, (1024, 128, 4096, 32768), WEIGHTS, 512)

    @classmethod
    def of_a_file(cls) -> "Offer":
        links = ("nvlink_nccl", "nvlink_oneshot", "pcie_p2p_nccl", "pcie_shm_tp2", "pcie_shm_tp4", "pcie_shm_tp8")
        return cls(SIZES[:2], ("h200", "h100"), (8, 1, 2, 4), links, (1, 16, 64), (1024,), ("bf16", "fp8"), 512)

    def with_(self, **given: Any) -> "Offer":
        """With other values, each checked."""
        new = replace(self, **given)
        for size in new.size:
            known_size(size)
        for chip in new.chip:
            Chip.parse(chip)
        for link in new.link:
            known_link(link)
        format_names(new.weights)
        for tp, batch, prompt in product(new.tp, new.batch, new.prompt):
            replace(new.first(), tp=tp, batch=batch, prompt=prompt).deployment(WIRINGS[0])
        return new

    def links(self, chip: str, tp: int) -> tuple[str, ...]:
        """Those that join so many GPUs of the chip: one that is named for a number joins no other, 16 are two machines,
        and NVLink is for chips that have it.
        """
        fits = [name for name in self.link if named_for(name) in (None, tp)]
        fits = [name for name in fits if tp <= ONE_MACHINE or across(name) or name not in LINKS]
        own = Chip.parse(chip).links
        has = any(name.startswith(NVLINK) for name in own)
        joined = [name for name in fits if has or not name.startswith(NVLINK)]
        return tuple(joined or fits)  # what was asked for alone is shown all the same

    def first(self) -> Choice:
        chip, tp = self.chip[0], self.tp[0]
        link = (*self.links(chip, tp), *self.link)[0]
        return Choice(self.size[0], chip, tp, link, self.batch[0], self.prompt[0], self.weights[0], self.new)

    def choices(self) -> Iterator[Choice]:
        """All of them, those on one GPU with one link."""
        for size, chip, tp, prompt, weights in product(self.size, self.chip, self.tp, self.prompt, self.weights):
            links = self.links(chip, tp) if tp > 1 else (*self.links(chip, tp), *self.link)[:1]
            for link, batch in product(links, self.batch):
                yield Choice(size, chip, tp, link, batch, prompt, weights, self.new)

    def listed(self) -> dict[str, Any]:
        """For the page: values with what they are called there."""
        titles = {name: {"value": name, "name": link_title(name)} for name in self.link}
        links = {
            chip: {str(tp): [titles[name] for name in self.links(chip, tp)] for tp in self.tp} for chip in self.chip
        }
        return {
            "size": [{"value": name, "name": name} for name in self.size],
            "chip": [{"value": name, "name": _chip_title(name)} for name in self.chip],
            "tp": [{"value": str(tp), "name": f"{tp} GPU{'s' * (tp > 1)}"} for tp in sorted(self.tp)],
            "links": links,
            "batch": [{"value": str(n), "name": f"{n}"} for n in sorted(self.batch)],
            "prompt": [{"value": str(n), "name": f"{n:,} tokens"} for n in sorted(self.prompt)],
            "weights": [{"value": name, "name": name} for name in self.weights],
        }


def link_title(name: str) -> str:
    """A link with its latency and bandwidth."""
    link, known = known_link(name)
    times = f"{link.alpha * 1e6:g} \N{MICRO SIGN}s + bytes / {link.beta / 1e9:g} GB/s"
    return name if known is None else f"{name}: {times}"


def _chip_title(name: str) -> str:
    chip = Chip.parse(name)
    return f"{name}: {chip.memory_gb:g} GB, {chip.read_tb_s:g} TB/s"
