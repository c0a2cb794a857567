"""Models of the hub by their names: downloaded once into its cache, and from then on a directory like any other."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ladder.errors import LadderError

NAME = r"\w[\w.-]*/\w[\w.-]*"  # org/name
# weights, configs, and what a tokenizer is made of; no other formats, and no code
NEEDED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]


def directory_of(model: Path) -> Path:
    """The directory of a model: itself, or where `org/name` of the hub has been downloaded to. What is neither stays as
    it is, for whoever reads it to refuse.
    """
    name = str(model)
    try:
        there = model.exists()
    except OSError:  # a name that is too long, for one
        there = False
    if there or not re.fullmatch(NAME, name):
        return model
    from huggingface_hub import snapshot_download  # here: it takes a second
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with _bars_on_terminals():
            return Path(snapshot_download(name, allow_patterns=NEEDED))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = " ".join(str(error).split())[:300]
        raise LadderError(f"{name} is no directory here, and cannot be downloaded from the hub: {why}") from None


def name_of(directory: Path) -> str:
    """What a model's directory is called: one in the hub's cache by its name on the hub."""
    found = re.fullmatch(r"models--(.+?)--(.+)", directory.parent.parent.name)
    if directory.parent.name == "snapshots" and found:
        return f"{found[1]}/{found[2]}"
    return directory.resolve().name


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """The hub's progress bars only where somebody sees them; afterwards as before."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
