"""Write the measurements that come with the explorer: lines of `results/` with the keys that it reads.

python -m experiments.explorer_measurements
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ladder.perf.measurements import read_lines

ROOT = Path(__file__).parent.parent
SOURCES = {"bench_h200.jsonl": None, "two_lanes_h200.jsonl": None, "one_rank_weights_h200.jsonl": 3}  # and the run
OUT = ROOT / "ladder" / "explore" / "measured.jsonl"
KEYS = ("measure", "size", "arm", "wiring", "tp", "batch", "prompt", "new", "context", "weights", "layers", "of_layers")
KEYS += ("link", "link_name", "cell_link", "link_kind", "link_alpha_us", "link_beta_gb_s", "mode", "chip", "lanes")
KEYS += ("ms", "tpot_ms_p50", "tokens_per_s", "tokens_per_s_user", "tokens_per_s_gpu", "commit")


def lines() -> Iterator[dict[str, Any]]:
    """Decode steps of models under one wiring of the table; of several all-reduces at a time none."""
    for name, run in SOURCES.items():
        for _, line in read_lines(ROOT / "results" / name).objects:
            step = line.get("measure") == "decode" or line.get("tpot_ms_p50") is not None
            alone = line.get("concurrent_all_reduces", 1) == 1 and line.get("layers") == line.get("of_layers")
            if step and alone and line.get("run") == run:
                yield {key: line[key] for key in KEYS if line.get(key) is not None}


def main() -> None:
    OUT.write_text("".join(json.dumps(line) + "\n" for line in lines()), encoding="utf-8")


if __name__ == "__main__":
    main()
