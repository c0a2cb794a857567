"""Tiny random transformers models, one per family: the checkpoints that the product must read."""

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SMALL = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 131, "eos_token_id": None}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256, "bos_token_id": None}


def scaled(factor: float) -> dict[str, object]:
    """Llama 3.x's rotary scaling, with an original context short enough for every branch of it to matter."""
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_parameters": {"rope_theta": 500_000.0, "original_max_position_embeddings": 64, **rope}}


FAMILIES: dict[str, tuple[type, type, dict[str, object]]] = {
    "llama-2": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 8}),
    "llama-3": (LlamaConfig, LlamaForCausalLM, {"rope_theta": 500_000.0}),
    "llama-3.1": (LlamaConfig, LlamaForCausalLM, scaled(8.0)),
    "llama-3.2": (LlamaConfig, LlamaForCausalLM, {**scaled(32.0), "tie_word_embeddings": True}),
    "llama-linear": (LlamaConfig, LlamaForCausalLM, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-bias": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 7, "head_dim": 10}),
    "mistral-full": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "smollm2": (
        LlamaConfig,
        LlamaForCausalLM,
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 54, "tie_word_embeddings": True},
    ),
}


def make(family: str, directory: Path | None = None, **changes: object) -> PreTrainedModel:
    """A model whose every parameter is random, biases and norms too; saved where a directory is given."""
    config_class, model_class, own = FAMILIES[family]
    torch.manual_seed(7)
    model = model_class(config_class(**{**SMALL, **own, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model = model.eval()
    if directory is not None:
        model.save_pretrained(directory)
    return model
