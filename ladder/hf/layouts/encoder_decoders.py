"""Models with an encoder and a decoder. A decoder's layer has three sub-blocks: the second attends to the encoder."""

from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ladder.hf.layouts.layout import Branch, LayerLayout


def _whisper_mlp(layer: Any, x: Tensor) -> Tensor:
    """Its parts are children of the layer."""
    inner = F.dropout(layer.activation_fn(layer.fc1(x)), layer.activation_dropout, layer.training)
    return layer.fc2(inner)  # type: ignore[no-any-return]


def _whisper_dropout(config: Any) -> float:
    return float(config.dropout)


_QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
_CACHED = {"attention_mask": "attention_mask", "past_key_values": "past_key_values"}
_WHISPER_MLP = Branch(
    "",
    before=("final_layer_norm",),
    dropout=_whisper_dropout,
    out="fc2",
    reads=("fc1.weight",),
    compute=_whisper_mlp,
)
_WHISPER_ATTENTION = Branch(
    "self_attn",
    before=("self_attn_layer_norm",),
    dropout=_whisper_dropout,
    out="out_proj",
    reads=_QKV,
    takes=_CACHED,
)
_DROPPED = dict.fromkeys(
    ("encoder_layerdrop", "decoder_layerdrop"),
    "a layer that is left out by chance would take with it what others have not read yet",
)
_T5_ATTENTION = Branch(
    "layer.0",
    before=("layer.0.layer_norm",),
    after=("layer.0.dropout",),
    out="SelfAttention.o",
    reads=("SelfAttention.q.weight", "SelfAttention.k.weight", "SelfAttention.v.weight"),
    inner="SelfAttention",
    takes={"mask": "attention_mask", "position_bias": "position_bias", "past_key_values": "past_key_values"},
)


def _t5_mlp(place: int) -> Branch:
    return Branch(
        f"layer.{place}.DenseReluDense",
        before=(f"layer.{place}.layer_norm",),
        after=(f"layer.{place}.dropout",),
        out="wo",
        reads=("wi.weight", "wi_0.weight", "wi_1.weight"),
    )


def _encodes(block: Any) -> bool:
    return not block.is_decoder


_BIASES = ("position_bias", "encoder_decoder_position_bias")
_T5: dict[str, Any] = {
    "layer_class": "T5Block",
    "shared": _BIASES,
    "heads": "num_heads",
    "width": attrgetter("d_ff"),
}

ENCODER_DECODERS: dict[str, tuple[LayerLayout, ...]] = {
    "whisper": (
        LayerLayout(
            _WHISPER_ATTENTION,
            _WHISPER_MLP,
            layer_class="WhisperEncoderLayer",
            unsupported=_DROPPED,
            depth="encoder_layers",
            heads="encoder_attention_heads",
            width=attrgetter("encoder_ffn_dim"),
        ),
        LayerLayout(
            _WHISPER_ATTENTION,
            _WHISPER_MLP,
            Branch(
                "encoder_attn",
                before=("encoder_attn_layer_norm",),
                dropout=_whisper_dropout,
                out="out_proj",
                reads=("q_proj.weight",),
                takes={
                    "key_value_states": "encoder_hidden_states",
                    "attention_mask": "encoder_attention_mask",
                    "past_key_values": "past_key_values",
                },
                needs="encoder_hidden_states",
            ),
            layer_class="WhisperDecoderLayer",
            unsupported=_DROPPED,
            differentiable=("encoder_hidden_states",),
            depth="decoder_layers",
            heads="decoder_attention_heads",
            width=attrgetter("decoder_ffn_dim"),
        ),
    ),
    "t5": (
        LayerLayout(
            _T5_ATTENTION,
            _t5_mlp(1),
            chosen=_encodes,
            returns=((0, 1), None),
            differentiable=("position_bias",),
            depth="num_layers",
            **_T5,
        ),
        LayerLayout(
            _T5_ATTENTION,
            _t5_mlp(2),
            Branch(
                "layer.1",
                before=("layer.1.layer_norm",),
                after=("layer.1.dropout",),
                out="EncDecAttention.o",
                reads=("EncDecAttention.q.weight",),
                inner="EncDecAttention",
                takes={
                    "mask": "encoder_attention_mask",
                    "key_value_states": "encoder_hidden_states",
                    "position_bias": "encoder_decoder_position_bias",
                    "past_key_values": "past_key_values",
                },
                needs="encoder_hidden_states",
            ),
            chosen=attrgetter("is_decoder"),
            returns=((0, 1), (1, 1)),
            differentiable=("encoder_hidden_states", *_BIASES),
            depth="num_decoder_layers",
            **_T5,
        ),
    ),
}
