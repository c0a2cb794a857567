"""Where each family of transformers keeps the parts of a layer. A family is a row in the table at the end.

What a sub-block adds to the stream, whatever the family:

    stream  +=  scale * after( block( before(stream) ) )
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ladder.config.lock import born_parallel
from ladder.errors import LadderError


@dataclass(frozen=True)
class Branch:
    """One sub-block: names of the layer's children."""

    block: str
    before: tuple[str, ...] = ()  # the norm that it reads through: the first of these that the layer has; none: none
    after: tuple[str, ...] = ()  # what its output goes through, in order: norms, dropouts
    dropout: Callable[[Any], float] | None = None  # by the config: a dropout that is no child
    out: str | None = None  # the block's output projection, where what follows it is linear (a norm is not)
    divided: bool = True  # it can be divided among emulated ranks: the n-th part of its inputs is the n-th rank's
    reads: tuple[str, ...] = ()  # the block's parameters that multiply its input; those of them that it has


@dataclass(frozen=True)
class LayerLayout:
    """The parts of a layer of one model_type."""

    attention: Branch
    mlp: Branch
    layers: str = "layers"  # the base model's list of them
    scale: str | None = None  # the layer's attribute that multiplies both branches
    adds_residual: bool = False  # its sub-blocks take the residual as their second argument, and add it themselves
    returns_weights: bool = False  # the layer returns (stream, attention weights) and not the stream alone
    unsupported: dict[str, str] = field(default_factory=dict)  # settings that leave no residual stream, and why

    @property
    def divisible(self) -> bool:
        """Whether its sub-blocks can be divided among emulated ranks."""
        return all(branch.out is not None and branch.divided for branch in (self.attention, self.mlp))


def is_parallel(config: Any) -> bool:
    """Whether the layers of a transformers config were parallel before any wiring."""
    return born_parallel({**vars(config), "model_type": config.model_type})


def layout_of(model_type: str) -> LayerLayout:
    """The row of a model_type."""
    if model_type not in LAYOUTS:
        raise LadderError(
            f"unknown model family {model_type!r}: known are {', '.join(LAYOUTS)}; a new one needs a row in "
            "ladder/hf/families.py that names a layer's attention, MLP and norms"
        )
    return LAYOUTS[model_type]


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
            dropout=lambda c: float(c.hidden_dropout if is_parallel(c) else c.attention_dropout),
            out="dense",
            divided=False,
            reads=_FUSED,
        ),
        Branch(
            "mlp",
            before=("ln_mlp", "post_attention_layernorm", "input_layernorm"),
            dropout=lambda c: float(c.hidden_dropout),
            out="dense_4h_to_h",
            divided=False,
            reads=_WIDENED,
        ),
        layers="h",
        returns_weights=True,
    ),
    "bloom": LayerLayout(
        Branch("self_attention", before=("input_layernorm",), out="dense", divided=False, reads=_FUSED),
        Branch("mlp", before=("post_attention_layernorm",), out="dense_4h_to_h", divided=False, reads=_WIDENED),
        layers="h",
        adds_residual=True,
        returns_weights=True,
        unsupported={"apply_residual_connection_post_layernorm": "what its layers hand on is normalized, not a stream"},
    ),
}
