"""A vision transformer under another wiring: trained as standard, converted, fitted, and evaluated, on images that are
made on the spot.

python examples/vision.py DIRECTORY [STEPS]
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import AutoModelForImageClassification, ViTForImageClassification

import ladder.hf  # registers wired models with transformers' Auto classes
from ladder.hf.convert import convert
from ladder.scan.fit_inputs import fit_inputs
from ladder.scan.options import FitOptions

if __package__:
    from examples.images import config, images
else:
    from images import config, images  # type: ignore[import-not-found, no-redef]

WIRING = "standard:1 ladder:3"


def train(steps: int, batch: int = 64) -> Any:
    """A standard model, from scratch."""
    torch.manual_seed(1)
    model = ViTForImageClassification(config()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        pixels, labels = images(batch, seed=step + 1)
        loss = F.cross_entropy(model(pixel_values=pixels).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: Any, count: int = 1000) -> float:
    """On images that no step has seen."""
    pixels, labels = images(count, seed=0)
    logits = torch.cat([model(pixel_values=part).logits for part in pixels.split(250)])
    return float((logits.argmax(-1) == labels).float().mean())


def main(directory: Path, steps: int = 1000, examples: int = 2048) -> dict[str, float]:
    """The accuracies of the standard, the rewired and the fitted model; their checkpoints are in the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    train(steps).save_pretrained(directory / "standard")
    convert(str(directory / "standard"), directory / "rewired", WIRING)
    save_file({"pixel_values": images(examples, seed=10**6)[0]}, directory / "images.safetensors")
    options = FitOptions(str(directory / "standard"), directory / "fitted", WIRING, directory / "images.safetensors")
    print(fit_inputs(options, lambda done, total, what: None))
    found = {}
    for name in ("standard", "rewired", "fitted"):
        model = AutoModelForImageClassification.from_pretrained(directory / name)
        found[name] = accuracy(model)
        print(f"{name}: wiring {getattr(model.config, 'wiring', 'standard')}, accuracy {found[name]:.1%}")
    return found


if __name__ == "__main__":
    assert ladder.hf
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
