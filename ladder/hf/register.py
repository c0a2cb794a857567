"""Wired models in transformers: their config, and the classes that AutoModel makes from it.

In memory a wired config is its family's with one field more (`wiring`), and its model_type is the family's, such as
`llama`. In config.json the model_type is `ladder`, and without this package nothing loads it.
"""

import json
from functools import cache, wraps
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from ladder.config.lock import WIRED_MODEL_TYPE, locked, ranks_of, shared_norm_of, unlocked, wiring_of
from ladder.hf.families import LAYOUTS, layout_of
from ladder.hf.wire import wire_layers
from ladder.wiring import Wiring

AUTO = (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForQuestionAnswering,
)


class WiredConfig(PreTrainedConfig):
    """A mixin before a family's config class: plain in memory, locked in config.json."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return super().from_dict(unlocked(config_dict), **kwargs)

    @classmethod
    def own_class(cls) -> Any:
        """The family's."""
        return cls.__mro__[cls.__mro__.index(WiredConfig) + 1]

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.own_class(), vars(self))  # the class is made in the process that loads it

    def to_json_string(self, use_diff: bool = True) -> str:
        plain = {"vocab_size": self.vocab_size, **json.loads(super().to_json_string(use_diff))}
        return json.dumps(locked({**plain, "model_type": self.model_type}), indent=2, sort_keys=True) + "\n"


class LadderConfig(PreTrainedConfig):
    """What `AutoConfig` finds for the model_type `ladder`: it makes the config of the family that the file names."""

    model_type = WIRED_MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        model_type = unlocked(config_dict)["model_type"]
        layout_of(model_type)
        own: Any = CONFIG_MAPPING[model_type]
        return wired_config(own).from_dict(config_dict, **kwargs)


@cache
def wired_config(own: Any) -> Any:
    """A family's config class made wired, and registered with the Auto classes."""
    wired = type(f"Ladder{own.__name__}", (WiredConfig, own), {"__module__": __name__})
    for auto in AUTO:
        if own in auto._model_mapping:
            model: Any = auto._model_mapping[own]
            # transformers renames old weights only for classes in its own modules
            space = {"__module__": model.__module__, "__qualname__": model.__qualname__, "config_class": wired}
            auto.register(wired, type(model.__name__, (model,), space))
    return wired


def _restored(own: Any, values: dict[str, Any]) -> Any:
    config = object.__new__(wired_config(own))
    vars(config).update(values)
    return config


def set_wiring(config: Any, wiring: Wiring, staleness: float | list[float], ranks: int = 1) -> None:
    """Write a wiring into a model's config; the standard one leaves a plain config, unless layers have one norm."""
    own: Any = config.own_class() if isinstance(config, WiredConfig) else type(config)
    for key in ("wiring", "ladder_layers", "staleness", "wiring_ranks"):
        vars(config).pop(key, None)
    config.__class__ = own
    if not wiring.is_standard or shared_norm_of(vars(config)):
        config.__class__ = wired_config(own)
        config.wiring = str(wiring)
        if staleness != 1.0:
            config.staleness = staleness
        if ranks > 1:
            config.wiring_ranks = ranks


def register() -> None:
    """Register the model_type of config.json, and have every model whose config names a wiring wired when it is made.

    The second has no public way. transformers registers classes for the Auto classes alone, while a config that names
    a wiring may reach any class by any way: `LlamaForCausalLM(config)`, a task's head, the paper's `ladder_layers` in a
    plain Llama config.json. All of them end in `PreTrainedModel.post_init`, and without this the model would silently
    be a standard one. A model whose config names no wiring is left alone.
    """
    AutoConfig.register(WIRED_MODEL_TYPE, LadderConfig, exist_ok=True)
    own = PreTrainedModel.post_init
    if getattr(own, "wires", False):
        return

    @wraps(own)
    def post_init(model: Any) -> None:
        own(model)
        wire_as_configured(model)

    post_init.wires = True  # type: ignore[attr-defined]
    PreTrainedModel.post_init = post_init


def wire_as_configured(model: Any) -> None:
    """Wire a model that has just been made, if its config names a wiring: ours, or the paper's `ladder_layers`."""
    config = model.config
    named = vars(config)
    if named.get("wiring") is None and named.get("ladder_layers") is None and not shared_norm_of(named):
        return
    if config.model_type in LAYOUTS and hasattr(model.base_model, LAYOUTS[config.model_type].layers):
        wiring, staleness = wiring_of(named, config.num_hidden_layers), named.get("staleness", 1.0)
        ranks = ranks_of(named)
        wire_layers(model, wiring, staleness, ranks)
        set_wiring(config, wiring, staleness, ranks)
