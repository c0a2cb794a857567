"""What the paper's authors compute for parallel and desync, written from their description of it, for Llama's shapes.

    parallel   one norm in a layer; queries, keys, values, gate and up are one product of what it gives
    desync     of all sub-blocks every N-th reduces, and the last MLP does

It shares no code with the product, nor with `tests/oracle.py`: that has sub-blocks by (lag, out), this has layers as
the authors write them. All ranks are in one dimension; arithmetic is that of the weights, and differentiable.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """Of a Llama."""

    layers: int
    heads: int
    kv_heads: int
    eps: float
    theta: float = 10_000.0


class Model:
    """`weights` by their Hugging Face names."""

    def __init__(self, sizes: Sizes, weights: Mapping[str, Tensor]) -> None:
        self.sizes, self.weights = sizes, weights

    def at(self, layer: int, name: str) -> Tensor:
        return self.weights[f"model.layers.{layer}.{name}.weight"]

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return gain * x / (x.pow(2).mean(-1, keepdim=True) + self.sizes.eps).sqrt()

    def logits(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weights["model.norm.weight"]) @ self.weights["lm_head.weight"].T

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.weights["model.embed_tokens.weight"][tokens]

    def attend(self, qkv: Tensor) -> Tensor:
        """Causal attention of [..., batch, tokens, (heads + 2 kv_heads) * d]."""
        heads, kv = self.sizes.heads, self.sizes.kv_heads
        blocks = qkv.unflatten(-1, (heads + 2 * kv, -1)).transpose(-2, -3)
        q, k, v = blocks.split((heads, kv, kv), dim=-3)
        q, k = self.turned(q), self.turned(k).repeat_interleave(heads // kv, -3)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        y = scores.masked_fill(later, -math.inf).softmax(-1) @ v.repeat_interleave(heads // kv, -3)
        return y.transpose(-2, -3).flatten(-2)

    def turned(self, x: Tensor) -> Tensor:
        """The two halves of a head are real and imaginary parts, multiplied by exp(i position frequency)."""
        half = x.shape[-1] // 2
        frequency = self.sizes.theta ** (-torch.arange(half, dtype=x.dtype) / half)
        angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequency
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((turned.real, turned.imag), -1)

    def inward(self, layer: int) -> tuple[Tensor, Tensor]:
        """QKV, and gate and up."""
        parts = [self.at(layer, f"self_attn.{name}_proj") for name in "qkv"]
        return torch.cat(parts), torch.cat([self.at(layer, f"mlp.{name}_proj") for name in ("gate", "up")])

    def inner(self, y: Tensor) -> Tensor:
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up


def parallel(model: Model, tokens: Tensor) -> Tensor:
    """The logits of parallel layers: [batch, tokens, vocab]."""
    x = model.embedded(tokens)
    for layer in range(model.sizes.layers):
        qkv, both = model.inward(layer)
        y = model.norm(x, model.at(layer, "input_layernorm")) @ torch.cat((qkv, both)).T
        outward = torch.cat((model.at(layer, "self_attn.o_proj"), model.at(layer, "mlp.down_proj")), 1)
        x = x + torch.cat((model.attend(y[..., : len(qkv)]), model.inner(y[..., len(qkv) :])), -1) @ outward.T
    return model.logits(x)


def desync(model: Model, tokens: Tensor, every: int, ranks: int) -> Tensor:
    """The logits of a desync model: a rank's partial sum joins its own stream, and the streams are averaged where a
    sub-block reduces.
    """
    streams = model.embedded(tokens).expand(ranks, *tokens.shape, -1)
    count = 0
    for layer in range(model.sizes.layers):
        for half in ("attention", "mlp"):
            count += 1
            y = outputs(model, layer, half, streams, ranks)
            if count % every == 0 or (layer == model.sizes.layers - 1 and half == "mlp"):
                streams = (streams.mean(0) + y.sum(0)).expand_as(streams)
            else:
                streams = streams + y
    return model.logits(streams[0])


def outputs(model: Model, layer: int, half: str, streams: Tensor, ranks: int) -> Tensor:
    """The partial sums of all ranks, [ranks, batch, tokens, hidden]: each reads its own stream."""
    qkv, both = model.inward(layer)
    if half == "attention":
        y = model.attend(model.norm(streams, model.at(layer, "input_layernorm")) @ qkv.T)
        out = model.at(layer, "self_attn.o_proj")
    else:
        y = model.inner(model.norm(streams, model.at(layer, "post_attention_layernorm")) @ both.T)
        out = model.at(layer, "mlp.down_proj")
    own = torch.zeros(ranks, 1, 1, y.shape[-1], dtype=y.dtype)
    step = y.shape[-1] // ranks
    for rank in range(ranks):
        own[rank, ..., rank * step : (rank + 1) * step] = 1
    return (y * own) @ out.T
