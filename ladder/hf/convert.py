"""Convert a checkpoint to another wiring: weights copied unchanged, config.json rewritten, a new model card.

A wiring changes no tensor, so nothing is loaded: files are copied through a small buffer, whatever their size. All is
checked before the first byte is written, and the folder appears under its name only when it is complete.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN

from ladder.checkpoint import BESIDE, INDEX, SINGLE, beside, check_space, weight_files
from ladder.config.card import card
from ladder.config.early import check_model_named
from ladder.config.families import FAMILIES as NATIVE
from ladder.config.fields import read_config
from ladder.config.hf import KEYS
from ladder.config.lock import TOWERS, locked, shared_norm_of, unlocked, wiring_of
from ladder.config.quantization import READERS
from ladder.errors import LadderError, check_known
from ladder.files import check_new, new_folder
from ladder.hf.families import layouts_of
from ladder.hf.load import quantizer_of, with_formats
from ladder.hf.register import auto_of, with_sizes
from ladder.hf.stacks import as_text, named_wiring, parse_each, stack_depths
from ladder.hf.wire import refuse_settings
from ladder.progress import Progress
from ladder.wiring import Wiring

WEIGHTS = "*.safetensors"
BUFFER = 16 << 20


def convert(
    model: str, out: Path, wiring: str | None = None, revision: str | None = None, progress: Progress | None = None
) -> Wiring:
    """Write the wired checkpoint `out` from `model`, a directory or a hub id; returns the wiring.

    Without `wiring`: the one that the source's config names already (`wiring`, or the paper's `ladder_layers`).
    """
    return convert_from(model, out, wiring, revision, progress)[1]


def convert_from(
    model: str, out: Path, wiring: str | None = None, revision: str | None = None, progress: Progress | None = None
) -> tuple[Wiring, Wiring]:
    """`convert`; returns the wiring that the source had, and the one that `out` has."""
    out = out.resolve()
    check_new(out)
    source = Path(model)
    if source.is_dir():
        return _convert(source, source.resolve().name, out, wiring, progress)
    check_model_named(model)
    with new_folder(out, ".download") as folder:  # beside `out`, on its disk, whence the files are only moved
        _download(model, revision, folder)
        return _convert(folder, model, out, wiring, progress, move=True)


def _convert(
    source: Path, name: str, out: Path, pattern: str | None, progress: Progress | None, move: bool = False
) -> tuple[Wiring, Wiring]:
    raw = read_config(source)
    plain, wiring = rewired(raw, pattern)
    before = wiring_of(unlocked(raw), len(wiring.layers))
    files = sorted(set(weight_files(source).values()))
    if source / SINGLE not in files:
        files.append(source / INDEX)
    others = beside(source, files)
    total = sum(file.stat().st_size for file in [*files, *others])
    if not move:
        check_space(out, total)
    with new_folder(out) as folder:
        done = 0
        for file in [*others, *files]:
            if move:
                file.rename(folder / file.name)
                done += (folder / file.name).stat().st_size
                if progress is not None:
                    progress(done, total, "copying")
                continue
            for count in _copy(file, folder / file.name):
                done += count
                if progress is not None:
                    progress(done, total, "copying")
        text = json.dumps(locked(plain) if "wiring" in plain else plain, indent=2, sort_keys=True) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
        method, kind = quantizer_of(plain), plain["model_type"]
        native = kind in NATIVE and (method is None or method in READERS)
        auto, stacks = auto_of(plain), len(stack_depths(CONFIG_MAPPING[kind].from_dict(dict(plain))))
        text = card(name, out.name, kind, before, wiring, native, method, auto, stacks)
        (folder / "README.md").write_text(text, encoding="utf-8")
        if out.exists():
            out.rmdir()  # empty, as was seen
        folder.rename(out)
    return before, wiring


def _copy(old: Path, new: Path) -> Iterator[int]:
    """Copy in pieces and yield their sizes; in the kernel where it can do that, else through a buffer."""
    with old.open("rb", buffering=0) as source, new.open("xb") as target:
        with suppress(AttributeError, OSError):  # not Linux, or a file system without it
            while count := os.copy_file_range(source.fileno(), target.fileno(), BUFFER):
                yield count
        while piece := source.read(BUFFER):  # what is left: nothing, or all
            target.write(piece)
            yield len(piece)


def rewired(raw: dict[str, Any], pattern: str | None) -> tuple[dict[str, Any], Wiring]:
    """A config.json's content with another wiring, plain, and that wiring; refuses what cannot be wired. It has the
    key `wiring` where it must be locked.
    """
    raw = unlocked(raw)
    model_type = str(raw.get("model_type"))
    layouts_of(model_type)
    try:
        config = CONFIG_MAPPING[model_type].from_dict(dict(raw))
        depths = stack_depths(config)
    except LadderError:
        raise
    except Exception as error:
        raise LadderError(f"config.json cannot be read as {model_type}: {' '.join(str(error).split())}") from None
    refuse_settings(config)
    _check_activation(config)
    if quantizer_of(raw) == "compressed-tensors":
        raw["quantization_config"] = with_formats(raw["quantization_config"])
    wirings = named_wiring(raw, depths) if pattern is None else parse_each(pattern, depths)
    text = as_text(wirings, raw.get("wiring") if pattern is None else pattern)
    if pattern is None and text == "standard":
        raise LadderError("no wiring: name one, as in --wiring ladder or --wiring 'standard:16 ladder:16'")
    gone = ["wiring", "ladder_layers", "auto_map"]
    if pattern is not None:
        gone += ["staleness", "wiring_ranks"]  # of the wiring that was
    plain = {key: value for key, value in raw.items() if key not in gone}
    plain = with_sizes(plain, config)
    for tower in TOWERS:  # a model that was saved names its wiring there, too
        if isinstance(plain.get(tower), dict):
            plain[tower] = {key: value for key, value in plain[tower].items() if key not in gone}
    lock = shared_norm_of(raw) or text != "standard"
    return ({**plain, "wiring": text} if lock else plain), wirings[0]


def _check_activation(config: Any) -> None:
    """Refuse a function that transformers does not have either: no model could be made of the checkpoint."""
    if (family := NATIVE.get(config.model_type)) is None:  # Bloom, whose function is not an option
        return
    key = {**KEYS, **family.keys}["activation"]
    if (name := getattr(config, key, None)) is not None:
        check_known(f"activation function ({key})", str(name), ACT2FN)


def _download(model: str, revision: str | None, folder: Path) -> None:
    """Only the files that are needed, into `folder`."""
    try:
        needed = ["config.json", INDEX, WEIGHTS, *BESIDE]
        snapshot_download(model, revision=revision, local_dir=folder, allow_patterns=needed)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise LadderError(f"{model} cannot be downloaded from the hub: {' '.join(str(error).split())[:300]}") from None
