"""A small vision transformer from scratch under several wirings, on images that are made on the spot.

python -m experiments.vision [--wiring standard parallel ladder] [--seed 1 2] [--steps N] [--layers N]

A JSON line for each wiring and seed: loss and accuracy on images that no training step has seen. Of one seed all
wirings begin with the same weights and see the same images in the same order.
"""

import argparse
import json
import time
from typing import Any

import torch
from torch.nn import functional as F
from transformers import ViTForImageClassification

from examples.images import config, images
from ladder.bench.machine import machine
from ladder.hf import rewire

HELD_OUT, WARMUP, RATE = 4000, 0.1, 2e-3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wiring", nargs="+", default=["standard", "parallel", "ladder"])
    parser.add_argument("--seed", nargs="+", type=int, default=[1, 2])
    for name, default in (("steps", 1000), ("batch", 64), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for seed in given.seed:
        for wiring in given.wiring:
            line = {**vars(given), "wiring": wiring, "seed": seed, **trained(wiring, seed, given)}
            print(json.dumps({**line, **machine(torch.device("cpu"))}), flush=True)


def trained(wiring: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = rewire(ViTForImageClassification(config(given.layers)), wiring).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=given.steps, pct_start=WARMUP, anneal_strategy="cos"
    )
    begun, total = time.perf_counter(), 0.0
    for step in range(given.steps):
        pixels, labels = images(given.batch, seed=seed * 1_000_000 + step)
        loss = F.cross_entropy(model(pixel_values=pixels).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item() * (step >= given.steps - 100)
    model.eval()
    pixels, labels = images(HELD_OUT, seed=0)
    with torch.no_grad():
        logits = torch.cat([model(pixel_values=part).logits for part in pixels.split(500)])
    losses, right = F.cross_entropy(logits, labels, reduction="none"), (logits.argmax(-1) == labels).double()
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "train_loss": round(total / min(100, given.steps), 4),
        "loss": round(float(losses.mean()), 4),
        "loss_stderr": round(float(losses.std() / HELD_OUT**0.5), 4),
        "accuracy": round(float(right.mean()), 4),
        "accuracy_stderr": round(float(right.std() / HELD_OUT**0.5), 4),
        "images": HELD_OUT,
        "seconds": round(time.perf_counter() - begun),
    }


if __name__ == "__main__":
    main()
