"""How much computing a training step is, and what share of the chip's it reaches."""

from typing import Any

import torch

from ladder.perf.chips import Chip


def operations(model: Any, window: int) -> float:
    """Floating-point operations of training on one token: 2 for every weight that it is multiplied with, as many again
    for the gradient of what went in and, where the weight is trained, for its own; and attention over the half of the
    window that a token sees. Beside a side network the model makes no gradients.
    """
    backbone = getattr(model, "backbone", None)
    own = model.get_base_model() if hasattr(model, "get_base_model") else model
    embedding, head = own.get_input_embeddings(), own.get_output_embeddings()
    looked_up = 0 if head is not None and head.weight is embedding.weight else embedding.weight.numel()
    frozen, trained = (
        sum(
            p.numel()
            for p in {id(p): p for m in (own, model) for p in m.parameters()}.values()
            if p.requires_grad is on
        )
        for on in (False, True)
    )
    config = own.config
    heads = config.num_attention_heads
    width: int = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    passes = 1 if backbone is not None else 3
    looks = 2.0 * passes * config.num_hidden_layers * width * window
    return float(6 * trained + (2.0 if backbone is not None else 4.0) * frozen - 2.0 * passes * looked_up + looks)


def peak(device: torch.device) -> float | None:
    """The chip's bfloat16 operations a second, by its data sheet; None: not in the table."""
    chip = Chip.of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if chip is None else chip.bf16_tflop_s * 1e12
