"""What is known of a model without torch and transformers: enough to refuse a command line before they are imported.

Whatever is not known here, a model of the hub or of a family that only transformers has, is refused later, by the same
sentences.
"""

from pathlib import Path

from ladder.config.model import ModelConfig
from ladder.errors import LadderError
from ladder.wiring import Wiring, check_names

LONGEST = 1024  # tokens of a sequence where nothing else is asked for
SEQ_LEN_HELP = f"Tokens of a sequence; default: the model's context, at most {LONGEST}."


def early_config(model: str | Path) -> ModelConfig | None:
    """The config of a directory; None where it cannot be known here."""
    try:
        return ModelConfig.from_directory(Path(model)) if Path(model).is_dir() else None
    except (LadderError, OSError):
        return None


def sequence_length(asked: int | None, context: int | None) -> int:
    """--seq-len, its default filled in. `context`: the model's; None: any."""
    if asked is None:
        return min(context or LONGEST, LONGEST)
    if context is not None and asked > context:
        raise LadderError(f"--seq-len {asked} is more than the model's context of {context}: give a smaller one")
    return asked


def check_pattern(pattern: str | None, model: str | Path) -> None:
    """Refuse a wiring with unknown names, or one that does not fit the model's layers."""
    if pattern is None:
        return
    check_names(pattern)
    if (config := early_config(model)) is not None:
        Wiring.parse(pattern, config.layers)
