"""Tiny models that are not decoders, and an oracle written against each family's own sub-blocks.

The oracle shares nothing with the product's rows: here are the sub-blocks as transformers' own layers spell them out,
and the wirings as recursions over the list of all streams. It runs the untouched model, and puts its own stream in
place of what the last layer of each stack returns.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CONFIG_MAPPING

from tests.tolerance import backward, forward

LAYERS = 3
FORWARD, BACKWARD = forward(2 * LAYERS, 64, 17), backward(2 * LAYERS, 64, 17)  # two stacks, one behind the other
_SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
_IMAGE = {**_SIZE, "image_size": 16, "patch_size": 4, "num_channels": 3}
_TEXT = {**_SIZE, "vocab_size": 97, "max_position_embeddings": 32, "pad_token_id": 0}
_TOWERS = {
    "text_config": {**_TEXT, "projection_dim": 24, "bos_token_id": 1, "eos_token_id": 96},
    "vision_config": {**_IMAGE, "projection_dim": 24},
}
_T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": LAYERS, "num_heads": 4, "vocab_size": 97, "pad_token_id": 0,
    "decoder_start_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

# name -> model_type, class, and what differs from the defaults
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("vit", "AutoModelForImageClassification", {**_IMAGE, "num_labels": 5}),
    "dinov2": ("dinov2", "AutoModelForImageClassification", {
        **_IMAGE, "mlp_ratio": 2, "drop_path_rate": 0.3, "num_labels": 5,
    }),
    "siglip": ("siglip", "AutoModel", {
        "text_config": {**_TEXT, "projection_size": 32}, "vision_config": _IMAGE,
    }),
    "clip": ("clip", "AutoModel", {**_TOWERS, "projection_dim": 24}),
    "clip-vision": ("clip_vision_model", "AutoModel", _IMAGE),
    "clip-text": ("clip_text_model", "AutoModel", _TOWERS["text_config"]),
    "modernbert": ("modernbert", "AutoModelForMaskedLM", {
        **_TEXT, "local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2,
    }),
    "bert": ("bert", "AutoModelForMaskedLM", _TEXT),
    "whisper": ("whisper", "AutoModelForSpeechSeq2Seq", {
        "vocab_size": 97, "d_model": 32, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "num_mel_bins": 8,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 64,
        "max_source_positions": 12, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None,
    }),
    "t5": ("t5", "AutoModelForSeq2SeqLM", _T5),
    "t5-gated": ("t5", "AutoModelForSeq2SeqLM", {**_T5, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 3}),
    "t5-encoder": ("t5", "T5EncoderModel", _T5),
}  # fmt: skip
POST_NORM = ("bert",)
TWO_STACKS = ("siglip", "clip", "whisper", "t5", "t5-gated")
THREE = ("whisper", "t5", "t5-gated")  # sub-blocks in a layer of the decoder


def build(name: str, **more: Any) -> Any:
    """A random model, not near to anything trivial: norms, biases and scales are random too."""
    model_type, auto, own = MODELS[name]
    config = CONFIG_MAPPING[model_type](**{**own, **more})
    torch.manual_seed(sum(map(ord, name)))
    cls: Any = getattr(transformers, auto)
    model = cls.from_config(config, attn_implementation="eager") if auto.startswith("Auto") else cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            around = 1.0 if parameter.dim() == 1 and float(parameter.mean()) == 1 else 0.0
            parameter.normal_(around, 0.15 if parameter.dim() > 1 else 0.3)
    return model.eval()


def inputs(name: str, rows: int = 2) -> dict[str, Tensor]:
    """What the model is called with."""
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 96, (rows, 9), generator=g)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    text, images = {"input_ids": ids, "attention_mask": mask}, torch.randn(rows, 3, 16, 16, generator=g)
    kind = MODELS[name][0]
    if kind == "whisper":
        return {"input_features": torch.randn(rows, 8, 24, generator=g), "decoder_input_ids": ids[:, :7]}
    if kind == "t5":
        return text if name == "t5-encoder" else {**text, "decoder_input_ids": ids[:, :7]}
    if kind in ("siglip", "clip"):
        return {**text, "pixel_values": images}
    if kind in ("vit", "dinov2", "clip_vision_model"):
        return {"pixel_values": images}
    return text


def result(model: Any, given: dict[str, Tensor]) -> Tensor:
    """All that comes out, in one row."""
    more = {"use_cache": False} if "decoder_input_ids" in given else {}
    out = model(**given, **more)
    names = ("logits", "logits_per_image", "text_embeds", "image_embeds", "last_hidden_state", "pooler_output")
    return torch.cat([out[name].flatten() for name in names if out.get(name) is not None])


# --- the oracle -----------------------------------------------------------------------------------------------------

Block = Callable[[Tensor], Tensor]
Call = dict[str, Any]
Norm = Callable[[Tensor], Tensor] | None


def _vit(layer: Any, call: Call) -> list[Block]:
    return [
        lambda x: layer.attention(layer.layernorm_before(x), call["attention_mask"])[0],
        lambda x: layer.mlp(layer.layernorm_after(x)),
    ]


def _dinov2(layer: Any, call: Call) -> list[Block]:
    return [
        lambda x: layer.drop_path(layer.layer_scale1(layer.attention(layer.norm1(x)))),
        lambda x: layer.drop_path(layer.layer_scale2(layer.mlp(layer.norm2(x)))),
    ]


def _clip(layer: Any, call: Call) -> list[Block]:
    more = {"is_causal": call["is_causal"]} if "is_causal" in call else {}
    return [
        lambda x: layer.self_attn(layer.layer_norm1(x), attention_mask=call["attention_mask"], **more)[0],
        lambda x: layer.mlp(layer.layer_norm2(x)),
    ]


def _modernbert(layer: Any, call: Call) -> list[Block]:
    own = {name: call[name] for name in ("attention_mask", "position_embeddings")}
    return [lambda x: layer.attn(layer.attn_norm(x), **own)[0], lambda x: layer.mlp(layer.mlp_norm(x))]


def _bert(layer: Any, call: Call) -> list[Block]:
    def attention(x: Tensor) -> Tensor:
        y: Tensor = layer.attention.output.dense(layer.attention.self(x, attention_mask=call["attention_mask"])[0])
        return y

    return [attention, lambda x: layer.output.dense(layer.intermediate(x))]


def _whisper(layer: Any, call: Call) -> list[Block]:
    def cross(x: Tensor) -> Tensor:
        states = call["encoder_hidden_states"]
        y: Tensor = layer.encoder_attn(layer.encoder_attn_layer_norm(x), key_value_states=states)[0]
        return y

    def mlp(x: Tensor) -> Tensor:
        y: Tensor = layer.fc2(F.gelu(layer.fc1(layer.final_layer_norm(x))))
        return y

    def attention(x: Tensor) -> Tensor:
        y: Tensor = layer.self_attn(layer.self_attn_layer_norm(x), attention_mask=call["attention_mask"])[0]
        return y

    return [attention, cross, mlp] if hasattr(layer, "encoder_attn") else [attention, mlp]


def _t5(block: Any, call: Call) -> list[Block]:
    first, last = block.layer[0], block.layer[-1]

    def attention(x: Tensor) -> Tensor:
        own = {"mask": call["attention_mask"], "position_bias": call["position_bias"]}
        y: Tensor = first.SelfAttention(first.layer_norm(x), **own)[0]
        return y

    def cross(x: Tensor) -> Tensor:
        own = {"mask": call["encoder_attention_mask"], "key_value_states": call["encoder_hidden_states"]}
        y: Tensor = block.layer[1].EncDecAttention(block.layer[1].layer_norm(x), **own)[0]
        return y

    def mlp(x: Tensor) -> Tensor:
        y: Tensor = last.DenseReluDense(last.layer_norm(x))
        return y

    return [attention, cross, mlp] if block.is_decoder else [attention, mlp]


_ORDER = {  # of a layer's positional arguments
    "ViTLayer": ("attention_mask",), "CLIPEncoderLayer": ("attention_mask",), "SiglipEncoderLayer": ("attention_mask",),
    "BertLayer": ("attention_mask",), "WhisperEncoderLayer": ("attention_mask",),
    "WhisperDecoderLayer": ("attention_mask", "encoder_hidden_states"),
    "T5Block": (
        "attention_mask", "position_bias", "encoder_hidden_states", "encoder_attention_mask",
        "encoder_decoder_position_bias",
    ),
    "Dinov2Layer": (), "ModernBertEncoderLayer": (),
}  # fmt: skip
_BLOCKS: dict[str, Callable[[Any, Call], list[Block]]] = {
    "ViTLayer": _vit, "Dinov2Layer": _dinov2, "CLIPEncoderLayer": _clip, "SiglipEncoderLayer": _clip,
    "ModernBertEncoderLayer": _modernbert, "BertLayer": _bert, "WhisperEncoderLayer": _whisper,
    "WhisperDecoderLayer": _whisper, "T5Block": _t5,
}  # fmt: skip


def sub_blocks(layer: Any, call: Call) -> list[tuple[Block, Norm]]:
    """What a layer adds to the stream, and the norms that stand on it."""
    norms: list[Norm] = [None] * 3
    if type(layer).__name__ == "BertLayer":
        norms = [layer.attention.output.LayerNorm, layer.output.LayerNorm]
    return list(zip(_BLOCKS[type(layer).__name__](layer, call), norms, strict=False))


def lags(wiring: str, count: int) -> list[int]:
    """Of a layer's sub-blocks: of its attentions, and of the MLP."""
    kind, *numbers = wiring.split("-")
    attention = int(numbers[0]) if numbers else int(kind == "ladder")
    mlp = int(numbers[1]) if len(numbers) > 1 else attention
    return [attention] * (count - 1) + [mlp]


def stream_of(start: Tensor, layers: list[Any], calls: list[Call], wirings: list[str]) -> Tensor:
    """The last stream: standard, ladder-A-M, or parallel-N, where a layer adds all that it has at once."""
    streams, seen = [start], 0
    for wiring, layer, call in zip(wirings, layers, calls, strict=True):
        blocks = sub_blocks(layer, call)
        behind = lags(wiring, len(blocks))
        if wiring.startswith("parallel"):
            seen = max(seen, len(streams) - 1 - behind[0])
            total = blocks[0][0](streams[seen])
            for block, _ in blocks[1:]:
                total = total + block(streams[seen])
            streams.append(streams[-1] + total)
            continue
        for (block, norm), lag in zip(blocks, behind, strict=True):
            seen = max(seen, len(streams) - 1 - lag)
            y = streams[-1] + block(streams[seen])
            streams.append(y if norm is None else norm(y))
    return streams[-1]


def lists_of_layers(model: Any) -> list[list[Any]]:
    found = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    return [layers for layers in found if type(layers[0]).__name__ in _BLOCKS]


Replacement = Callable[[Tensor, list[Any], list[Call]], Tensor]  # of the first stream, the layers, and their calls


def oracle(model: Any, wirings: list[str], given: dict[str, Tensor]) -> Tensor:
    """The outputs of an untouched model's weights under one wiring a layer, the same in each of its stacks."""
    with ExitStack() as stack:
        for layers in lists_of_layers(model):
            replaced(stack, layers, lambda start, layers, calls: stream_of(start, layers, calls, wirings))
        return result(model, given)


def replaced(stack: ExitStack, layers: list[Any], make: Replacement) -> None:
    """Until the end of `stack`, the last of a stack's layers returns what is made."""
    calls: list[Call] = []
    starts: list[Tensor] = []

    def look(layer: nn.Module, arguments: tuple[Any, ...], named: Call) -> None:
        starts.append(arguments[0])
        calls.append({**named, **dict(zip(_ORDER[type(layer).__name__], arguments[1:], strict=False))})

    def replace(layer: nn.Module, arguments: Any, output: Any) -> Any:
        stream = make(starts[0], layers, calls)
        return (stream, *output[1:]) if isinstance(output, tuple) else stream

    for layer in layers:
        stack.callback(layer.register_forward_pre_hook(look, with_kwargs=True).remove)
    stack.callback(layers[-1].register_forward_hook(replace).remove)
