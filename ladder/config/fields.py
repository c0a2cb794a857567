"""Reading JSON fields: each value is checked, and an error names the key, the value and what is expected."""

import gzip
import json
import lzma
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ladder.errors import LadderError

SIDE = "side.json"  # what a side network's folder has instead of a config.json
ADAPTER = "adapter_config.json"  # beside a quantized model's weights: an adapter of peft
MOST_JSON = 64 << 20  # bytes of a JSON file: an index of a model with thousands of experts has some ten million
UNPACKERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}


def read_text(path: Path) -> str:
    """A file's text, unpacked, or one sentence that says why not."""
    try:
        with UNPACKERS.get(path.suffix.lower(), open)(path, "rt", encoding="utf-8-sig") as opened:
            return str(opened.read())  # without the mark that some editors begin a file with
    except FileNotFoundError:
        raise LadderError(f"no such file: {path}") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError) as error:
        raise LadderError(f"{path} cannot be read: {error}") from None


def check_no_side(directory: Path) -> None:
    """A side network is no model of its own."""
    if (directory / SIDE).is_file() and not (directory / "config.json").exists():
        raise LadderError(
            f"{directory} is a side network, which runs beside its model in transformers alone: `ladder eval` measures "
            "it, and its README.md shows how to load it in Python"
        )


def read_config(directory: Path) -> dict[str, Any]:
    """A model's config.json; refused where its weights are not the whole model."""
    check_no_side(directory)
    if (directory / ADAPTER).exists():
        raise LadderError(
            f"{directory} has an adapter ({ADAPTER}), which is not applied here: transformers and `ladder eval` read it"
        )
    return read_json(directory / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or one sentence that says why not."""
    if path.exists() and not path.is_file():
        raise LadderError(f"{path} is not a file")
    try:
        if (size := path.stat().st_size) > MOST_JSON:
            raise LadderError(f"{path} has {size} bytes: at most {MOST_JSON} are read as JSON")
        raw = json.loads(
            path.read_text(encoding="utf-8"),
            object_pairs_hook=_once,
            parse_constant=_finite,
            parse_float=_finite,
        )
    except FileNotFoundError:
        raise LadderError(f"no such file: {path}") from None
    except LadderError:
        raise
    except RecursionError:
        raise LadderError(f"{path} cannot be read as JSON: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise LadderError(f"{path} cannot be read as JSON: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(raw, dict):
        raise LadderError(f"{path} is not a JSON object")
    return raw


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers of JSON differ in which of two equal keys they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"it has the key {twice[:100]!r} twice")
    return found


def _finite(text: str) -> float:
    """JSON has no NaN and no infinity, though Python's reader takes them."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no number that JSON has")
    return value


def need(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise LadderError(f"the key {key!r} is missing")
    return raw[key]


def whole_number(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key) if default is not None else need(raw, key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise LadderError(f"{key!r} must be a whole number, not {value!r}")
    return value


def token_ids(value: Any) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(id, bool) or not isinstance(id, int) or id < 0 for id in ids):
        raise LadderError(f"'eos_token_id' must be an id or a list of ids, not {value!r}")
    return ids
