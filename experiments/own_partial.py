"""Each rank has its own partial sum at once, and only the others' are late: what is it worth to read it?

python -m experiments.own_partial MODEL DATA WIRING ... [--ranks R ...] [--scale A ...] [--fit-tokens N] [--device D]

MODEL is a Llama checkpoint, DATA a folder of `ladder data --tokenizer MODEL`. In the layers of a WIRING that are
`ladder`, rank r's sub-block reads the stream without the newest results, and on top of that A times rank r's own
newest partial sum: A = 0 is ladder as it is, and with one rank A = 1 is standard. A JSON line for each; with
--fit-tokens the weights are fitted by least squares, each rank's own (see ladder/scan/solve.py).

Ranks have heads and inner inputs in equal shares, or shares that differ by one.
"""

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM

from ladder.bench.machine import machine
from ladder.hf.measures import Estimate
from ladder.scan.fit import data_sequences
from ladder.scan.solve import RIDGE, NormalEquations
from ladder.wiring import Wiring

BATCH = 4
SEQ_LEN = 1024


@dataclass
class Model:
    """A Llama checkpoint in float32; each rank's share of it is a slice."""

    config: Any
    embedding: Tensor
    layers: list[dict[str, Tensor]]
    norm: Tensor
    head: Tensor
    ranks: int

    @classmethod
    def read(cls, folder: Path, ranks: int) -> "Model":
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        weights = {name: tensor.detach().to(torch.get_default_device()) for name, tensor in found.state_dict().items()}
        layers = []
        for index in range(found.config.num_hidden_layers):
            prefix = f"model.layers.{index}."
            layers.append({name.removeprefix(prefix).removesuffix(".weight").split(".")[-1]: tensor.clone()
                           for name, tensor in weights.items() if name.startswith(prefix)})  # fmt: skip
        own = weights["model.embed_tokens.weight"], weights["model.norm.weight"], weights["lm_head.weight"]
        return cls(found.config, own[0], layers, own[1], own[2], ranks)

    def share(self, count: int, rank: int) -> slice:
        return slice(rank * count // self.ranks, (rank + 1) * count // self.ranks)

    def log_probabilities(self, stream: Tensor) -> Tensor:
        x = rms_norm(stream, self.norm.shape, self.norm, self.config.rms_norm_eps)
        return (x @ self.head.mT).log_softmax(-1)


class Block:
    """A sub-block of the model."""

    def __init__(self, model: Model, number: int) -> None:
        self.model, self.layer, self.attends = model, model.layers[number // 2], number % 2 == 0
        self.gain = self.layer["input_layernorm" if self.attends else "post_attention_layernorm"]
        self.back = "o_proj" if self.attends else "down_proj"

    def reads(self, stream: Tensor) -> Tensor:
        return rms_norm(stream, self.gain.shape, self.gain, self.model.config.rms_norm_eps)

    def parts(self, rank: int) -> dict[str, list[int]]:
        """A rank's rows of the weights that read, and under `back` its columns of the one that adds."""
        if not self.attends:
            some = list(range(self.layer["gate_proj"].shape[0]))[self.model.share(len(self.layer["gate_proj"]), rank)]
            return {"gate_proj": some, "up_proj": some, self.back: some}
        heads, keys, size = self.heads()
        mine = list(range(heads))[self.model.share(heads, rank)]
        theirs = sorted({head * keys // heads for head in mine})
        rows, key_rows = ([head * size + n for head in each for n in range(size)] for each in (mine, theirs))
        return {"q_proj": rows, "k_proj": key_rows, "v_proj": key_rows, self.back: rows}

    def heads(self) -> tuple[int, int, int]:
        config = self.model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_attention_heads, config.num_key_value_heads, size

    def holds(self, read: Tensor, weights: dict[str, Tensor], rank: int) -> Tensor:
        """From what a rank reads to the input of its projection back."""
        if not self.attends:
            return silu(read @ weights["gate_proj"].mT) * (read @ weights["up_proj"].mT)
        heads, keys, size = self.heads()
        q, k, v = (
            (read @ weights[f"{name}_proj"].mT).unflatten(-1, (-1, size)).transpose(1, 2) for name in ("q", "k", "v")
        )
        q, k = self.rotated(q), self.rotated(k)
        mine = list(range(heads))[self.model.share(heads, rank)]
        first = mine[0] * keys // heads
        which = [head * keys // heads - first for head in mine]
        y = scaled_dot_product_attention(q, k[:, which], v[:, which], is_causal=True)
        return y.transpose(1, 2).flatten(2)

    def rotated(self, x: Tensor) -> Tensor:
        config, size = self.model.config, x.shape[-1]
        base = config.rope_parameters["rope_theta"]
        angles = torch.arange(x.shape[-2])[:, None] * base ** (-torch.arange(0, size, 2) / size)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        one, other = x.chunk(2, -1)
        return x * cos + torch.cat((-other, one), -1) * sin


@dataclass
class Streams:
    """Of a batch of sequences: what the ranks agree on, and the newest partial sum of each, which is on its way."""

    agreed: Tensor
    newest: list[Tensor]  # empty: nothing is

    @property
    def whole(self) -> Tensor:
        return self.agreed + sum(self.newest) if self.newest else self.agreed

    def read(self, stale: bool, scale: float, rank: int) -> Tensor:
        if not stale:
            return self.whole
        return self.agreed + scale * self.newest[rank] if self.newest and scale else self.agreed

    def after(self, partials: list[Tensor]) -> "Streams":
        return Streams(self.whole, partials)


def run_block(
    block: Block, weights: Sequence[dict[str, Tensor]], streams: Streams, stale: bool, scale: float
) -> Streams:
    partials = []
    for rank, own in enumerate(weights):
        held = block.holds(block.reads(streams.read(stale, scale, rank)), own, rank)
        partials.append(held @ own[block.back].mT)
    return streams.after(partials)


def shares(block: Block) -> list[dict[str, Tensor]]:
    """Each rank's weights."""
    found = []
    for rank in range(block.model.ranks):
        parts = block.parts(rank)
        own = {name: block.layer[name][rows] for name, rows in parts.items() if name != block.back}
        own[block.back] = block.layer[block.back][:, parts[block.back]]
        found.append(own)
    return found


def fitted(
    block: Block, before: list[Tensor], streams: list[Streams], scale: float
) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """Each rank's weights by least squares, and the original's streams behind the sub-block, from those `before` it."""
    given = shares(block)
    weights = [dict(own) for own in given]
    after = []
    for stream in before:
        after.append(run_block(block, given, Streams(stream, []), False, 0).whole)
    for rank, own in enumerate(weights):
        reading = NormalEquations()
        for stream, each in zip(before, streams, strict=True):
            x = block.reads(each.read(True, scale, rank))
            reading.add(x, block.reads(stream) - x)
        move = reading.solve(RIDGE).float()
        for name in own.keys() - {block.back}:
            own[name] = own[name] + own[name] @ move.mT
    adding, ends = NormalEquations(), [0]
    for wanted, each in zip(after, streams, strict=True):
        held = [block.holds(block.reads(each.read(True, scale, rank)), own, rank) for rank, own in enumerate(weights)]
        ends = [0, *itertools.accumulate(part.shape[-1] for part in held)]
        own_end = each.whole + sum(x @ own[block.back].mT for x, own in zip(held, weights, strict=True))
        adding.add(torch.cat(held, -1), wanted - own_end, wanted.square().mean(-1, keepdim=True).rsqrt())
    move = adding.solve(RIDGE).float()
    for rank, own in enumerate(weights):
        own[block.back] = own[block.back] + move[ends[rank] : ends[rank + 1]].mT
    return weights, after


def compare(model: Model, streams: list[Streams], original: list[Tensor], tokens: Sequence[Tensor]) -> dict[str, Any]:
    """Perplexity; KL to the original in nats per token, and how often both have the same most likely next token."""
    losses, far, same = [], [], []  # of each sequence, added up
    for each, one, ids in zip(streams, original, tokens, strict=True):
        for stream, reference, text in zip(each.whole, one, ids, strict=True):
            own, theirs = (model.log_probabilities(x[:-1]) for x in (stream, reference))
            losses.append(-own.gather(1, text[1:, None]).sum(dtype=torch.float64))
            far.append((theirs.exp() * (theirs - own)).sum(dtype=torch.float64))
            same.append((own.argmax(-1) == theirs.argmax(-1)).sum(dtype=torch.float64))
    counts = torch.full((len(far),), SEQ_LEN - 1.0, dtype=torch.float64)
    loss, kl, agreement = (Estimate.ratio(torch.stack(some), counts) for some in (losses, far, same))
    return {"perplexity": loss.exp().value, "kl": kl.value, "kl_stderr": kl.stderr, "agreement": agreement.value,
            "measured_on": kl.n}  # fmt: skip


@torch.no_grad()
def measure(model: Model, wiring: Wiring, scale: float, measured: Tensor, fit_on: Tensor | None) -> dict[str, Any]:
    """The model under this wiring; its weights are fitted where there are sequences to fit on."""
    texts = measured.split(BATCH)
    some = [Streams(model.embedding[ids], []) for ids in texts]
    original = [stream.agreed for stream in some]
    to_fit = [] if fit_on is None else [Streams(model.embedding[ids], []) for ids in fit_on.split(BATCH)]
    wanted = [stream.agreed for stream in to_fit]
    for number in range(2 * len(model.layers)):
        block, stale = Block(model, number), wiring.layers[number // 2] == "ladder"
        given = weights = shares(block)
        if to_fit and stale:
            weights, wanted = fitted(block, wanted, to_fit, scale)
        elif to_fit:
            wanted = [run_block(block, given, Streams(stream, []), False, 0).whole for stream in wanted]
        to_fit = [run_block(block, weights, stream, stale, scale) for stream in to_fit]
        some = [run_block(block, weights, stream, stale, scale) for stream in some]
        original = [run_block(block, given, Streams(stream, []), False, 0).whole for stream in original]
    return compare(model, some, original, texts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("wiring", nargs="+")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--scale", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--fit-tokens", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    count = max(BATCH, given.fit_tokens // SEQ_LEN)
    sequences, text = data_sequences(given.data, SEQ_LEN, BATCH, count * SEQ_LEN)
    torch.set_default_device(given.device)  # from here on; what is read is sent there
    sequences, text = sequences.to(given.device), text.view(-1, SEQ_LEN).to(given.device)
    for ranks, pattern in itertools.product(given.ranks, given.wiring):
        model = Model.read(given.model, ranks)
        wiring = Wiring.parse(pattern, len(model.layers))
        assert set(wiring.layers) <= {"standard", "ladder"}, pattern
        for scale in given.scale:
            begin = time.time()
            found = measure(model, wiring, scale, text, sequences if given.fit_tokens else None)
            line = {"model": given.model.name, "wiring": pattern, "ranks": ranks, "own": scale}
            line |= {"fit_tokens": sequences.numel() if given.fit_tokens else 0, **found}
            line["seconds"] = round(time.time() - begin, 1)
            print(json.dumps({**line, **machine(torch.device(given.device))}), flush=True)


if __name__ == "__main__":
    main()
