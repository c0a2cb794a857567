"""How the GPUs of this machine are connected, by `nvidia-smi topo -m`. No torch here."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

# by nvidia-smi's names, the closest first; NV is followed by the number of NVLinks
KINDS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "PCIe, through a CPU's host bridge",
    "NODE": "PCIe, through the host bridges of one CPU",
    "SYS": "PCIe, from CPU to CPU",
}
ORDER = list(KINDS)
SECONDS = 20.0  # for nvidia-smi


@dataclass(frozen=True)
class Topology:
    """The connection of each pair of GPUs, as nvidia-smi names it."""

    pairs: Mapping[tuple[int, int], str]

    @property
    def worst(self) -> str | None:
        """The kind of the longest way between two of them; None: a single GPU, or nothing that we know."""
        kinds = [re.sub("[0-9]+$", "", kind) for kind in self.pairs.values()]
        return max(kinds, key=ORDER.index) if kinds and all(kind in ORDER for kind in kinds) else None


def parsed(text: str) -> Topology:
    """From what nvidia-smi prints: a matrix whose first columns are the GPUs'."""
    pairs: dict[tuple[int, int], str] = {}
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    columns = [int(number) for number in re.findall(r"GPU([0-9]+)(?=\s)", plain.splitlines()[0])] if plain else []
    for line in plain.splitlines()[1:]:
        row = re.match(r"GPU([0-9]+)\s+(.*)", line)
        if row is None:
            continue
        cells = row[2].split()
        pairs |= {
            (int(row[1]), other): cell
            for other, cell in zip(columns, cells, strict=False)
            if other > int(row[1]) and cell != "X"
        }
    return Topology(pairs)


def topology() -> Topology | str:
    """Of this machine, or why it is not known."""
    try:
        command = ["nvidia-smi", "topo", "-m"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except FileNotFoundError:
        return "nvidia-smi is not there"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi did not answer: {error}"
    if done.returncode:
        return f"nvidia-smi topo -m failed: {' '.join((done.stderr or done.stdout).split())[:200]}"
    return parsed(done.stdout)
