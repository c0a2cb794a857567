"""The plugin: what vLLM calls in each of its processes, through the entry point `vllm.general_plugins`.

It adds our model_types and architectures to vLLM's tables, and imports a model's code only when vLLM asks for it.
"""

from ladder.config.lock import PAPER_MODEL_TYPE, WIRED_MODEL_TYPE
from ladder.vllm.configs import LadderConfig, PaperConfig
from ladder.vllm.families import VLLM_FAMILIES
from ladder.vllm.verify import VerifyWired
from ladder.vllm.versions import register_architecture, register_config

MODELS = "ladder.vllm.models"


def register() -> None:
    """May be called any number of times."""
    register_config(WIRED_MODEL_TYPE, LadderConfig)
    register_config(PAPER_MODEL_TYPE, PaperConfig)
    for family in VLLM_FAMILIES.values():
        register_architecture(family.wired, f"{MODELS}:{family.wired}", VerifyWired)
