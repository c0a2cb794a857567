"""Where each family of transformers keeps the parts of a layer. A family is a row in the table at the end.

A sub-block's way around the stream, whatever the family:

    stream  +=  scale * after( block( before(stream) ) )
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ladder.errors import LadderError


@dataclass(frozen=True)
class Branch:
    """One sub-block: names of the layer's children."""

    block: str
    before: tuple[str, ...] = ()  # the norm that it reads through: the first of these that the layer has; none: none
    after: tuple[str, ...] = ()  # what its output goes through, in order: norms, dropouts
    dropout: Callable[[Any], float] | None = None  # by the config: a dropout that is no child
    # the block's child that projects back to the stream's width, where what follows it treats every term of a sum alike
    # (a norm does not)
    out: str | None = None
    divided: bool = True  # emulated ranks can have shares of it: the n-th part of its inputs is the n-th rank's
    # the block's parameters that the stream goes into first; those of them that it has
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """A layer of one model_type."""

    attention: Branch
    mlp: Branch
    layers: str = "layers"  # the base model's list of them
    scale: str | None = None  # the layer's attribute that multiplies both branches
    adds: bool = False  # its sub-blocks want the residual as their second argument, and add it themselves
    answers: bool = False  # the layer returns (stream, attention weights) and not the stream alone
    parallel: Callable[[Any], bool] = lambda config: False  # whether it was born parallel: what `standard` means then
    refuses: dict[str, str] = field(default_factory=dict)  # settings of the config that leave no residual stream

    @property
    def shareable(self) -> bool:
        """Whether emulated ranks can have shares of its sub-blocks."""
        return all(branch.out is not None and branch.divided for branch in (self.attention, self.mlp))


def family(model_type: str) -> Family:
    """The row of a model_type."""
    if model_type not in FAMILIES:
        raise LadderError(
            f"unknown model family {model_type!r}: known are {', '.join(FAMILIES)}; a new one needs a row in "
            "ladder/hf/families.py that names a layer's attention, MLP and norms"
        )
    return FAMILIES[model_type]


_QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
_GATED = ("gate_proj.weight", "up_proj.weight")
_PRE_NORM = Family(
    Branch("self_attn", before=("input_layernorm",), out="o_proj", reads=_QKV),
    Branch("mlp", before=("post_attention_layernorm",), out="down_proj", reads=_GATED),
)
_EXPERTS = Family(  # some of its layers may have none
    _PRE_NORM.attention,
    Branch("mlp", before=("post_attention_layernorm",), reads=("gate.weight", "experts.gate_up_proj", *_GATED)),
)
_NORMS_ON_BOTH_SIDES = Family(
    Branch("self_attn", before=("input_layernorm",), after=("post_attention_layernorm",), reads=_QKV),
    Branch("mlp", before=("pre_feedforward_layernorm",), after=("post_feedforward_layernorm",), reads=_GATED),
)
_FUSED, _WIDENED = ("query_key_value.weight",), ("dense_h_to_4h.weight",)


def _falcon_is_parallel(config: Any) -> bool:
    return bool(config.new_decoder_architecture or config.parallel_attn)


FAMILIES: dict[str, Family] = {
    "llama": _PRE_NORM,
    "mistral": _PRE_NORM,
    "qwen2": _PRE_NORM,
    "qwen3": _PRE_NORM,
    "smollm3": _PRE_NORM,
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "phi3": Family(
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
    "granite": Family(_PRE_NORM.attention, _PRE_NORM.mlp, scale="residual_multiplier"),
    "olmo2": Family(
        Branch("self_attn", after=("post_attention_layernorm",), reads=_QKV),
        Branch("mlp", after=("post_feedforward_layernorm",), reads=_GATED),
    ),
    "gemma2": _NORMS_ON_BOTH_SIDES,
    "gemma3_text": _NORMS_ON_BOTH_SIDES,
    "gpt2": Family(
        Branch("attn", before=("ln_1",), out="c_proj", divided=False, reads=("c_attn.weight",)),
        Branch("mlp", before=("ln_2",), out="c_proj", divided=False, reads=("c_fc.weight",)),
        layers="h",
        refuses={"add_cross_attention": "a layer with cross-attention has three sub-blocks"},
    ),
    "gpt_neox": Family(
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
        parallel=lambda config: bool(config.use_parallel_residual),
    ),
    "falcon": Family(
        Branch(
            "self_attention",
            before=("ln_attn", "input_layernorm"),
            dropout=lambda c: float(c.hidden_dropout if _falcon_is_parallel(c) else c.attention_dropout),
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
        answers=True,
        parallel=_falcon_is_parallel,
    ),
    "bloom": Family(
        Branch("self_attention", before=("input_layernorm",), out="dense", divided=False, reads=_FUSED),
        Branch("mlp", before=("post_attention_layernorm",), out="dense_4h_to_h", divided=False, reads=_WIDENED),
        layers="h",
        adds=True,
        answers=True,
        refuses={"apply_residual_connection_post_layernorm": "what its layers hand on is normalized, not a stream"},
    ),
}
