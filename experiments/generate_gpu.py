"""What a user gets: milliseconds per token of `LLM.generate` beside the bare decode step, on one GPU.

python -m experiments.generate_gpu [SIZE] > results/generate_h200.jsonl

A checkpoint of this size with nothing in it is written as a sparse file, loaded as any other, and then given random
weights. Per wiring: the time of a long answer less that of a short one, over the tokens between them; and a step of
the same model over the same number of positions, by a CUDA graph that is replayed, on the schedule that the engine
chose and on one lane.
"""

import json
import statistics
import struct
import sys
import tempfile
import time
from math import prod
from pathlib import Path
from typing import Any

import torch

from ladder import LLM, SamplingParams
from ladder.bench.machine import machine, milliseconds
from ladder.bench.model import FusedModel
from ladder.config import ModelConfig
from ladder.engine.forward import Schedule
from ladder.kernels.launch import Kernels
from ladder.model import Decoder

PROMPT, SHORT, LONG, REPEATS = 900, 16, 144, 5
SETTLING, STEPS = 500, 200  # bare steps: the GPU has worked as long as it has for `generate`


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


def main(size: str) -> None:
    device = torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        sparse_checkpoint(size, directory)
        for wiring in ("standard", "ladder"):
            with LLM(directory, wiring=wiring, device="cuda:0", max_num_seqs=1) as llm:
                passes = llm._executor._runner._passes  # type: ignore[attr-defined]
                model: Decoder = passes._model
                torch.manual_seed(0)
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.data.normal_(std=0.02)
                    else:
                        parameter.data.fill_(1.0)
                prompt = [list(range(1, PROMPT + 1))]

                def seconds(tokens: int, llm: LLM = llm, prompt: list[list[int]] = prompt) -> float:
                    begin = time.perf_counter()
                    (result,) = llm.generate(prompt, SamplingParams(max_new_tokens=tokens))
                    assert len(result.token_ids) == tokens
                    return time.perf_counter() - begin

                seconds(LONG)
                found = [(seconds(LONG) - seconds(SHORT)) / (LONG - SHORT) * 1e3 for _ in range(REPEATS)]
                chosen = passes._graphs.captured(1).forward.schedule
                bare = {}
                cache = model.new_cache(2, passes.cache.capacity)
                with torch.inference_mode():
                    for how in dict.fromkeys((chosen, Schedule())):
                        fused = FusedModel(model, cache, Kernels.on(device), how)
                        step = fused.decode_step(1, PROMPT + (SHORT + LONG) // 2)
                        bare[how] = statistics.median(milliseconds(step, STEPS, SETTLING))
                user = statistics.median(found)
                line = {"measure": "generate", "size": size, "tp": 1, "batch": 1, "wiring": wiring, "prompt": PROMPT}
                line |= {"schedule": str(chosen), "ms_per_token": round(user, 4), "repeats": REPEATS}
                line |= {"bare_step_ms": round(bare[chosen], 4), "one_lane_ms": round(bare[Schedule()], 4)}
                print(json.dumps({**line, "over_bare": round(user / bare[chosen], 4), **machine(device)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "llama-3-8b")
