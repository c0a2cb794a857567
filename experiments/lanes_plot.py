"""The picture of two lanes: milliseconds per token of one rank, by the time of an all-reduce.

python -m experiments.lanes_plot results/two_lanes_h200.jsonl results/two_lanes.png
"""

import json
import sys
from pathlib import Path
from typing import Any

from ladder.charts.looks import LOOKS
from ladder.plotting import load_pyplot, plot_style

LINKS = {None: "none", "nvlink_oneshot": "8 us", "nvlink_nccl_graph": "13 us", "nvlink_nccl": "24 us"}
LINKS["pcie_shm_tp8"] = "62 us"
# wiring, lanes, how the bar is filled
ARMS = (
    ("standard", 1, {}),
    ("ladder", 1, {"alpha": 0.35}),
    ("ladder", 2, {}),
    ("ladder-2", 2, {}),
    ("parallel-1", 2, {}),
)
PANELS = (
    ("llama-3-70b", 1, "70B, one rank of 8, batch 1"),
    ("llama-3-70b", 16, "70B, one rank of 8, batch 16"),
    ("llama-3-8b", 1, "8B on one GPU, batch 1"),
    ("llama-3-8b", 16, "8B on one GPU, batch 16"),
)


def fastest(lines: list[dict[str, Any]], size: str, batch: int, link: str | None, wiring: str, lanes: int) -> float:
    """The faster of the ways to compute on so many lanes."""
    wanted = {"measure": "decode", "size": size, "batch": batch, "link_name": link, "wiring": wiring, "lanes": lanes}
    found = [line["ms"] for line in lines if all(line.get(key) == value for key, value in wanted.items())]
    return min(found, default=float("nan"))


def main(source: Path, target: Path) -> None:
    lines = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    pyplot = load_pyplot()
    with plot_style(pyplot):
        figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), width_ratios=(3, 1))
        for axis, (size, batch, title) in zip((*axes[:, 0], *axes[:, 1]), PANELS, strict=True):
            links = list(LINKS) if size == "llama-3-70b" else [None]
            arms = [arm for arm in ARMS if size == "llama-3-70b" or arm[0] != "ladder-2"]
            for place, (wiring, lanes, fill) in enumerate(arms):
                times = [fastest(lines, size, batch, link, wiring, lanes) for link in links]
                at = [n + (place - (len(arms) - 1) / 2) * 0.8 / len(arms) for n in range(len(links))]
                name = wiring if wiring == "standard" else f"{wiring}, {'one lane' if lanes == 1 else 'two lanes'}"
                axis.bar(at, times, 0.8 / len(arms) * 0.92, color=LOOKS[wiring].colour, label=name, **fill)
                for x, ms in zip(at, times, strict=True):
                    axis.text(x, ms, f"{ms:.1f}", ha="center", va="bottom", fontsize=6.5)
            axis.set_title(title, fontsize=10, loc="left")
            axis.set_xticks(range(len(links)), [LINKS[link] for link in links] if len(links) > 1 else [""])
            axis.set_ylabel("ms per token")
        axes[1, 0].set_xlabel("time of an all-reduce (emulated; alpha of the link)")
        axes[0, 0].legend(fontsize=8, frameon=False, loc="upper left")
        figure.suptitle("Sub-blocks that do not wait for each other: one H200", x=0.01, ha="left")
        figure.tight_layout()
        figure.savefig(target, dpi=130)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
