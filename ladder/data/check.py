"""What can be known of texts, and of folders of tokens, before anything is read. No torch here."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ladder.data.documents import check_files
from ladder.errors import LadderError
from ladder.files import check_new
from ladder.hub import NAME

END = "<|end|>"  # of a text, for tokenizers that are trained here
BYTES = 256  # entries that every byte-level tokenizer has
LARGEST = 1 << 20  # entries of a tokenizer that is trained here
INDEX = "shards.json"  # of a folder of tokens
INPUTS = ".safetensors"  # of a file of a model's inputs


def check_tokenizing(
    files: Sequence[Path], out: Path, tokenizer: Any, vocab: int | None, shard_tokens: int, field: str
) -> None:
    """Refuse texts, a tokenizer or a folder that `ladder data` cannot work with."""
    if (tokenizer is None) == (vocab is None):
        raise LadderError("name either a tokenizer (--tokenizer DIR) or the size of a new one (--vocab N)")
    if shard_tokens < 1:
        raise LadderError(f"shards of {shard_tokens} tokens: at least 1 is needed (--shard-tokens)")
    if vocab is not None and not BYTES < vocab <= LARGEST:
        raise LadderError(f"a vocabulary of {vocab}: {BYTES + 1} (all bytes and {END}) to {LARGEST} are possible")
    check_files(files, field)
    check_new(out)
    if isinstance(tokenizer, str | Path):
        check_tokenizer_named(str(tokenizer))


def check_tokenizer_named(name: str) -> None:
    """Refuse what is neither a directory nor spelled as one of the hub."""
    if not Path(name).is_dir() and not re.fullmatch(NAME, name):
        raise LadderError(f"no such tokenizer directory: {name[:200]}; one of the hub is named as in org/name")


def check_tokens(folder: Path) -> None:
    """Refuse what is no folder of tokens."""
    if folder.is_file():
        raise LadderError(
            f"{folder} is a file: name a folder of tokens, which ladder data makes of texts; inputs of models that "
            f"read other things are a {INPUTS} file"
        )
    if not folder.is_dir():
        raise LadderError(f"no such folder of tokens: {folder}; ladder data makes one")
    if not (folder / INDEX).exists():
        raise LadderError(f"{folder} has no {INDEX}: name a folder that ladder data made")


def check_training_data(data: Path) -> None:
    """The same, or a file of a model's inputs, of which only its model can tell what must be in it."""
    if not (data.is_file() and data.suffix == INPUTS):
        check_tokens(data)
