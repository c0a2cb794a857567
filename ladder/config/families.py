"""Families of models: what a model_type implies beyond its dimensions, and where its checkpoints keep each tensor.

A family is a row in the table at the end of this file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Names:
    """Where a checkpoint keeps each tensor. The names of a layer's tensors are relative to `layers`.N."""

    embed: str = "model.embed_tokens"
    positions: str | None = None  # a learned position embedding
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str | None = "input_layernorm"  # before the sub-block; None: it reads the stream as it is
    attention_post_norm: str | None = None  # after the sub-block; None: its output joins the stream as it is
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or all three in one matrix:
    grouped: bool = False  # a group's queries, then its key and its value, group after group; else all queries first
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # or both in one matrix
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert_up: tuple[str, str] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")  # {}: the expert's number
    expert_down: str = "mlp.experts.{}.down_proj"
    transposed: bool = False  # matrices of layers are stored as [inputs, outputs]

    @property
    def shared_norm(self) -> bool:
        """Attention and MLP read the stream through the same norm."""
        return self.attention_norm is not None and self.attention_norm == self.mlp_norm


@dataclass(frozen=True)
class Family:
    """What a model_type implies. `None` for a bias: config.json decides."""

    architecture: str
    names: Names = Names()
    variants: Mapping[str, Names] = field(default_factory=dict)  # where settings of config.json change the names
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    gated: bool = True  # the MLP: down( activation(gate) * up ); else down( activation(up) )
    activation: str = "silu"
    qk_norm: str = ""  # of queries and keys: "" none, "head" each head by itself, "all" all heads together
    layer_norm: bool = False  # norms subtract the mean and have a bias; else root-mean-square norms
    norm_offset: int = 0  # a norm multiplies by offset + weight
    root_embedding: bool = False  # embeddings are multiplied by sqrt(hidden)
    partial_rotary: bool = False  # config.json may say that only a share of a head is rotated
    parallel: bool = False  # attention and MLP read the same stream: what the wiring `standard` means for this family
    windows: str = "none"  # none; all: every layer has the window; listed: layer_types (or max_window_layers) say which
    normalize_experts: bool | None = None  # the chosen experts' weights add up to one; None: config.json decides
    keys: Mapping[str, str] = field(default_factory=dict)  # our field -> config.json's key if not Llama's; "": none
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers' own, where config.json is silent
    requires: Mapping[str, Any] = field(default_factory=dict)  # settings that must be so, or absent


_QWEN = {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_BOTH_NORMS = Names(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_GEMMA: dict[str, Any] = {"head_dim": 256, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_GEMMA |= {"num_key_value_heads": 4, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA_KEYS = {"activation": "hidden_activation", "query_scalar": "query_pre_attn_scalar"}
_GEMMA_KEYS |= {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
_FALCON = Names(
    embed="transformer.word_embeddings",
    layers="transformer.h",
    norm="transformer.ln_f",
    qkv=("self_attention.query_key_value",),
    grouped=True,
    o="self_attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", defaults={"max_position_embeddings": 2048}),
    "mistral": Family(
        "MistralForCausalLM",
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        windows="all",
        defaults={"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, o_bias=False, mlp_bias=False, windows="listed", defaults=_QWEN),
    "qwen3": Family(
        "Qwen3ForCausalLM", mlp_bias=False, qk_norm="head", windows="listed", defaults={**_QWEN, "head_dim": 128}
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        mlp_bias=False,
        qk_norm="head",
        windows="all",
        keys={"experts": "num_experts", "expert_ffn": "moe_intermediate_size"},
        defaults={"max_position_embeddings": 32_768, "num_key_value_heads": 4, "num_experts": 128}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "norm_topk_prob": False}
        | {"use_sliding_window": False},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        Names(
            router="block_sparse_moe.gate",
            expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
            expert_down="block_sparse_moe.experts.{}.w2",
        ),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        windows="all",
        normalize_experts=True,
        keys={"experts": "num_local_experts", "expert_ffn": "intermediate_size"},
        defaults={"max_position_embeddings": 131_072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        windows="listed",
        defaults={"max_position_embeddings": 32_768, "num_key_value_heads": 4, "tie_word_embeddings": True}
        | {"rope_theta": 2e6, "no_rope_layer_interval": 4},
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        partial_rotary=True,
        names=Names(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        windows="all",
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    "granite": Family(
        "GraniteForCausalLM",
        keys={"embed_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}
        | {"attention_scale": "attention_multiplier", "logit_divisor": "logits_scaling"},
        defaults={"max_position_embeddings": 2048, "attention_multiplier": 1.0},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        Names(
            attention_norm=None,
            attention_post_norm="post_attention_layernorm",
            mlp_norm=None,
            mlp_post_norm="post_feedforward_layernorm",
        ),
        mlp_bias=False,
        qk_norm="all",
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _BOTH_NORMS,
        mlp_bias=False,
        activation="gelu_pytorch_tanh",
        norm_offset=1,
        root_embedding=True,
        windows="listed",
        keys=_GEMMA_KEYS,
        defaults={**_GEMMA, "max_position_embeddings": 8192, "sliding_window_pattern": 2}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        requires={"use_bidirectional_attention": False},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _BOTH_NORMS,
        mlp_bias=False,
        activation="gelu_pytorch_tanh",
        qk_norm="head",
        norm_offset=1,
        root_embedding=True,
        windows="listed",
        keys={ours: key for ours, key in _GEMMA_KEYS.items() if ours != "attention_softcap"},  # its layers have none
        defaults={**_GEMMA, "max_position_embeddings": 131_072, "sliding_window_pattern": 6}
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        requires={"use_bidirectional_attention": False},
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        Names(
            embed="gpt_neox.embed_in",
            layers="gpt_neox.layers",
            norm="gpt_neox.final_layer_norm",
            head="embed_out",
            qkv=("attention.query_key_value",),
            grouped=True,
            o="attention.dense",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
        ),
        mlp_bias=True,
        gated=False,
        activation="gelu",
        layer_norm=True,
        partial_rotary=True,
        parallel=True,
        keys={"norm_eps": "layer_norm_eps", "parallel": "use_parallel_residual", "kv_heads": ""},
        defaults={"max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "attention_bias": True}
        | {"use_parallel_residual": True, "rotary_pct": 0.25, "hidden_act": "gelu"},
    ),
    "falcon": Family(
        "FalconForCausalLM",
        variants={
            "shared": replace(_FALCON, mlp_norm="input_layernorm"),
            "two": replace(_FALCON, attention_norm="ln_attn", mlp_norm="ln_mlp"),
            "sequential": _FALCON,
        },
        gated=False,
        activation="gelu",
        layer_norm=True,
        parallel=True,
        keys={"norm_eps": "layer_norm_epsilon", "activation": "activation", "kv_heads": "num_kv_heads"}
        | {"ffn": "ffn_hidden_size"},
        defaults={
            "max_position_embeddings": 2048,
            "layer_norm_epsilon": 1e-5,
            "multi_query": True,
            "activation": "gelu",
        }
        | {"parallel_attn": True, "new_decoder_architecture": False, "tie_word_embeddings": True},
        requires={"alibi": False},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        Names(
            embed="transformer.wte",
            positions="transformer.wpe",
            layers="transformer.h",
            norm="transformer.ln_f",
            attention_norm="ln_1",
            mlp_norm="ln_2",
            qkv=("attn.c_attn",),
            o="attn.c_proj",
            up=("mlp.c_fc",),
            down="mlp.c_proj",
            transposed=True,
        ),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        activation="gelu_new",
        layer_norm=True,
        keys={
            "kv_heads": "",
            "hidden": "n_embd",
            "layers": "n_layer",
            "heads": "n_head",
            "context": "n_positions",
            "ffn": "n_inner",
        }
        | {"norm_eps": "layer_norm_epsilon", "activation": "activation_function"},
        defaults={"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
        | {"activation_function": "gelu_new"},
        requires={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ),
}
