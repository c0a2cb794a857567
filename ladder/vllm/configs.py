"""config.json of a wired model as vLLM reads it: the family's config, with an architecture that only the plugin has.

Their classes are ours: transformers has no model for them, so whatever would make the family's standard model of such a
config (vLLM's transformers backend among them) is refused.
"""

from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from ladder.config.lock import PAPER_MODEL_TYPE, WIRED_MODEL_TYPE, own_model_type, unlocked
from ladder.vllm.families import vllm_family

_OURS = ("wiring", "ladder_layers", "shared_norm", "wiring_ranks", "staleness")


class LadderLlamaConfig(LlamaConfig):
    pass


class LadderMistralConfig(MistralConfig):
    pass


class LadderQwen2Config(Qwen2Config):
    pass


class LadderQwen3Config(Qwen3Config):
    pass


class LadderMixtralConfig(MixtralConfig):
    pass


class LadderQwen3MoeConfig(Qwen3MoeConfig):
    pass


class LadderGemma2Config(Gemma2Config):
    pass


class LadderGemma3TextConfig(Gemma3TextConfig):
    pass


CLASSES: dict[str, type[PreTrainedConfig]] = {
    "llama": LadderLlamaConfig,
    "mistral": LadderMistralConfig,
    "qwen2": LadderQwen2Config,
    "qwen3": LadderQwen3Config,
    "mixtral": LadderMixtralConfig,
    "qwen3_moe": LadderQwen3MoeConfig,
    "gemma2": LadderGemma2Config,
    "gemma3_text": LadderGemma3TextConfig,
}


class LadderConfig(PreTrainedConfig):
    """What is found for the model_type `ladder`: it makes the config of the family that the file names."""

    model_type = WIRED_MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        family = vllm_family(own_model_type(config_dict))
        raw = unlocked(config_dict)
        plain = {key: value for key, value in raw.items() if key not in _OURS}
        made = CLASSES[str(raw["model_type"])].from_dict({**plain, "architectures": [family.wired]}, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        for key in _OURS:
            if raw.get(key) is not None:
                setattr(config, key, raw[key])
        return made


class PaperConfig(LadderConfig):
    """The same for the model_type of the paper's authors."""

    model_type = PAPER_MODEL_TYPE
