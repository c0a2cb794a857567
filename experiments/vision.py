"""A small vision transformer from scratch under several wirings, on images that are made on the spot.

python -m experiments.vision [--wiring standard parallel ladder] [--seed 1 2 3 4] [--device cuda] [--steps N]
    [--batch N] [--layers N]

A JSON line for each wiring and seed: loss and accuracy on images that no training step has seen, and `excess`, the loss
above that of the best possible answers, which are known here. Of one seed all wirings begin with the same weights and
see the same images in the same order; the learning rate falls to zero. On standard error in the end: each wiring beside
the first one, seed by seed. On a GPU a training step is one CUDA graph.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import ViTForImageClassification

from examples.images import best_logits, config, draw, images, templates
from ladder.bench.machine import machine
from ladder.hf import rewire

HELD_OUT, WARMUP, RATE, CLIP = 20_000, 0.1, 3e-3, 1.0
BEFORE_CAPTURE = 3  # steps outside the CUDA graph, as torch asks for


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wiring", nargs="+", default=["standard", "parallel", "ladder"])
    parser.add_argument("--seed", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--device", default="cpu")
    for name, default in (("steps", 3000), ("batch", 128), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    excess: dict[str, list[float]] = {wiring: [] for wiring in given.wiring}
    for seed in given.seed:
        for wiring in given.wiring:
            found = trained(wiring, seed, given)
            excess[wiring].append(found["excess"])
            line = {**vars(given), "wiring": wiring, "seed": seed, **found, **machine(torch.device(given.device))}
            print(json.dumps(line), flush=True)
    for text in summary(excess):
        print(text, file=sys.stderr)


def trained(wiring: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """One run, and what became of it."""
    device = torch.device(given.device)
    torch.manual_seed(seed)
    model = rewire(ViTForImageClassification(config(given.layers)), wiring).to(device).train()
    generator, known = torch.Generator(device).manual_seed(seed), templates().to(device)
    batch = draw(given.batch, known, generator)
    step = Training(model, *batch)
    begun, total = time.perf_counter(), torch.zeros((), device=device)
    for index in range(given.steps):
        if index:
            for held, new in zip(batch, draw(given.batch, known, generator), strict=True):
                held.copy_(new)
        loss = step(rate(index, given.steps))
        if index >= given.steps - 100:
            total += loss
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "train_loss": round(float(total) / min(100, given.steps), 4),
        **measured(model.eval(), device),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def rate(step: int, steps: int) -> float:
    """The learning rate: linear from zero, then a half cosine to zero."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return RATE * (step + 1) / warmup
    return RATE * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


class Training:
    """Training steps on images that lie in two tensors: on a GPU captured once, and replayed."""

    def __init__(self, model: Any, pixels: Tensor, labels: Tensor) -> None:
        self._model, self._pixels, self._labels = model, pixels, labels
        self._on_gpu = pixels.is_cuda
        first: Any = torch.zeros((), device=pixels.device) if self._on_gpu else 0.0
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=first, betas=(0.9, 0.95), weight_decay=0.05, capturable=self._on_gpu
        )
        self._done = 0
        self._replay: Callable[[], Tensor] | None = None

    def __call__(self, rate: float) -> Tensor:
        """One step; returns its loss."""
        for group in self._optimizer.param_groups:
            if self._on_gpu:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._done += 1
        if not self._on_gpu:
            return self._step()
        if self._done <= BEFORE_CAPTURE:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = self._step()
            torch.cuda.current_stream().wait_stream(side)
            return loss
        if self._replay is None:
            self._replay = self._captured()
        return self._replay()

    def _step(self) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self._model(pixel_values=self._pixels).logits, self._labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        return loss.detach()

    def _captured(self) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        self._optimizer.zero_grad(set_to_none=True)  # gradients are then the graph's own
        with torch.cuda.graph(graph):
            loss = self._step()

        def replay() -> Tensor:
            graph.replay()
            return loss

        return replay


@torch.no_grad()
def measured(model: Any, device: torch.device) -> dict[str, Any]:
    """On images that no step has seen, the same on every device."""
    pixels, labels = (each.to(device) for each in images(HELD_OUT, seed=0))
    logits = torch.cat([model(pixel_values=part).logits for part in pixels.split(1000)])
    losses = F.cross_entropy(logits, labels, reduction="none").double()
    best = best_logits(pixels)
    above = losses - F.cross_entropy(best, labels, reduction="none").double()
    right = (logits.argmax(-1) == labels).double()
    found = {"loss": losses, "excess": above, "accuracy": right}
    figures = {name: round(float(values.mean()), 5) for name, values in found.items()}
    errors = {f"{name}_stderr": round(float(values.std()) / HELD_OUT**0.5, 5) for name, values in found.items()}
    of_best = round(float((best.argmax(-1) == labels).double().mean()), 5)
    return {**figures, **errors, "best_accuracy": of_best, "images": HELD_OUT}


def summary(excess: dict[str, list[float]]) -> list[str]:
    """Each wiring, and its difference from the first one of the same seed."""
    first, *_ = excess
    lines = []
    for wiring, values in excess.items():
        text = f"{wiring}: excess {statistics.mean(values):.4f}"
        if len(values) > 1:
            text += f", standard deviation of the seeds {statistics.stdev(values):.4f}"
            apart = [own - other for own, other in zip(values, excess[first], strict=True)]
            if wiring != first:
                error = statistics.stdev(apart) / len(apart) ** 0.5
                text += f"; minus {first}'s {statistics.mean(apart):+.4f}, standard error {error:.4f}"
        lines.append(text)
    return lines


if __name__ == "__main__":
    main()
