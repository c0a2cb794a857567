"""The product's side of a comparison: weights by their Hugging Face names, and a decoder that holds them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ladder.checkpoint import Random, load
from ladder.comm.base import Comm
from ladder.config import ModelConfig
from ladder.layers.shard import Shard
from ladder.model import Decoder
from ladder.train.tensor_parallel.replicas import shard_views

# Small enough for hundreds of models; a vocabulary that no degree divides; degrees 4 and 8 replicate key/value heads.
TINY: dict[str, Any] = {"hidden": 16, "heads": 8, "kv_heads": 2, "ffn": 16, "vocab": 13, "head_dim": 4}
DEVIATION = 0.15  # logits of magnitude one that every sub-block moves, and rounding far below the tolerance


def tiny(layers: int, **rest: Any) -> ModelConfig:
    return ModelConfig(layers=layers, **{**TINY, **rest})


def draw(config: ModelConfig, seed: int = 0, deviation: float = DEVIATION) -> dict[str, Tensor]:
    """Every whole weight of a model, by name. The same for every wiring."""
    source = Random(seed, deviation)
    whole = {shard.name: shard.shape for shard in Decoder(config).shards()}
    return {name: source.read(name, shape, tuple(map(slice, shape))) for name, shape in whole.items()}


class Given:
    """A source of weights that are at hand."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        whole = self.weights[name]
        assert whole.shape == shape, f"{name} is asked for as {shape}, it is {tuple(whole.shape)}"
        return whole[index]


def decoder(
    config: ModelConfig, weights: Mapping[str, Tensor], comm: Comm | None = None, expert_parallel: bool = False
) -> Decoder:
    """One rank of the product with these weights."""
    return load(Decoder(config, comm, dtype=torch.float32, expert_parallel=expert_parallel), Given(weights))


def joined(model: Decoder, block: Tensor) -> Tensor:
    """The whole logits from this rank's block, on every rank."""
    return model.comm.all_gather(block)[..., : model.config.vocab]


def answer(config: ModelConfig, weights: Mapping[str, Tensor], tokens: Tensor, comm: Comm | None = None) -> Tensor:
    """The product's logits, [batch, tokens, vocab]."""
    model = decoder(config, weights, comm)
    return joined(model, model(tokens))


def shard_gradients(model: Decoder) -> Iterator[tuple[Shard, Tensor]]:
    """This rank's shards, each with its part of the gradient; without a gradient: left out."""
    return shard_views(model, {weight: weight.grad for weight in model.parameters() if weight.grad is not None})
