"""The oracle: a decoder of every wiring at every degree, written naively from the design's table.

It shares no code with the product. One process holds one stream per rank and the whole history of all-reduces;
weights are cut head by head; nothing is fused, cached or overlapped. All arithmetic is float64, so
a difference is the product's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ladder.config import ModelConfig, Rope
from tests.oracle_families import ACTIVATIONS, Checkpoint, LayerWeights, Linear


def logits(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    tokens: Tensor,
    rows: Sequence[str],
    ranks: int,
    expert_parallel: bool = False,
    fp8_cache: bool = False,
) -> Tensor:
    """[batch, tokens] ids -> [batch, tokens, vocab], for one row name per layer; `config.wiring` is not looked at.
    `fp8_cache`: keys and values are rounded to e4m3.
    """
    assert len(rows) == config.layers
    checkpoint = Checkpoint(config, weights)
    if config.parallel:  # what such a family was born with is another row's name
        rows = ["parallel" if name == "standard" else name for name in rows]
    table = schedule(rows)
    embedding = checkpoint.embed[tokens] * (
        math.sqrt(config.hidden) if checkpoint.habits.root_embedding else config.embed_scale
    )
    if checkpoint.positions is not None:
        embedding = embedding + checkpoint.positions[: tokens.shape[1]]
    streams = Streams(embedding, ranks)
    for number, layer in enumerate(checkpoint.layers):
        for half in (0, 1):
            lag, out = table[2 * number + half]
            before, after = (partial(norm, checkpoint, weight) for weight in layer.norms[2 * half : 2 * half + 2])
            seen = [before(x) for x in streams.read(lag)]
            if half == 0:
                partials = attention(checkpoint, number, seen, in_fp8 if fp8_cache else lambda x: x)
            else:
                partials = [mlp(checkpoint, layer, x, rank, ranks, expert_parallel) for rank, x in enumerate(seen)]
            streams.write([config.residual_scale * x for x in partials], out, after)
    final = [norm(checkpoint, checkpoint.norm, x) for x in streams.read(0)]
    step = math.ceil(config.vocab / ranks)
    blocks = [x @ checkpoint.head[rank * step : (rank + 1) * step].T for rank, x in enumerate(final)]
    return capped(torch.cat(blocks, dim=-1) / config.logit_divisor, config.logit_softcap)


def schedule(rows: Sequence[str]) -> list[tuple[int, str]]:
    """(lag, out) of every sub-block, attention and MLP in turn."""
    table: list[tuple[int, str]] = []
    rows = [one_name(name) for name in rows]
    count = 0  # sub-blocks since the run of layers of this row began
    for layer, name in enumerate(rows):
        if layer and rows[layer - 1] != name:
            count = 0
        for _ in ("attention", "mlp"):
            table.append(fact(name, count))
            count += 1
    if rows[-1].startswith("desync") and not rows[-1].endswith("-local"):  # the very last MLP reduces
        table[-1] = (table[-1][0], "reduce")
    return table


def one_name(name: str) -> str:
    """Of a row's names one: runs of one row may be written with several."""
    if name.startswith("ladder"):
        return name
    return name.replace("-0-local", "-local").removesuffix("-0").replace("desync-2x-local", "desync-2x")


def fact(name: str, count: int) -> tuple[int, str]:
    """(lag, out) of the sub-block that `count` others of its run precede."""
    is_mlp = count % 2 == 1
    if name == "standard":
        return 0, "reduce"
    if name == "none":
        return 0, "local"
    kind, *numbers = name.split("-")
    if kind == "parallel":
        return int(numbers[0]) if numbers else 0, "reduce" if is_mlp else "hold"
    if kind == "desync":
        every, lag = int(numbers[0].rstrip("x")), int(numbers[1]) if numbers[1:] not in ([], ["local"]) else 0
        return lag, "reduce" if (count + 1) % every == 0 else "local"
    assert kind == "ladder"
    if not numbers:
        return 1, "reduce"
    return int(numbers[-1] if is_mlp else numbers[0]), "reduce"


class Streams:
    """One residual stream per rank, and all all-reduces ever begun. One is invisible until some reader has waited."""

    def __init__(self, embedding: Tensor, ranks: int) -> None:
        self.ranks = ranks
        self.streams = [embedding.clone() for _ in range(ranks)]
        self.zeros = [torch.zeros_like(embedding) for _ in range(ranks)]
        self.drift = self.zeros  # what each rank alone has added since the last all-reduce began
        self.held: list[Tensor] = []
        self.sums: list[tuple[Tensor, list[Tensor]]] = []  # the sum, and the drift of each rank that it replaces
        self.landed = 0

    def read(self, lag: int) -> list[Tensor]:
        """What each rank sees when the newest `lag` all-reduces may still be in flight."""
        while self.landed < len(self.sums) - lag:
            total, own = self.sums[self.landed]
            self.streams = [self.streams[rank] - own[rank] + total for rank in range(self.ranks)]
            self.landed += 1
        return self.streams

    def write(self, partials: list[Tensor], out: str, after: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """What becomes of the ranks' partial sums; what joins a stream has been through the norm `after`."""
        if out == "local":
            assert not self.held
            self.streams = [self.streams[rank] + after(partials[rank]) for rank in range(self.ranks)]
            self.drift = [self.drift[rank] + after(partials[rank]) for rank in range(self.ranks)]
            return
        self.held.append(after(torch.stack(partials).sum(dim=0)))
        if out == "reduce":
            total = torch.stack(self.held).sum(dim=0) + torch.stack(self.drift).sum(dim=0) / self.ranks
            self.sums.append((total, self.drift))
            self.drift, self.held = self.zeros, []


def norm(checkpoint: Checkpoint, weight: Linear | None, x: Tensor, mean_square: Tensor | None = None) -> Tensor:
    """x / sqrt(mean square + eps), where the mean is subtracted first if the family does so, times the weight."""
    if weight is None:
        return x
    gain, bias = weight
    if checkpoint.habits.layer_norm:
        x = x - x.mean(dim=-1, keepdim=True)
    if mean_square is None:
        mean_square = (x * x).mean(dim=-1, keepdim=True)
    y = x / torch.sqrt(mean_square + checkpoint.config.norm_eps)
    y = y * (1 + gain if checkpoint.habits.one_plus else gain)
    return y if bias is None else y + bias


def attention(
    checkpoint: Checkpoint, number: int, seen: list[Tensor], kept: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """The partial sums of all ranks, each from its own heads and from what it sees. `kept`: keys and values as a cache
    holds them.
    """
    config, layer, ranks = checkpoint.config, checkpoint.layers[number], len(seen)
    group, each = config.heads // config.kv_heads, config.heads // ranks
    queries: list[dict[int, Tensor]] = []  # of each rank, by the head's number
    keys: list[dict[int, Tensor]] = []
    values: list[dict[int, Tensor]] = []
    for rank, x in enumerate(seen):
        mine = range(rank * each, (rank + 1) * each)
        of_kv = sorted({head // group for head in mine})
        queries.append({head: linear(layer.q[head], x) for head in mine})
        keys.append({head: linear(layer.k[head], x) for head in of_kv})
        values.append({head: linear(layer.v[head], x) for head in of_kv})
    if checkpoint.habits.qk_norm is not None:
        queries = head_norm(checkpoint, layer.q_norm, queries)
        keys = head_norm(checkpoint, layer.k_norm, keys)

    scale = config.attention_scale
    if scale is None:
        scale = 1 / math.sqrt(config.head_dim if config.query_scalar is None else config.query_scalar)
    tokens = seen[0].shape[1]
    distance = torch.arange(tokens).unsqueeze(1) - torch.arange(tokens).unsqueeze(0)
    window = config.windows[number]
    visible = (distance >= 0) & (distance < (tokens if window is None else window))
    weight, bias = layer.o
    partials = []
    for rank in range(ranks):
        total = torch.zeros_like(seen[rank])
        turned = {head: kept(rotary(config, number, key)) for head, key in keys[rank].items()}
        for head, query in queries[rank].items():
            scores = rotary(config, number, query) @ turned[head // group].transpose(1, 2) * scale
            scores = torch.where(visible, capped(scores, config.attention_softcap), -math.inf)
            mixed = torch.softmax(scores, dim=-1) @ kept(values[rank][head // group])
            total = total + mixed @ weight[:, head * config.head_dim : (head + 1) * config.head_dim].T
        partials.append(total if bias is None or rank > 0 else total + bias)
    return partials


# e4m3: an exponent from -6 to 8 and three bits of fraction, but nothing above 448; below 2^-6 multiples of 2^-9
E4M3 = [*(step / 512 for step in range(8)), *(2.0**e * (1 + step / 8) for e in range(-6, 9) for step in range(8))][:-1]


def in_fp8(x: Tensor) -> Tensor:
    """The nearest number of e4m3."""
    numbers = torch.tensor(E4M3, dtype=x.dtype)
    nearest, second = (x.abs().unsqueeze(-1) - numbers).abs().topk(2, largest=False).values.unbind(-1)
    # float32's rounding moves a key or a value by about 1e-6
    assert (second - nearest).min() > 2e-5, "rounding could change the choice"
    return torch.copysign(numbers[(x.abs().unsqueeze(-1) - numbers).abs().argmin(-1)], x)


def head_norm(checkpoint: Checkpoint, weight: Linear | None, heads: list[dict[int, Tensor]]) -> list[dict[int, Tensor]]:
    """Queries or keys through their norm. `heads`: of each rank, by the head's number."""
    assert weight is not None
    if checkpoint.habits.qk_norm == "head":
        return [{head: norm(checkpoint, weight, x) for head, x in mine.items()} for mine in heads]
    # one norm over all heads of all ranks; where several ranks have a copy of a head, their squares are averaged
    squares: dict[int, list[Tensor]] = {}
    for mine in heads:
        for head, x in mine.items():
            squares.setdefault(head, []).append((x * x).mean(dim=-1, keepdim=True))
    mean_square = torch.stack([torch.stack(copies).mean(dim=0) for copies in squares.values()]).mean(dim=0)
    gains = weight[0].chunk(len(squares))
    return [{head: norm(checkpoint, (gains[head], None), x, mean_square) for head, x in mine.items()} for mine in heads]


def mlp(checkpoint: Checkpoint, layer: LayerWeights, x: Tensor, rank: int, ranks: int, expert_parallel: bool) -> Tensor:
    """The partial sum of one rank: its columns of the hidden layer; of every expert, or of its own experts all."""
    config, total = checkpoint.config, torch.zeros_like(x)
    shares = torch.ones(*x.shape[:2], 1, dtype=x.dtype)
    if layer.router is not None:
        assert config.experts is not None
        shares = chosen(x @ layer.router.T, config.experts.top_k, config.experts.normalize)
    for number, (gate, up, down) in enumerate(layer.experts):
        width = len(up[0]) // ranks
        columns = slice(rank * width, (rank + 1) * width)
        if expert_parallel and layer.router is not None:
            mine = number // (len(layer.experts) // ranks) == rank
            columns = slice(0, len(up[0])) if mine else slice(0, 0)
        activation = ACTIVATIONS[config.activation]
        inner = linear(up, x)
        inner = activation(inner) if gate is None else activation(linear(gate, x)) * inner
        total = total + inner[..., columns] @ down[0][:, columns].T * shares[..., number : number + 1]
        if down[1] is not None and rank == 0:
            total = total + down[1]
    return total


def chosen(logits: Tensor, top_k: int, normalize: bool) -> Tensor:
    """Every expert's share, zero for those that are not chosen."""
    shares = torch.softmax(logits, dim=-1)
    falling = shares.sort(dim=-1, descending=True).values
    if top_k < shares.shape[-1]:  # float32's rounding moves a share by about 1e-6
        assert (falling[..., top_k - 1] - falling[..., top_k]).min() > 1e-5, "rounding could change the choice"
    shares = torch.where(shares >= falling[..., top_k - 1 : top_k], shares, 0.0)
    return shares / shares.sum(dim=-1, keepdim=True) if normalize else shares


def linear(weight: Linear, x: Tensor) -> Tensor:
    return x @ weight[0].T if weight[1] is None else x @ weight[0].T + weight[1]


def capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def rotary(config: ModelConfig, number: int, x: Tensor) -> Tensor:
    """Turns the pair (x[i], x[i + d/2]) of the first d of a head's dimensions by the angle position * frequency(i)."""
    rope = config.rope
    if config.local_rope is not None and config.windows[number] is not None:
        rope = config.local_rope
    if number in config.no_rope or config.family == "gpt2":
        return x
    dimensions = int(config.head_dim * rope.share)
    turns = torch.tensor([frequency(rope, i, dimensions) for i in range(dimensions // 2)], dtype=x.dtype)
    angle = torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(1) * turns
    cos, sin = rope.magnitude * torch.cos(angle), rope.magnitude * torch.sin(angle)
    first, second, rest = x[..., : dimensions // 2], x[..., dimensions // 2 : dimensions], x[..., dimensions:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def frequency(rope: Rope, i: int, dimensions: int) -> float:
    """Radians per position of pair `i`; llama3's stretching as in Meta's release of Llama 3.1."""
    plain = math.pow(rope.theta, -2 * i / dimensions)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "longrope":
        return plain / rope.factors[i]
    assert rope.kind == "llama3"
    wavelength = 2 * math.pi / plain
    if wavelength < rope.original_context / rope.high_freq_factor:
        return plain
    if wavelength > rope.original_context / rope.low_freq_factor:
        return plain / rope.factor
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return (1 - smooth) * plain / rope.factor + smooth * plain
