"""One rank's shard as benchmarks need it: random weights, any wiring and any link, and what a pass costs at least."""

from dataclasses import dataclass

import torch

from ladder.comm.base import Comm, Solo
from ladder.comm.link import Link
from ladder.comm.one_rank import OneRank
from ladder.comm.signalled import Signalled
from ladder.config import ModelConfig
from ladder.model import Decoder


@dataclass(frozen=True)
class Case:
    """One model on one rank of `tp`; `layers` of it where not all fit."""

    size: str
    tp: int
    batch: int = 1
    layers: int | None = None

    def config(self) -> ModelConfig:
        config = ModelConfig.named(self.size)
        if self.layers is None:
            return config
        return config.first(self.layers)


def shard(case: Case, comm: Comm, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """This rank's shard with normal weights, drawn where it lies: a step's time does not depend on their values."""
    model = Decoder(case.config(), comm, device, dtype)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(std=0.02)
    return model


def step_bytes(model: Decoder, batch: int, context: int) -> int:
    """Bytes that a step cannot avoid to read: every weight but the embedding's rows, and the keys and values."""
    weights = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "embed_tokens" not in name)
    head = model.lm_head.weight
    if model.config.tied:
        weights += head.numel() * head.element_size()
    heads = max(1, model.config.kv_heads // model.comm.size)
    return weights + 2 * model.config.layers * batch * context * heads * model.config.head_dim * head.element_size()


def prompt_operations(model: Decoder, batch: int, tokens: int) -> float:
    """Operations of this rank's layers for `batch` prompts of `tokens`."""
    config = model.config
    weights = sum(p.numel() for p in model.layers.parameters() if p.dim() == 2)
    heads = config.heads // model.comm.size
    looking = 2 * 2 * config.layers * heads * config.head_dim * tokens * tokens / 2  # causal: half of the square
    return batch * (2 * weights * tokens + looking)


def wired(model: Decoder, pattern: str, link: Link | None, lanes: int, device: torch.device) -> None:
    """Set the wiring and the wire of a rank that is alone; both change no tensor."""
    model.rewire(pattern)
    size = model.comm.size
    if size == 1:
        model.comm = Solo()
    elif link is None:
        model.comm = OneRank(size)
    else:
        model.comm = Signalled([OneRank(size, link) for _ in range(lanes)], device, 2 * model.config.layers + 2)
