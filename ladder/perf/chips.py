"""Chips: what one GPU reads, computes and holds, from its vendor's data sheet. No torch here."""

import re
from dataclasses import dataclass

from ladder.errors import LadderError, nearest

LARGEST = 1e6  # of any of the figures: a typing error should cost a sentence


@dataclass(frozen=True)
class Chip:
    """One GPU. Figures of the data sheet; how much of them is reached is the engine's business."""

    name: str
    memory_gb: float
    read_tb_s: float
    bf16_tflop_s: float  # dense, float32 accumulation
    full_name: str = ""  # as torch calls it
    source: str = ""
    links: tuple[str, ...] = ("nvlink_nccl",)  # of the table of links: between the GPUs of one machine, nearest first

    @classmethod
    def parse(cls, text: str) -> "Chip":
        """A name of the table, or a free entry `memory,read,compute` as in `141GB,4.8TB/s,989TFLOP/s`."""
        name = text.strip().lower()
        if name in CHIPS:
            return CHIPS[name]
        figures = re.fullmatch(r"([0-9.]+)GB,([0-9.]+)TB/s,([0-9.]+)TFLOP/s", text.replace(" ", ""))
        if figures and all(part.count(".") < 2 and 0 < float(f"0{part}") < LARGEST for part in figures.groups()):
            memory, read, compute = map(float, figures.groups())
            return cls(text, memory, read, compute)
        raise LadderError(
            f"unknown chip {text!r}: write memory, reading and computing as in '141GB,4.8TB/s,989TFLOP/s', or one of "
            f"{', '.join(CHIPS)}; the nearest is {nearest(name, CHIPS)!r}"
        )

    @classmethod
    def of(cls, full_name: str) -> "Chip | None":
        """The chip that torch calls so."""
        return next((chip for chip in CHIPS.values() if chip.full_name and chip.full_name in full_name), None)


_NVIDIA = "NVIDIA's data sheet"
_PCIE = ("pcie_p2p_nccl", "pcie_shm_tp8")
_PCIE_WITHOUT_PEERS = ("pcie_shm_tp2", "pcie_shm_tp4", "pcie_shm_tp8")  # the driver has no peer-to-peer for them
CHIPS: dict[str, Chip] = {
    "a100": Chip("a100", 80, 2.039, 312, "NVIDIA A100-SXM4-80GB", _NVIDIA),
    "h100": Chip("h100", 80, 3.35, 989, "NVIDIA H100 80GB HBM3", _NVIDIA),
    "h200": Chip("h200", 141, 4.8, 989, "NVIDIA H200", _NVIDIA),
    "b200": Chip("b200", 180, 8.0, 2250, "NVIDIA B200", _NVIDIA),
    "l40s": Chip("l40s", 48, 0.864, 362, "NVIDIA L40S", _NVIDIA, _PCIE),
    "rtx-4090": Chip("rtx-4090", 24, 1.008, 165, "NVIDIA GeForce RTX 4090", _NVIDIA, _PCIE_WITHOUT_PEERS),
}
