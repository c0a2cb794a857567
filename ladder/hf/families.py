"""Where each family of transformers keeps the parts of a layer. A decoder is a row in the table at the end; others are
rows in ladder/hf/layouts/.
"""

from typing import Any

from ladder.config.lock import born_parallel
from ladder.errors import LadderError
from ladder.hf.layouts import NOT_DECODERS
from ladder.hf.layouts.layout import Branch, LayerLayout


def is_parallel(config: Any) -> bool:
    """Whether the layers of a transformers config were parallel before any wiring."""
    return born_parallel({**vars(config), "model_type": config.model_type})


def _falcon_dropout(config: Any) -> float:
    return float(config.hidden_dropout if is_parallel(config) else config.attention_dropout)


def _falcon_mlp_dropout(config: Any) -> float:
    return float(config.hidden_dropout)


def known_families() -> list[str]:
    """The model_types that can be wired."""
    return [*LAYOUTS, *NOT_DECODERS]


def layout_of(model_type: str) -> LayerLayout:
    """The row of a model_type; the first where a model has several stacks."""
    return layouts_of(model_type)[0]


def layouts_of(model_type: str) -> tuple[LayerLayout, ...]:
    """The rows of a model_type: one, or one for each kind of stack."""
    if model_type in LAYOUTS:
        return (LAYOUTS[model_type],)
    if model_type not in NOT_DECODERS:
        raise LadderError(
            f"unknown model family {model_type!r}: known are {', '.join(known_families())}; a new one needs a row in "
            "ladder/hf/families.py that names a layer's attention, MLP and norms"
        )
    return NOT_DECODERS[model_type]


def refuse_other_than_decoders(model: str, model_type: str) -> None:
    """Refuse the families that are wired but write no text, where text is what counts."""
    if model_type in NOT_DECODERS:
        raise LadderError(
            f"{model} is no decoder of text ({model_type}): ladder convert, fit and adapt take it, and in "
            "Python ladder.hf.rewire, whose models train as any other"
        )


_QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
_GATED = ("gate_proj.weight", "up_proj.weight")
_PRE_NORM = LayerLayout(
    Branch("self_attn", before=("input_layernorm",), out="o_proj", reads=_QKV),
    Branch("mlp", before=("post_attention_layernorm",), out="down_proj", reads=_GATED),
)
_EXPERTS = LayerLayout(  # some of its layers may have none
    _PRE_NORM.attention,
    Branch("mlp", before=("post_attention_layernorm",), reads=("gate.weight", "experts.gate_up_proj", *_GATED)),
)
_NORMS_ON_BOTH_SIDES = LayerLayout(
    Branch("self_attn", before=("input_layernorm",), after=("post_attention_layernorm",), reads=_QKV),
    Branch("mlp", before=("pre_feedforward_layernorm",), after=("post_feedforward_layernorm",), reads=_GATED),
)
_FUSED, _WIDENED = ("query_key_value.weight",), ("dense_h_to_4h.weight",)


LAYOUTS: dict[str, LayerLayout] = {
    "llama": _PRE_NORM,
    "mistral": _PRE_NORM,
    "qwen2": _PRE_NORM,
    "qwen3": _PRE_NORM,
    "smollm3": _PRE_NORM,
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "phi3": LayerLayout(
        Branch(
            "self_attn",
            before=("input_layernorm",),
            after=("resid_attn_dropout",),
            out="o_proj",
            reads=("qkv_proj.weight",),
        ),
        Branch(
            "mlp",
            before=("post_attention_layernorm",),
            after=("resid_mlp_dropout",),
            out="down_proj",
            reads=("gate_up_proj.weight",),
        ),
    ),
    "granite": LayerLayout(_PRE_NORM.attention, _PRE_NORM.mlp, scale="residual_multiplier"),
    "olmo2": LayerLayout(
        Branch("self_attn", after=("post_attention_layernorm",), reads=_QKV),
        Branch("mlp", after=("post_feedforward_layernorm",), reads=_GATED),
    ),
    "gemma2": _NORMS_ON_BOTH_SIDES,
    "gemma3_text": _NORMS_ON_BOTH_SIDES,
    "gpt2": LayerLayout(
        Branch("attn", before=("ln_1",), out="c_proj", divided=False, reads=("c_attn.weight",)),
        Branch("mlp", before=("ln_2",), out="c_proj", divided=False, reads=("c_fc.weight",)),
        layers="h",
        unsupported={"add_cross_attention": "a layer with cross-attention has three sub-blocks"},
    ),
    "gpt_neox": LayerLayout(
        Branch(
            "attention",
            before=("input_layernorm",),
            after=("post_attention_dropout",),
            out="dense",
            divided=False,
            reads=_FUSED,
        ),
        Branch(
            "mlp",
            before=("post_attention_layernorm",),
            after=("post_mlp_dropout",),
            out="dense_4h_to_h",
            divided=False,
            reads=_WIDENED,
        ),
    ),
    "falcon": LayerLayout(
        Branch(
            "self_attention",
            before=("ln_attn", "input_layernorm"),
            dropout=_falcon_dropout,
            out="dense",
            divided=False,
            reads=_FUSED,
        ),
        Branch(
            "mlp",
            before=("ln_mlp", "post_attention_layernorm", "input_layernorm"),
            dropout=_falcon_mlp_dropout,
            out="dense_4h_to_h",
            divided=False,
            reads=_WIDENED,
        ),
        layers="h",
        returns=((0, 1),),
    ),
    "bloom": LayerLayout(
        Branch("self_attention", before=("input_layernorm",), out="dense", divided=False, reads=_FUSED),
        Branch("mlp", before=("post_attention_layernorm",), out="dense_4h_to_h", divided=False, reads=_WIDENED),
        layers="h",
        adds_residual=True,
        returns=((0, 1),),
        unsupported={"apply_residual_connection_post_layernorm": "what its layers hand on is normalized, not a stream"},
    ),
}
