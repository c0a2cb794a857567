"""What a user gets: milliseconds per token of `LLM.generate` beside the bare decode step, on one GPU.

python -m experiments.generate_gpu [SIZE [BATCH ...]] > results/generate_h200.jsonl

A checkpoint of this size with nothing in it is written as a sparse file, loaded as any other, and then given random
weights. Per wiring and batch: the time of long answers less that of short ones, over the tokens between them, greedy,
sampled (temperature 0.8, top-p 0.95) and half of each; and a step of the same model over the same number of positions,
by a CUDA graph that is replayed, on the schedule that the engine chose and on one lane.
"""

import json
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from ladder import LLM, SamplingParams
from ladder.bench.machine import machine, milliseconds
from ladder.bench.model import FusedModel
from ladder.config import ModelConfig
from ladder.engine.forward import Schedule
from ladder.engine.graphs.steps import bucket
from ladder.engine.passes import Passes
from ladder.kernels.launch import Kernels
from ladder.kernels.table import reach
from ladder.model import Decoder

PROMPT, SHORT, LONG, REPEATS = 512, 16, 144, 3
SETTLING, STEPS = 300, 100  # bare steps: the GPU has worked as long as it has for `generate`


def sparse_checkpoint(size: str, directory: Path) -> None:
    """config.json and model.safetensors, all of whose weights are holes in the file."""
    config = ModelConfig.named(size)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config.to_hf()), encoding="utf-8")
    header: dict[str, Any] = {}
    end = 0
    for shard in Decoder(config, device="meta").shards():
        if shard.name not in header:
            length = 2 * prod(shard.shape)
            header[shard.name] = {"dtype": "BF16", "shape": list(shard.shape), "data_offsets": [end, end + length]}
            end += length
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


GREEDY = SamplingParams(ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, seed=1, ignore_eos=True)


def fill(model: Decoder) -> None:
    """Random weights."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.02)
        else:
            parameter.data.fill_(1.0)


def ms_per_token(llm: LLM, batch: int, kind: str) -> float:
    """Of all of `batch` equally long answers, between the SHORT and the LONG ones."""
    prompts = [[(7 * number + at) % 1000 + 1 for at in range(PROMPT)] for number in range(batch)]
    params = {"greedy": [GREEDY], "sampled": [DRAWN], "mixed": [GREEDY, DRAWN]}[kind]

    def seconds(tokens: int) -> float:
        begin = time.perf_counter()
        given = [replace(params[number % len(params)], max_new_tokens=tokens) for number in range(batch)]
        results = llm.generate(prompts, given)
        assert all(len(result.token_ids) == tokens for result in results)
        return time.perf_counter() - begin

    seconds(LONG)
    found = [(seconds(LONG) - seconds(SHORT)) / (LONG - SHORT) * 1e3 for _ in range(REPEATS)]
    return statistics.median(found)


def main(size: str, batches: Sequence[int]) -> None:
    device = torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        sparse_checkpoint(size, directory)
        for wiring in ("standard", "ladder"):
            with LLM(directory, wiring=wiring, device="cuda:0", max_num_seqs=max(batches), memory=40.0) as llm:
                passes = llm._executor._runner._passes  # type: ignore[attr-defined]
                model: Decoder = passes._model
                fill(model)
                for batch in batches:
                    measure(llm, passes, model, size, wiring, batch, device)


def measure(llm: LLM, passes: Passes, model: Decoder, size: str, wiring: str, batch: int, device: torch.device) -> None:
    found = {kind: ms_per_token(llm, batch, kind) for kind in ("greedy", "sampled", "mixed")}
    assert passes._graphs is not None
    chosen = passes._graphs.captured(bucket(batch), reach(PROMPT + LONG)).forward.schedule
    context, bare = PROMPT + (SHORT + LONG) // 2, {}
    with torch.inference_mode():
        cache = model.new_cache(batch + 1, PROMPT + LONG)
        for how in dict.fromkeys((chosen, Schedule())):
            step = FusedModel(model, cache, Kernels.on(device), how).decode_step(batch, context)
            bare[how] = statistics.median(milliseconds(step, STEPS, SETTLING))
    line = {"measure": "generate", "size": size, "tp": 1, "batch": batch, "wiring": wiring, "prompt": PROMPT}
    line |= {"schedule": str(chosen), "repeats": REPEATS}
    line |= {f"{kind}_ms_per_token": round(ms, 4) for kind, ms in found.items()}
    line |= {"bare_step_ms": round(bare[chosen], 4), "one_lane_ms": round(bare[Schedule()], 4)}
    line |= {"over_bare": round(found["greedy"] / bare[chosen], 4)}
    line |= {f"{kind}_over_greedy": round(found[kind] / found["greedy"], 4) for kind in ("sampled", "mixed")}
    print(json.dumps({**line, **machine(device)}), flush=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    main(given[0] if given else "llama-3-8b", [int(batch) for batch in given[1:]] or [1, 16, 64, 128])
