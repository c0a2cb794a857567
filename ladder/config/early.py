"""What is known of a model without torch and transformers: enough to refuse a command line before they are imported.

Whatever is not known here, a model of the hub or of a family that only transformers has, is refused later, by the same
sentences.
"""

import re
from collections.abc import Callable
from pathlib import Path

from ladder.config.fields import ADAPTER, SIDE
from ladder.config.model import ModelConfig
from ladder.config.sizes import SIZES
from ladder.errors import LadderError, hint
from ladder.hub import NAME
from ladder.wiring import Wiring, check_names

LONGEST = 1024  # tokens of a sequence where nothing else is asked for
SEQ_LEN_HELP = f"Tokens of a sequence; default: the model's context, at most {LONGEST}."


def check_model_named(model: str | Path, hub: bool = True, config: bool = True) -> None:
    """Refuse what cannot be a model: neither a directory, nor, where these are taken, spelled as one of the hub.
    `config`: False where it may be the folder of a tokenizer.
    """
    name = str(model)
    if _is(Path.is_dir, name):
        if config and not any((Path(name) / file).exists() for file in ("config.json", SIDE, ADAPTER)):
            raise LadderError(f"{name} has no config.json: name the directory of a model, as Hugging Face has them")
        return
    if hub and re.fullmatch(NAME, name):
        return
    shown = name[:200]
    if name in SIZES:
        raise LadderError(
            f"{shown} is a named size, which has no weights: name a directory{' or a model of the hub' * hub} (ladder "
            "plan, trace and bench take --size)"
        )
    if _is(Path.is_file, name):
        raise LadderError(f"{shown} is a file: name the directory that has a model's config.json and weights")
    also = ", and one of the hub is named as in org/name" * hub
    raise LadderError(f"no model {shown!r}: there is no such directory{also}{hint(name, _beside())}")


def _is(kind: Callable[[Path], bool], name: str) -> bool:
    try:
        return kind(Path(name))
    except OSError:  # a name that is too long, for one
        return False


def _beside() -> list[str]:
    """The models in this directory."""
    try:
        return [each.name for each in sorted(Path().iterdir()) if (each / "config.json").is_file()]
    except OSError:
        return []


def early_config(model: str | Path) -> ModelConfig | None:
    """The config of a directory; None where it cannot be known here."""
    try:
        return ModelConfig.from_directory(Path(model)) if _is(Path.is_dir, str(model)) else None
    except (LadderError, OSError):
        return None


def sequence_length(asked: int | None, context: int | None) -> int:
    """--seq-len, its default filled in. `context`: the model's; None: any."""
    if asked is None:
        return min(context or LONGEST, LONGEST)
    if context is not None and asked > context:
        raise LadderError(f"--seq-len {asked} is more than the model's context of {context}: give a smaller one")
    return asked


def check_window(window: int | None, context: int | None) -> None:
    """Refuse windows of text that a model has no positions for; None: its default; a context that is not known."""
    if window is not None and (window < 1 or (context is not None and window > context)):
        raise LadderError(f"window is {window} tokens: it must be from 1 to the model's context, {context or 'any'}")


CONTINUED = 64  # tokens of a prompt, and of its continuation, if nothing else is said


def check_continuations(count: int | None, on_text: bool, with_source: bool, here: bool) -> None:
    """Refuse to compare what models write without a text that has prompts and a source, or in another engine."""
    if count is not None and not (on_text and with_source and here):
        raise LadderError(
            "continuations are of prompts from a text, beside those of a source, in transformers only: give --text and "
            "--source, and no other --engine"
        )


def check_continued(prompt: int, new: int, context: int | None) -> None:
    """Refuse prompts with continuations that a model has no positions for; None: a context that is not known."""
    if context is not None and prompt + new > context:
        raise LadderError(
            f"prompts of {prompt} tokens and {new} new ones are more than the model's context of {context}: give a "
            "smaller --prompt-tokens or --new-tokens"
        )


def check_pattern(pattern: str | None, model: str | Path) -> None:
    """Refuse a wiring with unknown names, or one that does not fit the model's layers."""
    if pattern is None:
        return
    check_names(pattern)
    if (config := early_config(model)) is not None:
        Wiring.parse(pattern, config.layers)
