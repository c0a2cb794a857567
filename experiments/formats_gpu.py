"""Quantized weights on one GPU, with kernels: greedy tokens of one rank and of two that share it, against one CPU rank.

TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 python -m experiments.formats_gpu > results/formats_gpu.jsonl

A JSON line for each format and wiring: whether the tokens of a tiny random model, float32, are the same.
"""

import json
import tempfile
from pathlib import Path

from experiments.families_gpu import TWO_RANKS, tokens
from ladder.quantize.options import QuantizeOptions
from ladder.quantize.write import quantize
from tests.checkpoints import tiny

FORMATS: dict[str, dict[str, object]] = {
    "fp8": {"format": "fp8"},
    "fp8-block": {"format": "fp8-block"},
    "int8": {"format": "int8"},
    "int4-128": {"format": "int4"},
    "int4-32": {"format": "int4", "group": 32},
    "int4-64-zero": {"format": "int4", "group": 64, "asymmetric": True},
}
SIZES = {"hidden": 256, "ffn": 512, "heads": 4, "kv_heads": 2, "head_dim": 64}


def main() -> None:
    for wiring in ("standard", "ladder"):
        for name, options in FORMATS.items():
            with tempfile.TemporaryDirectory() as folder:
                source, out = Path(folder) / "model", Path(folder) / "quantized"
                quantize(QuantizeOptions(tiny(source, wiring, **SIZES), out, **options))  # type: ignore[arg-type]
                alone = tokens(out)
                line: dict[str, object] = {"weights": name, "wiring": wiring, "tokens": len(alone)}
                line["one_rank_same"] = tokens(out, "--device", "cuda:0") == alone
                line["two_ranks_same"] = tokens(out, *TWO_RANKS) == alone
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
