"""Tiny random transformers models, one per family: the checkpoints that the product must read."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

SMALL = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 131, "eos_token_id": None}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256, "bos_token_id": None}


def scaled(factor: float) -> dict[str, object]:
    """Llama 3.x's rotary scaling, with an original context short enough for every branch of it to matter."""
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_parameters": {"rope_theta": 500_000.0, "original_max_position_embeddings": 64, **rope}}


_LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 128}
LONGROPE = {**_LONGROPE, "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0], "factor": 4.0}
GEMMA = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
QWEN3_MOE = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FALCON = {"num_ln_in_parallel_attn": 1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("llama", {"num_key_value_heads": 8}),
    "llama-3": ("llama", {"rope_theta": 500_000.0}),
    "llama-3.1": ("llama", scaled(8.0)),
    "llama-3.2": ("llama", {**scaled(32.0), "tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 10}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "smollm2": (
        "llama",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 54, "tie_word_embeddings": True},
    ),
    "smollm3": ("smollm3", {"pad_token_id": None, "no_rope_layer_interval": 2}),
    "smollm3-window": ("smollm3", {"pad_token_id": None, "use_sliding_window": True, "sliding_window": 5}),
    "phi3": ("phi3", {"pad_token_id": None, "sliding_window": 6}),
    "phi3-partial": ("phi3", {"pad_token_id": None, "hidden_size": 64, "partial_rotary_factor": 0.5}),
    "phi3-longrope": (
        "phi3",
        {"pad_token_id": None, "original_max_position_embeddings": 128, "rope_parameters": LONGROPE},
    ),
    "granite": (
        "granite",
        {"embedding_multiplier": 1.5, "logits_scaling": 2.0, "residual_multiplier": 0.6, "attention_multiplier": 0.3},
    ),
    "olmo2": ("olmo2", {"pad_token_id": None}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma3": ("gemma3_text", {**GEMMA, "rope_parameters": TWO_ROPES, "sliding_window_pattern": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen3-moe": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-plain": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": False, "decoder_sparse_step": 2}),
    "gpt-neox": ("gpt_neox", {"hidden_size": 64, "rotary_pct": 0.25}),
    "gpt-neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "hidden_size": 64, "rotary_pct": 1.0}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4}),
    "falcon-one-norm": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-7b": ("falcon", {"multi_query": True}),
    "falcon-sequential": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "gpt2": ("gpt2", {"n_embd": 48, "n_head": 8, "n_layer": 4, "n_positions": 256}),
}


def make(family: str, directory: Path | None = None, **changes: object) -> PreTrainedModel:
    """A model whose every parameter is random, biases and norms too; saved where a directory is given."""
    model_type, own = FAMILIES[family]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**SMALL, **own, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name or "ln_" in name else 0.0, 0.2)
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # transformers' default leaves the cap out
    model = model.eval()
    if directory is not None:
        model.save_pretrained(directory)
    return model
