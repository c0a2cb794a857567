"""The README's picture, as SVG: milliseconds per token of standard and Ladder models on one GPU, NVLink and PCIe.

python -m experiments.headline_plot results/two_lanes_h200.jsonl docs/pictures/headline.svg
"""

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, BAR, LEFT, RIGHT, SCALE = 860, 24, 128, 710, 16.0  # pixels; the axis ends at SCALE milliseconds
GROUPS = (
    ("Llama-3-8B on one GPU, batch 16", {"size": "llama-3-8b", "tp": 1, "batch": 16, "link_name": None}),
    ("Llama-3-70B, one rank of 8 over NVLink: 24 us an all-reduce, batch 1",
     {"size": "llama-3-70b", "tp": 8, "batch": 1, "link_name": "nvlink_nccl"}),
    ("Llama-3-70B, one rank of 8 over PCIe: 62 us an all-reduce, batch 1",
     {"size": "llama-3-70b", "tp": 8, "batch": 1, "link_name": "pcie_shm_tp8"}),
)  # fmt: skip
WIRINGS = ("standard", "ladder", "parallel-1")
STYLE = """text{font:14px system-ui,sans-serif;fill:#1f2328}.title{font-weight:600}.small{font-size:12px;fill:#59636e}
.standard{fill:#8c959f}.ladder{fill:#0072b2}.parallel-1{fill:#56b4e9}.back{fill:#ffffff}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}.back{fill:#0d1117}.standard{fill:#7d8590}}"""


def fastest(lines: list[dict[str, Any]], wiring: str, wanted: dict[str, Any]) -> float:
    """Milliseconds per token, on one lane or two, whichever way to launch them was faster."""
    wanted = {"measure": "decode", "wiring": wiring, **wanted}
    return float(min(line["ms"] for line in lines if all(line.get(key) == value for key, value in wanted.items())))


def draw(lines: list[dict[str, Any]]) -> str:
    parts, y = list[str](), 34
    parts.append(f'<text class="title" x="12" y="{y - 10}">Milliseconds per token on one H200, context 1024</text>')
    for title, wanted in GROUPS:
        y += 26
        parts.append(f'<text x="12" y="{y}">{title}</text>')
        standard = fastest(lines, "standard", wanted)
        for wiring in WIRINGS:
            y += BAR + 4
            ms = fastest(lines, wiring, wanted)
            wide = round((RIGHT - LEFT) * ms / SCALE, 1)
            gain = "" if wiring == "standard" else f", {standard / ms:.2f} times as fast"
            parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{wiring}</text>')
            parts.append(f'<rect class="{wiring}" x="{LEFT}" y="{y - 17}" width="{wide}" height="{BAR}" rx="2"/>')
            parts.append(f'<text x="{LEFT + wide + 8}" y="{y}">{ms:.2f}{gain}</text>')
        y += 12
    notes = (
        "Links are emulated: an all-reduce takes as long as it does on such a machine, and no other GPU takes part.",
        "What parallel-1 costs in quality after training has not been measured.",
    )
    for note in notes:
        y += 20
        parts.append(f'<text class="small" x="12" y="{y}">{note}</text>')
    high = y + 16
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high}" width="{WIDTH}" height="{high}" '
    head += 'role="img" aria-label="Milliseconds per token of standard and Ladder models">'
    return "\n".join(
        [head, f"<style>{STYLE}</style>", f'<rect class="back" width="{WIDTH}" height="{high}"/>', *parts, "</svg>\n"]
    )


def main(source: Path, target: Path) -> None:
    lines = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    target.write_text(draw(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
