"""Families by two ranks that share one GPU, over symmetric memory, with kernels: greedy tokens against one CPU rank.

TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 python -m experiments.families_gpu > results/families_gpu.jsonl

A JSON line for each family: whether the tokens of tiny random models, float32, are the same; with experts, both ways of
sharding them.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.families import make

FAMILIES = ("olmo2", "mixtral", "gemma2", "qwen3-moe", "gpt-neox")
TWO_RANKS = ("--device", "cuda:0", "--tp", "2", "--comm-backend", "symmetric")


def tokens(model: Path, *options: str) -> list[int]:
    command = ["generate", "--model", str(model), "--token-ids", "5,17,9", "--max-new-tokens", "24", "--json"]
    command += ["--dtype", "float32", *options]
    done = subprocess.run([sys.executable, "-m", "ladder", *command], stdout=subprocess.PIPE, text=True, check=True)
    found: list[int] = json.loads(done.stdout)["token_ids"]
    return found


def main() -> None:
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            make(family, Path(folder))
            alone = tokens(Path(folder))
            line: dict[str, object] = {"family": family, "same": tokens(Path(folder), *TWO_RANKS) == alone}
            ways = [("--expert-parallel",)] if family in ("mixtral", "qwen3-moe") else []
            line["expert_parallel_same"] = [tokens(Path(folder), *TWO_RANKS, *way) == alone for way in ways]
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
