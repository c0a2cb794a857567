"""Models and tokenizers from a directory or the hub: what goes wrong costs one sentence, and nobody else speaks."""

import importlib
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ladder.config.fields import check_no_side
from ladder.errors import LadderError

_LOUD = ("lm_eval", "transformers", "datasets", "huggingface_hub", "accelerate")


def pretrained(auto: Any, name: str, **options: Any) -> Any:
    """`auto.from_pretrained` of a directory or a hub id."""
    local = Path(name).is_dir()
    if not local and not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise LadderError(f"{name} is neither a directory nor the name of a model on the hub, as in org/name")
    if auto.__name__ != "AutoTokenizer":
        check_no_side(Path(name))
    try:
        return auto.from_pretrained(name, trust_remote_code=False, local_files_only=local, **options)
    except LadderError:
        raise
    except Exception as error:  # transformers and its friends raise whatever they like
        raise LadderError(f"{name} cannot be loaded: {reason(error)}") from error


def reason(error: Exception) -> str:
    """The first line of what an error says, and the next where that only begins a list."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 1 + lines[0].rstrip().endswith(":")])


@contextmanager
def quiet() -> Iterator[None]:
    """No bars, warnings and news but ours; afterwards as before."""
    bar = importlib.import_module("tqdm").tqdm
    begin = bar.__init__

    def unseen(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **{**named, "disable": True})

    with ExitStack() as stack:
        for name in _LOUD:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.callback(setattr, bar, "__init__", begin)
        bar.__init__ = unseen
        yield
