"""Wired models in transformers: their config, and the classes that AutoModel makes from it.

In memory a wired config is its family's with one field more (`wiring`), and its model_type is the family's, such as
`llama`. In config.json the model_type is `ladder`, and without this package nothing loads it.
"""

import json
from collections.abc import Mapping
from functools import cache, partial, wraps
from typing import Any, cast

import transformers
from transformers import (
    CONFIG_MAPPING,
    TOKENIZER_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import hub

from ladder.config.lock import (
    PAPER_MODEL_TYPE,
    TOWERS,
    WIRED_MODEL_TYPE,
    locked,
    locked_keys,
    names_wiring,
    ranks_of,
    shared_norm_of,
    unlocked,
)
from ladder.errors import LadderError
from ladder.hf.families import known_families, layouts_of
from ladder.hf.layer import WiredLayer, reduced
from ladder.hf.names import check_name, refuse_in_memory, register_adapters
from ladder.hf.stacks import as_text, named_wiring, stack_depths, stacks_of
from ladder.hf.wire import PART, row_of, wire_layers

_TASKS: tuple[str, ...] = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
_TASKS += ("ForQuestionAnswering", "ForMaskedLM", "ForMultipleChoice", "ForNextSentencePrediction")
_TASKS += ("ForSeq2SeqLM", "ForSpeechSeq2Seq", "ForAudioClassification", "ForImageClassification")
_TASKS += ("ForMaskedImageModeling",)
_WIDER = (
    "",
    "ForTextEncoding",
    "ForPreTraining",
    "ForZeroShotImageClassification",
)  # may be a model's only one


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
        plain = with_sizes(json.loads(super().to_json_string(use_diff)), self)
        return json.dumps(locked({**plain, "model_type": self.model_type}), indent=2, sort_keys=True) + "\n"


def with_sizes(raw: dict[str, Any], config: Any) -> dict[str, Any]:
    """A config.json's content with the numbers that are locked, which it may leave out where they are defaults."""
    towers = {key: {**getattr(config, key).to_dict(), "model_type": getattr(config, key).model_type} for key in TOWERS
              if isinstance(getattr(config, key, None), PreTrainedConfig)}  # fmt: skip
    return {**{key: vars(config)[key] for key in locked_keys(vars(config))}, **raw, **towers}


class LadderConfig(PreTrainedConfig):
    """What `AutoConfig` finds for the model_type `ladder`: it makes the config of the family that the file names."""

    model_type = WIRED_MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        model_type = unlocked(config_dict)["model_type"]
        layouts_of(model_type)
        own: Any = CONFIG_MAPPING[model_type]
        return wired_config(own).from_dict(config_dict, **kwargs)


class PaperConfig(LadderConfig):
    """The same for the model_type of the paper's authors."""

    model_type = PAPER_MODEL_TYPE


@cache
def wired_config(own: Any) -> Any:
    """A family's config class made wired, and registered with the Auto classes."""
    wired = type(f"Ladder{own.__name__}", (WiredConfig, own), {"__module__": __name__})
    autos = [getattr(transformers, f"AutoModel{task}") for task in (*_TASKS, *_WIDER)]
    for auto in (*autos, transformers.AutoBackbone):
        if own in auto._model_mapping:
            auto.register(wired, wired_model(auto._model_mapping[own], wired))
    if own in TOKENIZER_MAPPING and (tokenizer := TOKENIZER_MAPPING[own]) is not None:  # for those without a name
        AutoTokenizer.register(wired, tokenizer)
    return wired


@cache
def wired_model(model: Any, wired: Any) -> Any:
    """A model's class for a wired config; transformers renames old weights only for classes in its own modules."""

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        return reduced(self, partial(_wired_model, wired.own_class()), protocol)

    space = {"__module__": model.__module__, "__qualname__": model.__qualname__, "config_class": wired}
    return type(model.__name__, (model,), {**space, "__reduce_ex__": __reduce_ex__})


def _wired_model(own: Any, model: Any) -> Any:
    return wired_model(model, wired_config(own))


def auto_of(raw: Mapping[str, Any]) -> str:
    """The Auto class that loads a checkpoint, by a plain config.json: that of its architecture, else the first one."""
    own: Any = CONFIG_MAPPING[str(raw["model_type"])]
    named = next(iter(raw.get("architectures") or []), None)
    for task in (*_TASKS, *_WIDER) if named is not None else ("ForCausalLM", ""):
        auto = getattr(transformers, f"AutoModel{task}")
        if own in auto._model_mapping and named in (None, auto._model_mapping[own].__name__):
            return f"AutoModel{task}"
    return "AutoModel"


def _restored(own: Any, values: dict[str, Any]) -> Any:
    config = object.__new__(wired_config(own))
    vars(config).update(values)
    return config


def set_wiring(model: Any, wiring: str, staleness: float | list[float], ranks: int = 1) -> None:
    """Write a wiring into a model's config and those of its parts; the standard one leaves a plain config, unless
    layers have one norm.
    """
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    for config in configs.values():
        if isinstance(config, PreTrainedConfig) and config.model_type in known_families():
            whole = config is model.config or config.model_type == model.config.model_type
            _write_wiring(config, wiring, staleness if whole or isinstance(staleness, float) else 1.0, ranks)


def _write_wiring(config: Any, wiring: str, staleness: float | list[float], ranks: int) -> None:
    own: Any = config.own_class() if isinstance(config, WiredConfig) else type(config)
    for key in ("wiring", "ladder_layers", "staleness", "wiring_ranks"):
        vars(config).pop(key, None)
    config.__class__ = own
    if wiring != "standard" or shared_norm_of(vars(config)):
        config.__class__ = wired_config(own)
        config.wiring = wiring
        if staleness != 1.0:
            config.staleness = staleness
        if ranks > 1:
            config.wiring_ranks = ranks


def register() -> None:
    """Register the model_types of wired config.json files, and have every config and every model that names a wiring
    wired when it is made.

    The second has no public way. transformers registers classes for the Auto classes alone, while a path may be given
    to a class of its own (`LlamaForCausalLM.from_pretrained`; TRL and PEFT do that), and a config that names a wiring
    may reach any class by any way: `LlamaForCausalLM(config)`, a task's head, the paper's `ladder_layers` in a plain
    Llama config.json. All configs come from `get_config_dict` and `from_dict`, all models end in `post_init`. Without
    these a class could not read a wired config.json, and would silently make a standard model of the paper's. What
    names no wiring is left alone.

    What a wired model says of itself is compared with what it is once more when it is saved: layers that were wired
    behind its back, or another config, would be lost.

    Classes look for files by `cached_files` before they read a config: the name of a model that was rewired in memory
    is refused there by our sentence, where the hub's would be about the form of names.
    """
    for kind in (LadderConfig, PaperConfig):
        AutoConfig.register(kind.model_type, kind, exist_ok=True)
    own = PreTrainedModel.post_init
    if getattr(own, "wires", False):
        return
    read, made = PreTrainedConfig.get_config_dict.__func__, PreTrainedConfig.from_dict.__func__
    files, save = hub.cached_files, PreTrainedModel.save_pretrained

    @wraps(own)
    def post_init(model: Any) -> None:
        own(model)
        wire_as_configured(model)
        for part in model.modules():
            if part is not model and isinstance(part, PreTrainedModel):
                vars(part)[PART] = type(model).__name__  # the outermost comes last

    @wraps(save)
    def save_pretrained(model: Any, *arguments: Any, **options: Any) -> Any:
        check_wired_as_said(model)
        return save(model, *arguments, **options)

    @wraps(read)
    def get_config_dict(cls: Any, pretrained_model_name_or_path: Any, **options: Any) -> Any:
        refuse_in_memory(pretrained_model_name_or_path)
        found, unused = read(cls, pretrained_model_name_or_path, **options)
        return (_read_as(cls, found) if cls.model_type in known_families() else found), unused

    @wraps(made)
    def from_dict(cls: Any, config_dict: dict[str, Any], **options: Any) -> Any:
        wired = wired_class_of(cls, config_dict)
        return made(cls, config_dict, **options) if wired is None else wired.from_dict(config_dict, **options)

    @wraps(files)
    def cached_files(path_or_repo_id: Any, *arguments: Any, **options: Any) -> Any:
        refuse_in_memory(path_or_repo_id)
        return files(path_or_repo_id, *arguments, **options)

    post_init.wires = True  # type: ignore[attr-defined]
    PreTrainedModel.post_init = post_init
    PreTrainedModel.save_pretrained = cast(Any, save_pretrained)
    PreTrainedConfig.get_config_dict = classmethod(cast(Any, get_config_dict))
    PreTrainedConfig.from_dict = classmethod(cast(Any, from_dict))
    hub.cached_files = cached_files
    register_adapters()


def _read_as(own: Any, raw: dict[str, Any]) -> dict[str, Any]:
    """A config.json as a family's config class reads it, which would warn of another model_type; a tower's class is
    given its part of it, which must say how the model is wired.
    """
    plain = unlocked(raw)
    if own.model_type != plain.get("model_type") and names_wiring(raw):
        said = {key: plain[key] for key in ("wiring", "ladder_layers", "wiring_ranks") if key in plain}
        plain |= {key: {**said, **plain[key]} for key in TOWERS if isinstance(plain.get(key), dict)}
    return plain


def wired_class_of(own: Any, raw: dict[str, Any]) -> Any:
    """The wired form of a family's config class, if a config.json names a wiring; None: the class as it is."""
    if issubclass(own, WiredConfig | LadderConfig) or not own.model_type or not names_wiring(raw):
        return None
    model_type = unlocked(raw).get("model_type", own.model_type)
    if model_type not in known_families():  # a key of the same name, of a model that has nothing to do with us
        return None
    if model_type != own.model_type:
        raise LadderError(f"a wired {model_type} model is no {own.__name__}: load it as {model_type}, or by AutoModel")
    return wired_config(own)


def wire_as_configured(model: Any) -> None:
    """Wire a model that has just been made, if its config names a wiring: ours, or the paper's `ladder_layers`."""
    config = model.config
    plain_type(config)
    if config.model_type not in known_families():
        if any(isinstance(module, WiredLayer) for module in model.modules()):
            raise LadderError(refused_parts(model))
        return
    check_name(model)
    named = vars(config)
    if not names_wiring(named):
        return
    if not (stacks := stacks_of(model)):
        if not any(isinstance(module, WiredLayer) for module in model.modules()):
            raise LadderError(f"{type(model).__name__} has no layers to wire, but its config names a wiring")
        return
    staleness, ranks = named.get("staleness", 1.0), ranks_of(named)
    if isinstance(staleness, list) and len(stacks) < len(stack_depths(config)):
        staleness = 1.0  # a part of a model, which says it for all of its parts when it is complete
    wirings = named_wiring(named, [(stack.layout, len(stack.layers)) for stack in stacks])
    wire_layers(model, wiring_text := as_text(wirings, named.get("wiring")), staleness, ranks)
    set_wiring(model, wiring_text, staleness, ranks)


def check_wired_as_said(model: Any) -> None:
    """Refuse to save a model whose layers are wired otherwise than its config says, or whose config cannot say it."""
    if not isinstance(getattr(model, "config", None), PreTrainedConfig):
        return
    if model.config.model_type not in known_families():
        if any(isinstance(module, WiredLayer) for module in model.modules()):
            raise LadderError(refused_parts(model))
        return
    if not (stacks := stacks_of(model)):
        return
    wirings = named_wiring(vars(model.config), [(stack.layout, len(stack.layers)) for stack in stacks])
    for stack, wiring in zip(stacks, wirings, strict=True):
        rows = zip(stack.layers, wiring.layers, wiring.layer_blocks(len(stack.layout.branches)), strict=True)
        for layer, name, blocks in rows:
            found = layer.spec.wiring if isinstance(layer, WiredLayer) else None
            if name != "standard" if found is None else found != row_of(stack, name, blocks):
                raise LadderError(
                    f"the layers of this {type(model).__name__} are wired otherwise than its config says, and would be "
                    "loaded as that says: rewire(model, wiring) makes both the same"
                )


def refused_parts(model: Any) -> str:
    """Why a model of another kind, with a wired one inside, is refused."""
    return (
        f"{type(model).__name__} ({model.config.model_type}) has a wired part, and no wiring of its own: software "
        "without wirings would load it unwired; known families can be wired as a whole"
    )


def plain_type(config: Any) -> None:
    """A config that was made of the authors' config.json key by key keeps their model_type: its class knows better."""
    if vars(config).get("model_type") == PAPER_MODEL_TYPE:
        del config.model_type
