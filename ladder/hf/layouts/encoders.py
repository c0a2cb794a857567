"""Encoders of text."""

from ladder.hf.layouts.layout import Branch, LayerLayout

ENCODERS: dict[str, tuple[LayerLayout, ...]] = {
    "modernbert": (
        LayerLayout(
            Branch("attn", before=("attn_norm",), out="Wo", reads=("Wqkv.weight",)),
            Branch("mlp", before=("mlp_norm",), out="Wo", reads=("Wi.weight",)),
            layer_class="ModernBertEncoderLayer",
        ),
    ),
    "bert": (
        LayerLayout(
            Branch(
                "attention.self",
                after=("attention.output.dense", "attention.output.dropout"),
                takes={"attention_mask": "attention_mask", "past_key_values": "past_key_values"},
                norm="attention.output.LayerNorm",
                projection="attention.output.dense",
                reads=("query.weight", "key.weight", "value.weight"),
            ),
            Branch(
                "intermediate",
                after=("output.dense", "output.dropout"),
                norm="output.LayerNorm",
                projection="output.dense",
                reads=("dense.weight",),
            ),
            layer_class="BertLayer",
            unsupported={
                "add_cross_attention": "the table has no cross-attention for it",
                "chunk_size_feed_forward": "its MLP is computed in pieces, which a wired layer does not do",
            },
        ),
    ),
}
