"""Vision models, and models of two towers: one for images, one for text."""

from typing import Any

from ladder.hf.layouts.layout import Branch, LayerLayout

_QKV, _WIDENED = ("q_proj.weight", "k_proj.weight", "v_proj.weight"), ("fc1.weight",)
_TOWERS = ("text_config", "vision_config")


def _contrastive(layer_class: str, configs: tuple[str, ...] = ("",)) -> LayerLayout:
    return LayerLayout(
        Branch("self_attn", before=("layer_norm1",), out="out_proj", reads=_QKV),
        Branch("mlp", before=("layer_norm2",), out="fc2", reads=_WIDENED),
        layer_class=layer_class,
        configs=configs,
    )


def _dinov2_width(config: Any) -> int:
    width = int(config.hidden_size * config.mlp_ratio)
    return (int(width * 2 / 3) + 7) // 8 * 8 if config.use_swiglu_ffn else width


_CLIP, _SIGLIP = _contrastive("CLIPEncoderLayer"), _contrastive("SiglipEncoderLayer")

VISION: dict[str, tuple[LayerLayout, ...]] = {
    "vit": (
        LayerLayout(
            Branch("attention", before=("layernorm_before",), after=("dropout",), out="o_proj", reads=_QKV),
            Branch("mlp", before=("layernorm_after",), after=("dropout",), out="fc2", reads=_WIDENED),
            layer_class="ViTLayer",
        ),
    ),
    "dinov2": (
        LayerLayout(  # what scales a branch, and what leaves it out by chance, belongs to the branch
            Branch(
                "attention",
                before=("norm1",),
                after=("layer_scale1", "drop_path"),
                out="output.dense",
                gain="layer_scale1.lambda1",
                reads=("attention.query.weight", "attention.key.weight", "attention.value.weight"),
            ),
            Branch(
                "mlp",
                before=("norm2",),
                after=("layer_scale2", "drop_path"),
                out="fc2",
                also="weights_out",
                gain="layer_scale2.lambda1",
                reads=(*_WIDENED, "weights_in.weight"),
            ),
            layer_class="Dinov2Layer",
            width=_dinov2_width,
        ),
    ),
    "siglip": (_contrastive("SiglipEncoderLayer", _TOWERS),),
    "siglip_text_model": (_SIGLIP,),
    "siglip_vision_model": (_SIGLIP,),
    "clip": (_contrastive("CLIPEncoderLayer", _TOWERS),),
    "clip_text_model": (_CLIP,),
    "clip_vision_model": (_CLIP,),
}
