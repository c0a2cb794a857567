"""Named model sizes."""

from typing import Any

from ladder.config.model import Experts, ModelConfig
from ladder.config.rope import Rope

_LLAMA_3 = {"vocab": 128_256, "context": 8192, "rope": Rope(500_000.0)}
_LLAMA_31 = _LLAMA_3 | {"context": 131_072, "rope": Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192)}
_LLAMA_32 = _LLAMA_31 | {"rope": Rope(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192), "tied": True}
_PAPER = {"vocab": 49_152, "context": 2048, "dtype": "bfloat16"}


def _size(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **rest: Any) -> ModelConfig:
    return ModelConfig(hidden, layers, heads, kv_heads, ffn, **{"dtype": "bfloat16", **rest})


SIZES: dict[str, ModelConfig] = {
    # the paper's from-scratch models, and its larger ladder models of equal speed
    "1B": _size(1536, 40, 24, 24, 4096, **_PAPER),
    "1.5B": _size(1536, 52, 24, 24, 4096, **_PAPER),
    "3B": _size(2304, 40, 36, 36, 9216, **_PAPER),
    "4.5B": _size(2304, 52, 36, 36, 9216, **_PAPER),
    # the same where 8 ranks must divide the heads
    "3B-32h": _size(2304, 40, 32, 32, 9216, **_PAPER),
    "4.5B-32h": _size(2304, 52, 32, 32, 9216, **_PAPER),
    # the paper's benchmark sizes
    "llama-3-8b": _size(4096, 32, 32, 8, 14_336, **_LLAMA_3),
    "34B": _size(8192, 48, 64, 8, 22_016, vocab=32_000, context=16_384, rope=Rope(1e6)),  # CodeLlama-34B
    "llama-3-70b": _size(8192, 80, 64, 8, 28_672, **_LLAMA_3),
    "llama-3.1-70b": _size(8192, 80, 64, 8, 28_672, **_LLAMA_31),  # llama-3-70b, read further
    "176B": _size(14_336, 70, 112, 112, 57_344, vocab=250_880, context=2048),  # BLOOM's dimensions, this architecture
    "llama-3.1-405b": _size(16_384, 126, 128, 8, 53_248, **_LLAMA_31),
    # with experts
    "mixtral-8x7b": _size(
        4096,
        32,
        32,
        8,
        14_336,
        vocab=32_000,
        family="mixtral",
        context=32_768,
        rope=Rope(1e6),
        experts=Experts(8, 2, 14_336),
    ),
    "qwen3-30b-a3b": _size(
        2048,
        48,
        32,
        4,
        6144,
        vocab=151_936,
        family="qwen3_moe",
        head_dim=128,
        context=40_960,
        rope=Rope(1e6),
        norm_eps=1e-6,
        experts=Experts(128, 8, 768),
    ),
    # small ones people have
    "llama-3.2-1b": _size(2048, 16, 32, 8, 8192, **_LLAMA_32),
    "llama-3.2-3b": _size(3072, 28, 24, 8, 8192, **_LLAMA_32),
    "smollm2-135m": _size(576, 30, 9, 3, 1536, vocab=49_152, context=8192, rope=Rope(1e5), tied=True),
    # trained here from scratch: wirings side by side, and what comes with the package
    "50M": _size(640, 10, 8, 8, 1792, vocab=16_384, context=2048, tied=True),
    "50M-long": _size(640, 13, 8, 8, 1792, vocab=16_384, context=2048, tied=True),
    "embedded": _size(320, 8, 8, 8, 864, vocab=4096, context=1024, tied=True),
    # for tests: shards over 8 ranks, with its 4 key/value heads replicated
    "tiny": ModelConfig(64, 4, 8, 4, 128, vocab=320, context=512),
    # for `ladder bench --preset quick`: half of a sub-block takes a CPU core some milliseconds, and all fits a laptop
    "quick": ModelConfig(2048, 8, 16, 16, 4096, vocab=4096, context=2048),
}
