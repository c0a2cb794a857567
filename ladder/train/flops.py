"""How much computing a training step is, and what share of the chip's it reaches."""

from typing import Any

import torch

from ladder.hf.wire import inside, layers_of
from ladder.perf.chips import Chip


def operations(model: Any, window: int) -> float:
    """Floating-point operations of training on one token: 2 for every weight that it is multiplied with, as many again
    for the gradient of what went in and, where the weight is trained, for its own; and attention over the half of the
    window that a token sees. Gradients end at the first layer that is trained; a side network is reached through the
    model's last norm and its head alone.
    """
    own = inside(model)
    layers = layers_of(own)
    learns = (any(weight.requires_grad for weight in layer.parameters()) for layer in layers)
    deaf = next((index for index, first in enumerate(learns) if first), len(layers))  # layers that no gradient reaches
    unreached = {id(weight) for layer in layers[:deaf] for weight in layer.parameters()}
    embedding, head, config = own.get_input_embeddings(), own.get_output_embeddings(), own.config
    weights = {id(weight): (name, weight) for part in (own, model) for name, weight in part.named_parameters()}
    if head.weight is not embedding.weight:
        del weights[id(embedding.weight)]  # looked up, not multiplied with
    found: float = 2.0 * (deaf + 3 * (len(layers) - deaf)) * _width(config) * window
    for name, weight in weights.values():
        passes = 3 if weight.requires_grad else 1 if id(weight) in unreached else 2
        found += 2.0 * passes * weight.numel() * (_chosen(config) if ".experts." in name else 1.0)
    return found


def _width(config: Any) -> int:
    """Of all heads together."""
    heads: int = config.num_attention_heads
    return heads * int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def _chosen(config: Any) -> float:
    """The share of a layer's experts that a token sees."""
    names = ("num_local_experts", "num_experts")
    return float(config.num_experts_per_tok / next(getattr(config, name) for name in names if hasattr(config, name)))


def peak(device: torch.device) -> float | None:
    """The chip's bfloat16 operations a second, by its data sheet; None: not in the table."""
    chip = Chip.of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if chip is None else chip.bf16_tflop_s * 1e12
