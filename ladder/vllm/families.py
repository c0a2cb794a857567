"""The families that vLLM serves wired: which of its models have the layers, and how a layer's parts are called there.

A family is a row of the table. No vLLM here.
"""

from dataclasses import dataclass

from ladder.config.lock import names_wiring, own_model_type
from ladder.errors import LadderError


@dataclass(frozen=True)
class Parts:
    """The attributes of a layer of vLLM's. An empty name: there is none."""

    attention: str = "self_attn"
    mlp: str = "mlp"
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = ""  # after the sub-block, before its output joins the stream
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = ""


@dataclass(frozen=True)
class VllmFamily:
    """vLLM's name of the architecture, ours, and a layer's parts."""

    architecture: str
    parts: Parts = Parts()

    @property
    def wired(self) -> str:
        """The name of ours: vLLM without the plugin has no such model."""
        return f"Ladder{self.architecture}"


_BOTH_NORMS = Parts(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)

VLLM_FAMILIES: dict[str, VllmFamily] = {
    "llama": VllmFamily("LlamaForCausalLM"),
    "mistral": VllmFamily("MistralForCausalLM"),
    "qwen2": VllmFamily("Qwen2ForCausalLM"),
    "qwen3": VllmFamily("Qwen3ForCausalLM"),
    "mixtral": VllmFamily("MixtralForCausalLM", Parts(mlp="block_sparse_moe")),
    "qwen3_moe": VllmFamily("Qwen3MoeForCausalLM"),
    "gemma2": VllmFamily("Gemma2ForCausalLM", _BOTH_NORMS),
    "gemma3_text": VllmFamily("Gemma3ForCausalLM", _BOTH_NORMS),
}


def vllm_family(model_type: str | None) -> VllmFamily:
    """A family's row, or a refusal."""
    if model_type not in VLLM_FAMILIES:
        known = ", ".join(VLLM_FAMILIES)
        raise LadderError(f"wired {model_type} models are not served on vLLM: known are {known}")
    return VLLM_FAMILIES[model_type]


def vllm_family_of(raw: dict[str, object]) -> VllmFamily | None:
    """The row for a config.json; None for one that names no wiring, which vLLM serves by itself."""
    return vllm_family(own_model_type(raw)) if names_wiring(raw) else None
