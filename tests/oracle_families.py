"""What the oracle knows of each family: its habits, and where its checkpoints keep each matrix.

Written from transformers' modeling files, not from the product's table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ladder.config import ModelConfig

Linear = tuple[Tensor, Tensor | None]  # [outputs, inputs], and its bias


@dataclass(frozen=True)
class Habits:
    """What a model_type does, whatever its config.json says. The defaults are Llama's."""

    layer_norm: bool = False  # a norm subtracts the mean and has a bias
    one_plus: bool = False  # a norm multiplies by 1 + weight
    norms: tuple[str | None, str | None, str | None, str | None] = (  # before and after attention, before and after MLP
        *("input_layernorm", None),
        *("post_attention_layernorm", None),
    )
    qk_norm: str | None = None  # "head": each head by itself; "all": all heads together
    root_embedding: bool = False  # embeddings are multiplied by sqrt(hidden)


BOTH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
HABITS: dict[str, Habits] = {
    "qwen3": Habits(qk_norm="head"),
    "qwen3_moe": Habits(qk_norm="head"),
    "olmo2": Habits(norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"), qk_norm="all"),
    "gemma2": Habits(one_plus=True, norms=BOTH, root_embedding=True),
    "gemma3_text": Habits(one_plus=True, norms=BOTH, root_embedding=True, qk_norm="head"),
    "gpt_neox": Habits(layer_norm=True),
    "falcon": Habits(layer_norm=True),
    "gpt2": Habits(layer_norm=True, norms=("ln_1", None, "ln_2", None)),
}
FALCON_NORMS = {"shared": ("input_layernorm",) * 2, "two": ("ln_attn", "ln_mlp")}  # by `config.variant`
LLAMA_PLACES = {"embed": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm", "head": "lm_head"}
PLACES: dict[str, dict[str, str]] = {
    "gpt_neox": {
        **{"embed": "gpt_neox.embed_in", "layers": "gpt_neox.layers", "norm": "gpt_neox.final_layer_norm"},
        **{"head": "embed_out"},
    },
    "falcon": {"embed": "transformer.word_embeddings", "layers": "transformer.h", "norm": "transformer.ln_f"},
    "gpt2": {"embed": "transformer.wte", "layers": "transformer.h", "norm": "transformer.ln_f"},
}


@dataclass(frozen=True)
class LayerWeights:
    """One layer in the oracle's own terms: a matrix for each head, gate and up apart, [outputs, inputs]."""

    norms: list[Linear | None]  # before and after attention, before and after the MLP
    q: list[Linear]
    k: list[Linear]
    v: list[Linear]
    q_norm: Linear | None
    k_norm: Linear | None
    o: Linear
    router: Tensor | None
    experts: list[tuple[Linear | None, Linear, Linear]]  # gate, up, down; an ordinary MLP is the only one


class Checkpoint:
    """Tensors by their names in a checkpoint, in float64; each must be used."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self.habits = HABITS.get(config.family, Habits())
        self.left = set(weights)
        self.weights = {name: weight.double() for name, weight in weights.items()}
        places = {**LLAMA_PLACES, **PLACES.get(config.family, {})}
        self.embed = self.take(places["embed"])[0]
        self.positions = self.take("transformer.wpe")[0] if config.family == "gpt2" else None
        self.norm = self.take(places["norm"])
        self.head = self.embed if config.tied else self.take(places["head"])[0]
        self.layers = [self.layer(f"{places['layers']}.{number}.", number) for number in range(config.layers)]
        self.check()

    def check(self) -> None:
        assert not self.left, f"the family does not have {sorted(self.left)}"

    def take(self, name: str) -> Linear:
        self.left -= {f"{name}.weight", f"{name}.bias"}
        return self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")

    def layer(self, prefix: str, number: int) -> LayerWeights:
        config, family = self.config, self.config.family
        names = self.habits.norms
        if family == "falcon" and config.variant in FALCON_NORMS:
            attention, mlp = FALCON_NORMS[config.variant]
            names = (attention, None, mlp, None)
        if config.shared_norm:
            names = (*names[:2], names[0], names[3])
        has_qk_norm = self.habits.qk_norm is not None
        router, experts = self.mlps(prefix, number)
        q, k, v = self.heads(prefix)
        o = {"falcon": "self_attention.dense", "gpt_neox": "attention.dense", "gpt2": "attn.c_proj"}
        return LayerWeights(
            norms=[None if name is None else self.take(prefix + name) for name in names],
            q=q,
            k=k,
            v=v,
            q_norm=self.take(f"{prefix}self_attn.q_norm") if has_qk_norm else None,
            k_norm=self.take(f"{prefix}self_attn.k_norm") if has_qk_norm else None,
            o=self.upright(self.take(prefix + o.get(family, "self_attn.o_proj"))),
            router=router,
            experts=experts,
        )

    def upright(self, linear: Linear) -> Linear:
        """GPT-2 keeps its matrices as [inputs, outputs]."""
        return (linear[0].T, linear[1]) if self.config.family == "gpt2" else linear

    def heads(self, prefix: str) -> tuple[list[Linear], list[Linear], list[Linear]]:
        """Queries, keys and values, head by head."""
        config, family = self.config, self.config.family
        heads, kv_heads, group = config.heads, config.kv_heads, config.heads // config.kv_heads
        if family in ("falcon", "gpt_neox"):  # for each key/value head: the queries of its group, the key, the value
            name = "self_attention.query_key_value" if family == "falcon" else "attention.query_key_value"
            blocks = split(self.take(prefix + name), heads + 2 * kv_heads)
            groups = [blocks[first : first + group + 2] for first in range(0, len(blocks), group + 2)]
            queries = [query for one in groups for query in one[:-2]]
            return queries, [one[-2] for one in groups], [one[-1] for one in groups]
        if family in ("gpt2", "phi3"):  # all queries, all keys, all values
            name = "attn.c_attn" if family == "gpt2" else "self_attn.qkv_proj"
            blocks = split(self.upright(self.take(prefix + name)), heads + 2 * kv_heads)
            return blocks[:heads], blocks[heads : heads + kv_heads], blocks[heads + kv_heads :]
        q, k, v = (self.take(f"{prefix}self_attn.{name}_proj") for name in "qkv")
        return split(q, heads), split(k, kv_heads), split(v, kv_heads)

    def mlps(self, prefix: str, number: int) -> tuple[Tensor | None, list[tuple[Linear | None, Linear, Linear]]]:
        """The router, if there is one, and what it chooses from."""
        config, family = self.config, self.config.family
        if config.experts is not None and number not in config.experts.dense_layers:
            parent = f"{prefix}block_sparse_moe." if family == "mixtral" else f"{prefix}mlp."
            names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
            experts = [
                tuple(self.take(f"{parent}experts.{expert}.{name}") for name in names)
                for expert in range(config.experts.count)
            ]
            return self.take(f"{parent}gate")[0], experts  # type: ignore[return-value]
        if family in ("falcon", "gpt_neox"):
            return None, [(None, self.take(f"{prefix}mlp.dense_h_to_4h"), self.take(f"{prefix}mlp.dense_4h_to_h"))]
        if family == "gpt2":
            up, down = (self.upright(self.take(f"{prefix}mlp.{name}")) for name in ("c_fc", "c_proj"))
            return None, [(None, up, down)]
        down = self.take(f"{prefix}mlp.down_proj")
        if family == "phi3":
            gate, up = split(self.take(f"{prefix}mlp.gate_up_proj"), 2)
        else:
            gate, up = self.take(f"{prefix}mlp.gate_proj"), self.take(f"{prefix}mlp.up_proj")
        return None, [(gate, up, down)]


def split(linear: Linear, count: int) -> list[Linear]:
    """`count` blocks of outputs."""
    weight, bias = linear
    biases = [None] * count if bias is None else bias.chunk(count)
    return list(zip(weight.chunk(count), biases, strict=True))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_new": gelu_tanh,
}
