"""ModelConfig from and to Hugging Face's config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladder.config.early import check_model_named
from ladder.config.families import FAMILIES, Family
from ladder.config.fields import read_config, read_json, token_ids, whole_number
from ladder.config.lock import locked, ranks_of, shared_norm_of, unlocked, wiring_of
from ladder.config.model import LARGEST, Experts, ModelConfig
from ladder.config.quantization import read_quantization
from ladder.config.rope import Rope
from ladder.errors import LadderError

# our field -> config.json's key; a family's `keys` replace them
KEYS = {"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads", "head_dim": "head_dim"}
KEYS |= {"kv_heads": "num_key_value_heads", "ffn": "intermediate_size", "vocab": "vocab_size"}
KEYS |= {"context": "max_position_embeddings", "norm_eps": "rms_norm_eps", "activation": "hidden_act"}
OPTIONAL = {"attention_scale": None, "query_scalar": None, "attention_softcap": None, "logit_softcap": None}
SCALES = {**OPTIONAL, "embed_scale": 1.0, "residual_scale": 1.0, "logit_divisor": 1.0}


def read_directory(directory: Path) -> ModelConfig:
    """Read config.json; end-of-text ids come from generation_config.json where there is one."""
    check_model_named(directory, hub=False)
    raw = read_config(directory)
    generation = directory / "generation_config.json"
    if generation.exists() and (eos := read_json(generation).get("eos_token_id")) is not None:
        raw["eos_token_id"] = eos
    try:
        return from_hf(raw)
    except LadderError as error:
        raise LadderError(f"{directory / 'config.json'}: {error}") from None
    except (TypeError, ValueError, AttributeError, OverflowError, LookupError, ArithmeticError) as error:
        # a list where a number belongs, and the like
        raise LadderError(f"{directory / 'config.json'}: a value has the wrong type ({error})") from None


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """A config.json's content, ours or a plain one."""
    raw = unlocked(raw)
    name = raw.get("model_type")
    if name not in FAMILIES:
        raise LadderError(f"unknown model family {name!r}: known are {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    given = {key: value for key, value in raw.items() if value is not None}
    raw = {**family.defaults, **raw} if family.windows != "none" else {**family.defaults, **given}
    keys = {**KEYS, **family.keys}
    for key, wanted in family.requires.items():
        if raw.get(key) not in (None, wanted):
            raise LadderError(f"{key} {raw[key]!r} is not supported: only {wanted!r} is")
    if raw.get("staleness") not in (None, 1):
        raise LadderError("its adaptation is not finished: the layers' staleness is not 1 yet")
    layers, heads = whole_number(raw, keys["layers"]), whole_number(raw, keys["heads"])
    if layers > LARGEST["layers"]:
        raise LadderError(f"{keys['layers']} is {layers}, more than {LARGEST['layers']}")
    hidden, context = whole_number(raw, keys["hidden"]), whole_number(raw, keys["context"])
    parallel, variant, kv_heads = family.parallel, "", whole_number(raw, keys["kv_heads"], heads)
    if "parallel" in keys:
        parallel = bool(raw[keys["parallel"]])
    if name == "falcon":
        parallel, variant, kv_heads = _falcon(raw, heads)
    windows = _windows(raw, family, layers)
    rope, local_rope = _ropes(raw, family, context)
    if rope.kind == "longrope":  # the other factors, beyond the original context, would need all keys rotated anew
        context = min(context, rope.original_context)
    attention_bias = bool(raw.get("attention_bias", raw.get("bias", False)))
    mlp_bias = bool(raw.get("mlp_bias", raw.get("bias", False)))
    return ModelConfig(
        family=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn=whole_number(raw, keys["ffn"], 4 * hidden) if not family.gated else whole_number(raw, keys["ffn"]),
        vocab=whole_number(raw, "vocab_size"),
        head_dim=whole_number(raw, "head_dim", 0) if family.gated else 0,
        context=context,
        norm_eps=float(raw.get(keys["norm_eps"], 1e-6)),
        rope=rope,
        local_rope=local_rope,
        no_rope=_no_rope(raw, layers),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
        windows=windows,
        activation=str(raw.get(keys["activation"]) or family.activation),
        experts=_experts(raw, family, keys, layers),
        parallel=parallel,
        variant=variant,
        shared_norm=shared_norm_of(raw),
        **{ours: _number(raw, keys[ours], usual) for ours, usual in SCALES.items() if ours in keys},  # type: ignore[arg-type]
        bos=raw.get("bos_token_id"),
        eos=token_ids(raw.get("eos_token_id")),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        weights=read_quantization(raw),
        wiring=wiring_of(raw, layers),
        ranks=ranks_of(raw),
    )


def _number(raw: Mapping[str, Any], key: str, usual: float | None) -> float | None:
    value = raw.get(key)
    return usual if value is None else float(value)


def _falcon(raw: Mapping[str, Any], heads: int) -> tuple[bool, str, int]:
    """Parallel or not, the variant of the names, and the key/value heads."""
    parallel, new = bool(raw.get("parallel_attn")), bool(raw.get("new_decoder_architecture"))
    if new:
        norms = raw.get("num_ln_in_parallel_attn") or 2
        if not parallel:
            raise LadderError("a new Falcon decoder without parallel attention is not supported")
        if norms not in (1, 2):
            raise LadderError(f"num_ln_in_parallel_attn {norms!r} is not supported: only 1 and 2 are")
        return True, "two" if norms == 2 else "shared", whole_number(raw, "num_kv_heads", heads)
    kv_heads = 1 if raw.get("multi_query") else whole_number(raw, "num_kv_heads", heads)
    return parallel, "shared" if parallel else "sequential", kv_heads


def _ropes(raw: Mapping[str, Any], family: Family, context: int) -> tuple[Rope, Rope | None]:
    keys = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    own: dict[str, Any] = {"rope_theta": raw.get("rotary_emb_base", raw.get("rope_theta", Rope.theta))}
    own["partial_rotary_factor"] = raw.get("partial_rotary_factor", raw.get("rotary_pct", 1.0))
    if not family.partial_rotary:  # transformers does not look at it either
        own.pop("partial_rotary_factor")
        keys.pop("partial_rotary_factor", None)
    if "original_max_position_embeddings" in raw:
        own["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    if "rope_local_base_freq" not in raw:
        return Rope.from_hf({**own, **keys}, context), None
    if "full_attention" not in keys and "sliding_attention" not in keys:  # before transformers 5
        keys = {"full_attention": keys}
    local = {**own, "rope_theta": raw["rope_local_base_freq"], **(keys.get("sliding_attention") or {})}
    return Rope.from_hf({**own, **(keys.get("full_attention") or {})}, context), Rope.from_hf(local, context)


def _no_rope(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    interval = raw.get("no_rope_layer_interval")
    if interval is None:
        return ()
    has = raw.get("no_rope_layers") or [int((layer + 1) % int(interval) != 0) for layer in range(layers)]
    return tuple(layer for layer in range(layers) if not has[layer])


def _experts(raw: Mapping[str, Any], family: Family, keys: Mapping[str, str], layers: int) -> Experts | None:
    if "experts" not in keys:
        return None
    sparse = raw.get("decoder_sparse_step", 1)
    only = raw.get("mlp_only_layers") or ()
    return Experts(
        count=whole_number(raw, "num_local_experts", whole_number(raw, keys["experts"])),
        top_k=whole_number(raw, "num_experts_per_tok"),
        ffn=whole_number(raw, keys["expert_ffn"]),
        normalize=bool(raw.get("norm_topk_prob")) if family.normalize_experts is None else family.normalize_experts,
        dense_layers=tuple(n for n in range(layers) if n in only or (n + 1) % int(sparse)),
    )


def _windows(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if window is None or family.windows == "none":
        return ()
    pattern = raw.get("sliding_window_pattern")
    if pattern is None and not raw.get("use_sliding_window", family.windows == "all"):
        return ()
    if family.windows == "all":
        return (int(window),) * layers
    if types := raw.get("layer_types"):
        return tuple(int(window) if kind == "sliding_attention" else None for kind in types)
    if pattern is not None:
        return tuple(int(window) if (layer + 1) % int(pattern) else None for layer in range(layers))
    if "no_rope_layer_interval" in raw:
        return tuple(int(window) if layer in _no_rope(raw, layers) else None for layer in range(layers))
    first = int(raw["max_window_layers"])
    return tuple(int(window) if layer >= first else None for layer in range(layers))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json's content: plain for the standard wiring, else one that only software with wirings reads."""
    family = config.family_row
    keys = {**KEYS, **family.keys}
    raw: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "bos_token_id": config.bos,
        "dtype": config.dtype,
        "pad_token_id": None,  # a tokenizer's business; classes have defaults that no small vocabulary has
        "eos_token_id": (list(config.eos) if len(config.eos) != 1 else config.eos[0]) if config.eos else None,
        "rope_parameters": config.rope.to_hf(),
        "tie_word_embeddings": config.tied,
    }
    raw |= {keys[ours]: getattr(config, ours) for ours in KEYS if ours not in ("kv_heads", "head_dim")}
    raw |= {keys[ours]: getattr(config, ours) for ours in SCALES if ours in keys}
    if config.query_scalar is not None and config.query_scalar.is_integer():
        raw[keys["query_scalar"]] = int(config.query_scalar)  # nothing else is taken
    if "rotary_pct" in family.defaults:
        raw["rope_parameters"]["partial_rotary_factor"] = config.rope.share
    if family.gated:
        raw |= {"head_dim": config.head_dim, "num_key_value_heads": config.kv_heads}
    if config.local_rope is not None:
        local = config.local_rope.to_hf()
        raw["rope_parameters"] = {"full_attention": config.rope.to_hf(), "sliding_attention": local}
    if "parallel" in keys:
        raw[keys["parallel"]] = config.parallel
    if config.names.positions is not None:
        del raw["rope_parameters"]
    if config.family == "falcon":
        raw |= _falcon_keys(config)
    elif family.qkv_bias is None:
        raw["attention_bias"] = config.qkv_bias
    if family.mlp_bias is None and config.family != "falcon":
        raw["mlp_bias"] = config.mlp_bias
    if "no_rope_layer_interval" in family.defaults:
        raw["no_rope_layers"] = [int(layer not in config.no_rope) for layer in range(config.layers)]
    if config.experts is not None:
        raw |= {keys["experts"]: config.experts.count, "num_experts_per_tok": config.experts.top_k}
        raw[keys["expert_ffn"]] = config.experts.ffn
        if family.normalize_experts is None:
            raw |= {"norm_topk_prob": config.experts.normalize, "decoder_sparse_step": 1}
            raw["mlp_only_layers"] = list(config.experts.dense_layers)
    if family.windows != "none":
        raw["sliding_window"] = next((window for window in config.windows if window is not None), None)
    if family.windows == "listed":
        raw["use_sliding_window"] = raw["sliding_window"] is not None
        raw["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    elif "num_experts" in raw:
        raw["use_sliding_window"] = raw["sliding_window"] is not None
    if config.rope.kind == "longrope":
        raw["original_max_position_embeddings"] = config.rope.original_context
        raw["max_position_embeddings"] = int(config.rope.original_context * config.rope.factor)
    if config.shared_norm:
        raw["shared_norm"] = True
    if config.shared_norm or not config.wiring.is_standard:
        raw = locked({**raw, "wiring": str(config.wiring)})
        if config.ranks > 1:
            raw["wiring_ranks"] = config.ranks
    if from_hf(raw) != config:  # say, a sliding window in a family that has none
        raise LadderError(f"no {config.family} config.json can say what this configuration says")
    return raw


def _falcon_keys(config: ModelConfig) -> dict[str, Any]:
    new = config.variant == "two" or (config.variant == "shared" and config.kv_heads not in (1, config.heads))
    keys = {"bias": config.qkv_bias, "parallel_attn": config.parallel, "new_decoder_architecture": new}
    norms = {"num_ln_in_parallel_attn": 2 if config.variant == "two" else 1} if new else {}
    return {**keys, **norms, "num_kv_heads": config.kv_heads, "multi_query": config.kv_heads == 1, "alibi": False}
