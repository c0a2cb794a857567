"""Names of models: the path or hub id that a model can be loaded from again.

Other libraries load a model a second time by its name: TRL for a reference model (`config._name_or_path`), PEFT for the
model below an adapter (`name_or_path`). A model that is not wired as the files of that name say must not be found
there: its name says so, and no file has such a name.

An adapter of PEFT notes the name of its base, but where a model is given instead, nobody compares the two. One that was
made beside a wired model is not put on one that is not wired.
"""

from contextlib import suppress
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from ladder.config.fields import read_json
from ladder.config.lock import names_wiring, ranks_of, unlocked
from ladder.errors import LadderError
from ladder.hf.stacks import named_wiring, stack_depths

IN_MEMORY = ", rewired in memory: save it, and load that"


def mark_in_memory(model: Any) -> None:
    """Name a model of transformers, its config and the adapters in it as what no file holds."""
    name = (model.name_or_path or "a model").removesuffix(IN_MEMORY) + IN_MEMORY
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config is model.config:
            module.name_or_path = name
    model.config.name_or_path = name
    mark_adapters(model, name)


def mark_adapters(model: Any, name: str) -> None:
    """Adapters note the name of their base when they are made, and are saved with it. PEFT leaves their configs in the
    model that they are put into, or, where they are only prompts, in its own model around that one.
    """
    adapters = getattr(model, "peft_config", None)
    for adapter in adapters.values() if isinstance(adapters, dict) else ():
        adapter.base_model_name_or_path = name


def refuse_in_memory(name: object) -> None:
    """Refuse to load by the name of a model that was rewired in memory."""
    if str(name).endswith(IN_MEMORY):
        raise LadderError(
            f"{str(name).removesuffix(IN_MEMORY)} was rewired in memory, and its files are not wired like that: save "
            "the model (save_pretrained) and load that, so that whatever loads it by its path gets the same one"
        )


def check_name(model: Any) -> None:
    """Compare a model that was just made with the config.json of its name, if that is at hand: a wired model's that
    says something else is no longer its name, and one that is wired is not loaded as if it were not.
    """
    config = model.config
    if str(config.name_or_path).endswith(IN_MEMORY):
        return mark_in_memory(model)
    if (raw := config_at(str(config.name_or_path or ""), getattr(config, "_commit_hash", None))) is None:
        return
    if raw.get("model_type") != config.model_type:  # the name of something else
        if names_wiring(raw) and not names_wiring(vars(config)):
            raise LadderError(
                f"{config.name_or_path} is a wired {raw.get('model_type')} model, which {type(model).__name__} would "
                "load unwired: leave out the config, and load it by AutoModel"
            )
        return
    if said_wiring(vars(config), config) == said_wiring(raw, config):
        return
    if names_wiring(vars(config)):
        mark_in_memory(model)
    else:
        raise LadderError(
            f"{config.name_or_path} is wired {raw.get('wiring') or 'by ladder_layers'!r}, the config that was given is "
            "not: leave out the config, and rewire(model, 'standard') afterwards if that is meant"
        )


def said_wiring(raw: dict[str, Any], config: Any) -> tuple[Any, ...]:
    """What a plain config.json says of the wiring, for a model of that config's size."""
    return named_wiring(raw, stack_depths(config)), ranks_of(raw), raw.get("staleness", 1.0)


def config_at(name: str, commit: str | None = None) -> dict[str, Any] | None:
    """The plain config.json of a directory, or of a model of the hub that is in the cache; None: there is none."""
    file: Any = Path(name) / "config.json" if name else None
    with suppress(OSError, ValueError):  # a name of whatever kind, a file of whatever content
        if name and not file.is_file():
            found = (try_to_load_from_cache(name, "config.json", revision=revision) for revision in (commit, None))
            file = next((path for path in found if isinstance(path, str)), None)
        if file is not None:
            return unlocked(read_json(Path(file)))
    return None


def register_adapters() -> None:
    """Have PEFT, if it is installed, compare an adapter's base with the model that it is put on, and save the name that
    a model has by then. There is no public way: neither asks the model.
    """
    if find_spec("peft") is None:
        return
    try:
        from peft import PeftModel
        from peft.tuners.tuners_utils import BaseTuner
    except ImportError:  # one that does not fit this transformers: nobody can use it
        return

    inject, prompts, save = BaseTuner.inject_adapter, PeftModel._setup_prompt_encoder, PeftModel.save_pretrained

    @wraps(inject)
    def inject_adapter(tuner: Any, model: Any, adapter_name: str, *arguments: Any, **options: Any) -> Any:
        check_adapter(tuner.peft_config[adapter_name], model)
        return inject(tuner, model, adapter_name, *arguments, **options)

    @wraps(prompts)
    def _setup_prompt_encoder(outer: Any, adapter_name: str) -> Any:
        check_adapter(outer.peft_config[adapter_name], outer.get_base_model())
        return prompts(outer, adapter_name)

    @wraps(save)
    def save_pretrained(outer: Any, *arguments: Any, **options: Any) -> Any:
        name = getattr(outer.get_base_model(), "name_or_path", None)
        if str(name).endswith(IN_MEMORY):
            for adapter in outer.peft_config.values():
                if adapter.base_model_name_or_path != "":  # which says: beside a checkpoint, in its own folder
                    adapter.base_model_name_or_path = str(name)
        return save(outer, *arguments, **options)

    BaseTuner.inject_adapter = inject_adapter  # type: ignore[method-assign, assignment]
    PeftModel._setup_prompt_encoder = _setup_prompt_encoder  # type: ignore[method-assign, assignment]
    PeftModel.save_pretrained = save_pretrained  # type: ignore[method-assign, assignment]


def check_adapter(adapter: Any, model: Any) -> None:
    """Refuse an adapter whose base is wired, and the model is not, or otherwise."""
    base, config = str(adapter.base_model_name_or_path or ""), getattr(model, "config", None)
    if not base or config is None or base == getattr(model, "name_or_path", None):
        return
    wired = names_wiring(vars(config))
    if base.endswith(IN_MEMORY):
        if not wired:
            raise LadderError(
                f"the adapter was made beside {base.removesuffix(IN_MEMORY)} after that was rewired, and the model "
                "that it is put on is not wired: rewire it first, as that was"
            )
        return
    raw = config_at(base)
    if raw is None or not names_wiring(raw) or raw.get("model_type") != config.model_type:
        return
    if not wired or said_wiring(raw, config) != said_wiring(vars(config), config):
        raise LadderError(
            f"the adapter was made beside {base}, which is wired {raw.get('wiring') or 'by ladder_layers'!r}, and the "
            "model that it is put on is not: load that model, or rewire this one first"
        )
