"""The engine on a GPU: the same greedy tokens with our kernels and CUDA graphs as without, in float32.

python -m experiments.engine_gpu [DEVICE] > results/engine_gpu.jsonl

A small random model, ragged prompts, more requests than slots; every wiring that runs on one rank; a cache that grows
while graphs are at hand. One JSON line per check; the exit status is 1 if any failed.
"""

import json
import platform
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ladder import LLM, SamplingParams
from ladder.checkpoint import Random, load, save
from ladder.config import ModelConfig
from ladder.model import Decoder

WIRINGS = ("standard", "ladder", "parallel", "ladder-1-2", "standard:4 ladder:4")
PROMPTS = [[1], list(range(2, 40)), [7] * 300, [5, 17, 9], list(range(300, 200, -1)), [11, 12]] * 4
SIZES = {
    "llama-like": ModelConfig(512, 8, 16, 4, 1408, vocab=2048, context=2048),
    "qwen2-like": ModelConfig(384, 8, 12, 2, 1000, vocab=1999, context=2048, family="qwen2", qkv_bias=True),
    "qwen3-like": ModelConfig(256, 8, 8, 2, 768, vocab=1500, context=2048, head_dim=64, family="qwen3"),
}


def report(**line: Any) -> bool:
    print(json.dumps(line), flush=True)
    return bool(line["ok"])


def answers(directory: Path, device: str, **options: Any) -> tuple[list[tuple[int, ...]], float]:
    with LLM(directory, device=device, prefill_chunk=128, **options) as llm:
        begin = time.monotonic()
        tokens = [tuple(result.token_ids) for result in llm.generate(PROMPTS, SamplingParams(48))]
        return tokens, time.monotonic() - begin


def main(device: str) -> int:
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    report(check="machine", gpu=torch.cuda.get_device_name(0), **versions, ok=True)
    good = True
    for name, config in SIZES.items():
        directory = Path(tempfile.mkdtemp()) / "model"
        save(load(Decoder(replace(config, dtype="float32")), Random(seed=5, deviation=0.08)), directory)
        for wiring in WIRINGS if name == "llama-like" else ("ladder",):
            plain, _ = answers(directory, device, wiring=wiring, max_num_seqs=16, kernels=False)
            for batch in (1, 5, 16) if wiring == "ladder" else (16,):
                tokens, seconds = answers(directory, device, wiring=wiring, max_num_seqs=batch)
                line = {"model": name, "wiring": wiring, "batch": batch, "dtype": "float32", "requests": len(PROMPTS)}
                line |= {"seconds": round(seconds, 2), "distinct": len(set(tokens))}
                good &= report(check="kernels and graphs give plain torch's tokens", **line, ok=tokens == plain)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cuda:0"))
