"""What vLLM's answers are compared with: our decoder on emulated ranks, and the oracle, both over whole texts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ladder.checkpoint import Directory, Random, load, save
from ladder.comm.emulated import World
from ladder.config import ModelConfig
from ladder.config.model import Experts
from ladder.config.rope import Rope
from ladder.model import Decoder
from ladder.wiring import Wiring
from tests import oracle
from tests.vllm.engines import Answer
from tests.weights import Given

LAYERS = 4
CLOSE = 1e-4  # of log-probabilities in float32
# vLLM's attention on a CPU has heads of 32 and more
_SIZES: dict[str, Any] = {
    "hidden": 64,
    "layers": LAYERS,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 96,
    "vocab": 320,
}  # a vocabulary that vLLM shares as we do
_SIZES |= {"head_dim": 32, "context": 512}
_EXPERTS = Experts(4, 2, 96)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"windows": (24,) * LAYERS},
    "qwen2": {"qkv_bias": True, "heads": 2},  # vLLM: a head is always hidden / heads wide
    "qwen3": {},
    "mixtral": {"experts": _EXPERTS},
    "qwen3_moe": {"experts": replace(_EXPERTS, normalize=False, dense_layers=(1,))},
    "gemma2": {"windows": (24, None) * 2, "query_scalar": 32.0, "attention_softcap": 50.0, "logit_softcap": 30.0}
    | {"tied": True},
    "gemma3_text": {
        "windows": (24, None) * 2,
        "query_scalar": 32.0,
        "tied": True,
        "rope": Rope(1e6),
        "local_rope": Rope(),
    },
}
# prompts of 5 to 300 tokens; the last two begin alike
LENGTHS = (5, 17, 64, 300)


def config(family: str) -> ModelConfig:
    return ModelConfig(family=family, **{**_SIZES, **FAMILIES[family]})


def checkpoint(directory: Path, family: str, wiring: str, **changes: Any) -> Path:
    """A random model, whose every token depends on all before it."""
    made = replace(config(family).rewired(wiring), **changes)
    save(load(Decoder(made), Random(seed=5, deviation=0.15)), directory)
    return directory


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in LENGTHS]
    return [*found, found[-1][:200] + found[0]]


@cache
def _weights(directory: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    source = Directory(directory)
    whole = {shard.name: shard.shape for shard in Decoder(source.config).shards()}
    return source.config, {name: source.read(name, shape, tuple(map(slice, shape))) for name, shape in whole.items()}


def native(directory: Path, wiring: str, ranks: int, text: Sequence[int]) -> Tensor:
    """Our decoder's log-probabilities behind every token, [tokens, vocab]."""
    own, weights = _weights(directory)
    rewired = own.rewired(wiring)
    with World(ranks) as world, torch.no_grad():
        blocks = world.run(
            lambda comm: load(Decoder(rewired, comm, dtype=torch.float32), Given(weights))(torch.tensor([list(text)]))
        )
    return torch.cat(blocks, -1)[0, :, : own.vocab].float().log_softmax(-1)


def from_oracle(directory: Path, wiring: str, ranks: int, text: Sequence[int]) -> Tensor:
    own, weights = _weights(directory)
    rows = Wiring.parse(wiring, own.layers).layers
    double = {name: weight.double() for name, weight in weights.items()}
    return oracle.logits(own, double, torch.tensor([list(text)]), rows, ranks)[0].log_softmax(-1)


def apart(answers: Sequence[Answer], texts: Sequence[list[int]], expected: Any) -> float:
    """The largest difference of log-probabilities; infinite where a token is another one. `expected`: of a text."""
    worst = 0.0
    for answer, prompt in zip(answers, texts, strict=True):
        table = expected([*prompt, *answer.tokens])[len(prompt) - 1 : -1]
        if table.argmax(-1).tolist() != answer.tokens:
            return float("inf")
        found = table[torch.arange(len(answer.tokens)), torch.tensor(answer.tokens)]
        worst = max(worst, float((found - torch.tensor(answer.logprobs)).abs().max()))
    return worst
