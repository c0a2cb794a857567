"""The oracle: a decoder of every wiring at every degree, written naively from the design's table.

It shares no code with the product. One process holds one stream per rank and the whole history of sums; weights are
cut head by head; nothing is fused, cached or overlapped. All arithmetic is float64, so a difference is the product's.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ladder.config import ModelConfig

Weights = Mapping[str, Tensor]


def logits(config: ModelConfig, weights: Weights, tokens: Tensor, rows: Sequence[str], ranks: int) -> Tensor:
    """[batch, tokens] ids -> [batch, tokens, vocab], for one row name per layer; `config.wiring` is not looked at."""
    assert len(rows) == config.layers
    weights = {name: weight.double() for name, weight in weights.items()}
    table = schedule(rows)
    streams = Streams(weights["model.embed_tokens.weight"][tokens], ranks)
    for layer in range(config.layers):
        parent = f"model.layers.{layer}."
        for half, norm, sub_block in ((0, "input_layernorm", attention), (1, "post_attention_layernorm", mlp)):
            lag, out = table[2 * layer + half]
            gain = weights[f"{parent}{norm}.weight"]
            seen = [rms_norm(x, gain, config.norm_eps) for x in streams.read(lag)]
            streams.write([sub_block(config, weights, layer, x, rank, ranks) for rank, x in enumerate(seen)], out)
    final = [rms_norm(x, weights["model.norm.weight"], config.norm_eps) for x in streams.read(0)]
    head = weights["model.embed_tokens.weight" if config.tied else "lm_head.weight"]
    step = math.ceil(config.vocab / ranks)
    blocks = [x @ head[rank * step : (rank + 1) * step].T for rank, x in enumerate(final)]
    return torch.cat(blocks, dim=-1)


def schedule(rows: Sequence[str]) -> list[tuple[int, str]]:
    """(lag, out) of every sub-block, attention and MLP in turn."""
    table: list[tuple[int, str]] = []
    count = 0  # sub-blocks since the run of layers of this row began
    for layer, name in enumerate(rows):
        if layer and rows[layer - 1] != name:
            count = 0
        for _ in ("attention", "mlp"):
            table.append(fact(name, count))
            count += 1
    return table


def fact(name: str, count: int) -> tuple[int, str]:
    """(lag, out) of the sub-block that `count` others of its run precede."""
    is_mlp = count % 2 == 1
    if name == "standard":
        return 0, "reduce"
    if name == "parallel":
        return 0, "reduce" if is_mlp else "hold"
    if name == "none":
        return 0, "local"
    kind, *numbers = name.split("-")
    if kind == "desync":
        every = int(numbers[0].rstrip("x"))
        return 0, "reduce" if (count + 1) % every == 0 else "local"
    assert kind == "ladder"
    if not numbers:
        return 1, "reduce"
    return int(numbers[-1] if is_mlp else numbers[0]), "reduce"


class Streams:
    """One residual stream per rank, and all sums ever sent. A sum is invisible until some reader has waited for it."""

    def __init__(self, embedding: Tensor, ranks: int) -> None:
        self.ranks = ranks
        self.streams = [embedding.clone() for _ in range(ranks)]
        self.zeros = [torch.zeros_like(embedding) for _ in range(ranks)]
        self.drift = self.zeros  # what each rank alone has added since the last sum was sent
        self.held = self.zeros
        self.sums: list[tuple[Tensor, list[Tensor]]] = []  # the sum, and the drift of each rank that it replaces
        self.landed = 0

    def read(self, lag: int) -> list[Tensor]:
        """What each rank sees when the newest `lag` sums may still be on the wire."""
        while self.landed < len(self.sums) - lag:
            total, own = self.sums[self.landed]
            self.streams = [self.streams[rank] - own[rank] + total for rank in range(self.ranks)]
            self.landed += 1
        return self.streams

    def write(self, partials: list[Tensor], out: str) -> None:
        """What becomes of the ranks' partial sums."""
        if out == "hold":
            self.held = partials
        elif out == "local":
            self.streams = [self.streams[rank] + partials[rank] for rank in range(self.ranks)]
            self.drift = [self.drift[rank] + partials[rank] for rank in range(self.ranks)]
        else:
            total = self.zeros[0]
            for rank in range(self.ranks):
                total = total + partials[rank] + self.held[rank] + self.drift[rank] / self.ranks
            self.sums.append((total, self.drift))
            self.drift = self.held = self.zeros


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * gain


def attention(config: ModelConfig, weights: Weights, layer: int, x: Tensor, rank: int, ranks: int) -> Tensor:
    """The partial sum of one rank: its heads, one after the other."""
    parent, size = f"model.layers.{layer}.self_attn.", config.head_dim
    tokens = x.shape[1]
    distance = torch.arange(tokens).unsqueeze(1) - torch.arange(tokens).unsqueeze(0)
    visible = distance >= 0
    window = config.windows[layer]
    if window is not None:
        visible = visible & (distance < window)
    partial = torch.zeros_like(x)
    heads = config.heads // ranks
    for head in range(rank * heads, (rank + 1) * heads):
        kv_head = head // (config.heads // config.kv_heads)
        q = project(weights, f"{parent}q_proj", x, head * size, size)
        k = project(weights, f"{parent}k_proj", x, kv_head * size, size)
        v = project(weights, f"{parent}v_proj", x, kv_head * size, size)
        if config.habits.qk_norm == "head":
            q = rms_norm(q, weights[f"{parent}q_norm.weight"], config.norm_eps)
            k = rms_norm(k, weights[f"{parent}k_norm.weight"], config.norm_eps)
        scores = rotary(config, q) @ rotary(config, k).transpose(1, 2) / math.sqrt(size)
        scores = torch.where(visible, scores, -math.inf)
        mixed = torch.softmax(scores, dim=-1) @ v
        partial = partial + mixed @ weights[f"{parent}o_proj.weight"][:, head * size : (head + 1) * size].T
    if config.o_bias and rank == 0:
        partial = partial + weights[f"{parent}o_proj.bias"]
    return partial


def mlp(config: ModelConfig, weights: Weights, layer: int, x: Tensor, rank: int, ranks: int) -> Tensor:
    """The partial sum of one rank: its columns of the hidden layer."""
    parent, width = f"model.layers.{layer}.mlp.", config.ffn // ranks
    gate = project(weights, f"{parent}gate_proj", x, rank * width, width)
    up = project(weights, f"{parent}up_proj", x, rank * width, width)
    hidden = gate / (1 + torch.exp(-gate)) * up
    partial = hidden @ weights[f"{parent}down_proj.weight"][:, rank * width : (rank + 1) * width].T
    if config.mlp_bias and rank == 0:
        partial = partial + weights[f"{parent}down_proj.bias"]
    return partial


def project(weights: Weights, name: str, x: Tensor, start: int, width: int) -> Tensor:
    """Some outputs of a linear layer, with their bias where it has one."""
    y = x @ weights[f"{name}.weight"][start : start + width].T
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias[start : start + width]


def rotary(config: ModelConfig, x: Tensor) -> Tensor:
    """Turns the pair (x[i], x[i + d/2]) of [batch, position, d] by the angle position * frequency(i)."""
    half = config.head_dim // 2
    turned = torch.empty_like(x)
    for i in range(half):
        angle = torch.arange(x.shape[1], dtype=x.dtype) * frequency(config, i)
        first, second = x[..., i], x[..., i + half]
        turned[..., i] = first * torch.cos(angle) - second * torch.sin(angle)
        turned[..., i + half] = second * torch.cos(angle) + first * torch.sin(angle)
    return turned


def frequency(config: ModelConfig, i: int) -> float:
    """Radians per position of pair `i`; llama3's stretching as in Meta's release of Llama 3.1."""
    rope = config.rope
    plain = math.pow(rope.theta, -2 * i / config.head_dim)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    wavelength = 2 * math.pi / plain
    if wavelength < rope.original_context / rope.high_freq_factor:
        return plain
    if wavelength > rope.original_context / rope.low_freq_factor:
        return plain / rope.factor
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return (1 - smooth) * plain / rope.factor + smooth * plain
