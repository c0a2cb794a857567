"""Tiny transformers models of every family, and an oracle written against each family's own sub-blocks.

The oracle shares nothing with the product's table of families: here are the sub-blocks as transformers' own layers
spell them out, and the wirings as recursions over the list of all streams.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.tolerance import backward, forward

LAYERS = 4
# between two computations of a model's logits, of its gradients: GPT-2's and Falcon's MLPs are four times 32 wide
FORWARD, BACKWARD = forward(LAYERS, 128, 21), backward(LAYERS, 128, 21)
_COMMON = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "dtype": "float32"}
_LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_GEMMA = {**_LLAMA, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}
_MIXED = ["sliding_attention", "full_attention"] * 2
_GPT = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_FALCON = {
    "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "max_position_embeddings": 64,
    "alibi": False,
}  # fmt: skip

# name -> model_type and what differs from its defaults
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA),
    "mistral": ("mistral", {**_LLAMA, "sliding_window": 6}),
    "qwen2": ("qwen2", _LLAMA),
    "qwen3": ("qwen3", {**_LLAMA, "head_dim": 8}),
    "phi3": ("phi3", _LLAMA),
    "granite": ("granite", {**_LLAMA, "residual_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 1.5}),
    "olmo2": ("olmo2", _LLAMA),
    "gemma2": ("gemma2", {**_GEMMA, "layer_types": _MIXED}),
    "gemma3": ("gemma3_text", {**_GEMMA, "layer_types": _MIXED}),
    "smollm3": ("smollm3", {**_LLAMA, "no_rope_layers": [1, 1, 1, 0]}),
    "mixtral": ("mixtral", {**_LLAMA, "num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", {
        **_LLAMA, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
    }),
    "gpt2": ("gpt2", {**_GPT, "attn_pdrop": 0.0}),
    "gpt_neox": ("gpt_neox", {**_LLAMA, "use_parallel_residual": True}),
    "gpt_neox-sequential": ("gpt_neox", {**_LLAMA, "use_parallel_residual": False}),
    "falcon": ("falcon", {**_FALCON, "parallel_attn": True, "multi_query": True, "new_decoder_architecture": False}),
    "falcon-two-norms": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-sequential": ("falcon", {
        **_FALCON, "parallel_attn": False, "new_decoder_architecture": False, "alibi": True,
    }),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": LAYERS, "n_head": 4}),
}  # fmt: skip


def host(name: str, **more: Any) -> Any:
    """A random model, not near to anything trivial: norms, biases and gates are random too."""
    model_type, own = CONFIGS[name]
    config = CONFIG_MAPPING[model_type](**{**_COMMON, **own, **more})
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=more.get("attn_implementation", "eager"))
    with torch.no_grad():
        for parameter in model.parameters():
            around = 1.0 if parameter.dim() == 1 and float(parameter.mean()) == 1 else 0.0
            parameter.normal_(around, 0.15 if parameter.dim() > 1 else 0.3)
    return model.eval()


def born_parallel(model: Any) -> bool:
    config = model.config
    return {
        "gpt_neox": lambda: config.use_parallel_residual,
        "falcon": lambda: config.parallel_attn or config.new_decoder_architecture,
    }.get(config.model_type, lambda: False)()


# --- the oracle -----------------------------------------------------------------------------------------------------

Block = Callable[[Tensor], Tensor]


def _attention(kind: str, layer: Any, call: dict[str, Any]) -> Block:
    if kind in ("gemma2", "gemma3_text"):
        return lambda x: layer.post_attention_layernorm(layer.self_attn(layer.input_layernorm(x), **call)[0])
    if kind == "olmo2":
        return lambda x: layer.post_attention_layernorm(layer.self_attn(x, **call)[0])
    if kind == "granite":
        return lambda x: layer.self_attn(layer.input_layernorm(x), **call)[0] * 0.3
    if kind == "gpt2":
        return lambda x: layer.attn(layer.ln_1(x), attention_mask=call["attention_mask"])[0]
    if kind == "gpt_neox":
        return lambda x: layer.attention(layer.input_layernorm(x), **call)[0]
    if kind in ("falcon", "bloom"):
        norm = layer.ln_attn if hasattr(layer, "ln_attn") else layer.input_layernorm
        keys = ("attention_mask", "alibi", *(("position_embeddings",) if kind == "falcon" else ()))
        taken = {key: call[key] for key in keys}
        if kind == "bloom":
            return lambda x: layer.self_attention(norm(x), torch.zeros_like(x), **taken)[0]
        return lambda x: layer.self_attention(norm(x), **taken)[0]
    return lambda x: layer.self_attn(layer.input_layernorm(x), **call)[0]


def _mlp(kind: str, layer: Any) -> Block:
    if kind in ("gemma2", "gemma3_text"):
        return lambda x: layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
    if kind == "olmo2":
        return lambda x: layer.post_feedforward_layernorm(layer.mlp(x))
    if kind == "granite":
        return lambda x: layer.mlp(layer.post_attention_layernorm(x)) * 0.3
    if kind == "gpt2":
        return lambda x: layer.mlp(layer.ln_2(x))
    if kind == "bloom":
        return lambda x: layer.mlp(layer.post_attention_layernorm(x), torch.zeros_like(x))
    if kind == "falcon" and layer.config.new_decoder_architecture:
        return lambda x: layer.mlp(layer.ln_mlp(x))
    if kind == "falcon" and layer.config.parallel_attn:
        return lambda x: layer.mlp(layer.input_layernorm(x))
    return lambda x: layer.mlp(layer.post_attention_layernorm(x))


def oracle(model: Any, wirings: list[str], **inputs: Any) -> Tensor:
    """The logits of an untouched model's weights under one wiring a layer: standard, parallel-N or ladder-N."""
    base = model.base_model
    layers = base.h if hasattr(base, "h") else base.layers
    calls: list[dict[str, Any]] = []
    embedding: list[Tensor] = []

    def look(layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        embedding.append(arguments[0])
        names = ("past_key_values", "attention_mask") if model.config.model_type == "gpt2" else ()
        calls.append({**named, **dict(zip(names, arguments[1:], strict=False))})

    hooks = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in layers]
    model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()

    kind = model.config.model_type
    streams = [embedding[0]]  # r[0], r[1], ...: after each sum
    seen = 0  # the newest that anybody has read: what has been waited for stays in the stream
    for wiring, layer, call in zip(wirings, layers, calls, strict=True):
        blocks = [_attention(kind, layer, call), _mlp(kind, layer)]
        kind_of_wiring, _, number = wiring.partition("-")
        lag = int(number or kind_of_wiring == "ladder")
        if kind_of_wiring == "parallel" or (wiring == "standard" and born_parallel(model)):
            seen = max(seen, len(streams) - 1 - lag)
            streams.append(streams[-1] + (blocks[0](streams[seen]) + blocks[1](streams[seen])))
        else:
            for block in blocks:
                seen = max(seen, len(streams) - 1 - lag)
                streams.append(streams[-1] + block(streams[seen]))
    final = next(getattr(base, name) for name in ("norm", "ln_f", "final_layer_norm") if hasattr(base, name))
    logits = model.get_output_embeddings()(final(streams[-1]))
    if kind == "granite":
        logits = logits / model.config.logits_scaling
    if kind == "gemma2" and model.config.final_logit_softcapping:
        cap = model.config.final_logit_softcapping
        logits = torch.tanh(logits / cap) * cap
    return logits
