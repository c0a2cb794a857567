"""What the files of a checkpoint may name: files of its own folder, and no code.

A folder's files may be links to elsewhere, as in the hub's cache: whoever made the folder made them. A name inside a
file comes with the download.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ladder.config.fields import ADAPTER, read_json
from ladder.errors import LadderError

MOST_TOKENIZER = 256 << 20  # bytes of one of a tokenizer's files
_PLAIN = re.compile(r"[\w .@+=-]{1,200}", re.ASCII)
_HUGE = re.compile(rb'(?<!\\)":\s*([0-9]{9,})')  # the library counts up to the largest id of a vocabulary
_TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*")
# keys of tokenizer_config.json under which transformers finds the name of a file
_TOKENIZER_KEYS = ("vocab_file", "merges_file", "tokenizer_file", "spm_file", "sp_model_file", "chat_template_file")


def is_plain_name(name: object) -> bool:
    """Whether it can only be the name of a file in the folder that names it."""
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None and set(name) != {"."}


def check_files(directory: Path) -> None:
    """Refuse what cannot be read to its end: a pipe or a device in a file's place."""
    for path in sorted(directory.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise LadderError(f"{path} is not a file")


def check_tokenizer(directory: Path) -> None:
    """Refuse a tokenizer whose files cannot be read to their end, are too large, or name files elsewhere."""
    check_files(directory)
    for file in (file for pattern in _TOKENIZER for file in directory.glob(pattern)):
        if file.is_file() and (size := file.stat().st_size) > MOST_TOKENIZER:
            raise LadderError(f"{file} has {size} bytes: a tokenizer's file has at most {MOST_TOKENIZER}")
    whole = directory / "tokenizer.json"
    if whole.is_file() and (found := _HUGE.search(whole.read_bytes())):
        raise LadderError(f"{whole} has the number {found[1][:40].decode()}, which can be no token's id")
    config = directory / "tokenizer_config.json"
    if not config.exists():
        return
    raw = read_json(config)
    names = raw.get("fast_tokenizer_files") or []
    for name in names if isinstance(names, list) else [names]:
        if not is_plain_name(name):
            raise LadderError(f"{config} names {str(name)[:200]!r}, which is not a file of its folder")
    for key in _TOKENIZER_KEYS:  # published ones name files of the machine they were made on, which are not here
        name = raw.get(key)
        if isinstance(name, str) and not is_plain_name(name) and _exists(directory / name):
            raise LadderError(f"{config} names {name[:200]!r}, which is not a file of its folder")


def check_model(directory: Path) -> None:
    """Refuse a checkpoint that transformers would read from elsewhere, or load code for."""
    check_files(directory)
    if (directory / ADAPTER).exists():
        _check_adapter(directory)
    if (directory / "config.json").exists():
        check_no_code(read_json(directory / "config.json"), str(directory / "config.json"))
    for index in sorted(directory.glob("*.index.json")):
        index_table(index)


def _check_adapter(directory: Path) -> None:
    """Only an adapter of the model in its own folder is read, as `ladder adapt` writes it."""
    raw = read_json(directory / ADAPTER)
    if raw.get("base_model_name_or_path") != "" or not (directory / "config.json").exists():
        raise LadderError(f"{directory} is an adapter, which names another model: merge it into that model first")
    if raw.get("peft_type") != "LORA" or raw.get("megatron_config") is not None or raw.get("auto_mapping") is not None:
        raise LadderError(f"{directory / ADAPTER} is not of an adapter that ladder adapt has written")
    if not (directory / "adapter_model.safetensors").is_file():
        raise LadderError(f"{directory} has an adapter without weights: adapter_model.safetensors is missing")


def index_table(index: Path) -> dict[str, str]:
    """Tensor name -> file name, by an index file; all are plain names."""
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(file, str) for file in table.values()):
        raise LadderError(f"{index} has no 'weight_map' from tensors to files")
    for file in sorted(set(table.values())):
        if not is_plain_name(file):
            raise LadderError(f"{index} names {file[:200]!r}, which is not the plain name of a file in its folder")
    return table


def check_no_code(raw: dict[str, Any], where: str) -> None:
    """transformers looks for an implementation with a slash in its name on the hub, and runs it."""
    for key, value in _items(raw):
        if key.endswith("_implementation") and isinstance(value, str) and "/" in value:
            raise LadderError(f"{where}: {key} {value[:200]!r} names code on the hub, which is never loaded")


def _items(raw: Any) -> Iterator[tuple[str, Any]]:
    left = [raw]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield from one.items()
        if isinstance(one, dict | list):
            left += one.values() if isinstance(one, dict) else one


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no path at all
        return False
