"""Is a wiring better, or only shallower? Small models from scratch on a CPU core, eager and float32.

python -m experiments.depth_cpu DATA WIRING [--layers N] [--rows N] [--steps N] [--plain]

DATA is a folder of `ladder data`, of a vocabulary of 4096. A JSON line of the mean training loss every so many steps.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from ladder.bench.machine import machine
from ladder.config import ModelConfig
from ladder.data.shards import Shards
from ladder.hf import rewire
from ladder.train.scratch import hf_config, new_model

WINDOW, RATE = 256, 2e-3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("wiring")
    for name, default in (("layers", 10), ("rows", 16), ("steps", 150), ("every", 25), ("warmup", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--plain", action="store_true", help="do not scale down the initial output projections")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    shards = Shards.open(given.data)
    config = ModelConfig(128, given.layers, 4, 4, 352, vocab=shards.vocab, context=512, tied=True)
    model = AutoModelForCausalLM.from_config(hf_config(config)) if given.plain else new_model(config)
    rewire(model, given.wiring)
    flat = [weight for weight in model.parameters() if weight.dim() == 1]
    wide = [weight for weight in model.parameters() if weight.dim() > 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    total = 0.0
    for step in range(given.steps):
        share = min(1.0, (step + 1) / given.warmup) * (0.55 + 0.45 * math.cos(math.pi * step / given.steps))
        for group in optimizer.param_groups:
            group["lr"] = RATE * share
        at = torch.randint(0, shards.tokens - WINDOW - 1, (given.rows,)).tolist()
        ids = torch.stack([shards.read(place, WINDOW + 1).long() for place in at])
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
        if (step + 1) % given.every == 0:
            about = {"wiring": given.wiring, "layers": given.layers, "rows": given.rows, "step": step + 1}
            line = {**about, "loss": round(total / given.every, 4), **machine(torch.device("cpu"))}
            print(json.dumps(line), flush=True)
            total = 0.0


if __name__ == "__main__":
    main()
