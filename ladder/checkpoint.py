"""Hugging Face directories <-> shards, streamed: a rank reads only its slices, one tensor at a time.

Everything that can be wrong with a directory is found from its headers, before a weight is read. A file is mapped
anew for each tensor: the pages of a mapping count as this process's memory until it is closed.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ladder.config import ModelConfig
from ladder.config.inside import index_table
from ladder.config.quantization import ACTIVATION_TENSORS
from ladder.errors import LadderError
from ladder.files import writable
from ladder.layers.shard import FLOATS, Shard
from ladder.model import Decoder
from ladder.perf.memory import size_text

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NORM = re.compile(r"(norm|\bln_\w+)\.weight$")
# what belongs to a checkpoint besides its weights; not its code, its other formats, its card
BESIDE = ["generation_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json"]
BESIDE += ["added_tokens.json", "chat_template*", "spiece.model", "*.tiktoken", "tekken.json", "LICENSE*", "NOTICE*"]
BESIDE += ["USE_POLICY*", "LICENCE*", "*processor_config.json", "normalizer.json"]
# buffers that older checkpoints keep beside the weights
_BUFFERS = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias", "attn.bias", "attn.masked_bias")
# safetensors' names of the types that are read
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8}
TYPES |= {"F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32, "I64": torch.int64}


class Source(Protocol):
    """Where weights come from."""

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        """`whole[index]` of the tensor `name`, which has that shape as a whole."""
        ...


class Random:
    """Normal weights (norms: about one), the same at every TP degree. For tests, demos and benchmarks."""

    def __init__(self, seed: int = 0, deviation: float = 0.02) -> None:
        self.seed = seed
        self.deviation = deviation
        self._last: tuple[object, Tensor] = (None, torch.empty(0))

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        key, whole = self._last  # taken once: ranks that are threads read from one source
        if key != (name, shape):  # several pieces of one tensor are read one after the other
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + zlib.crc32(name.encode()))
            whole = torch.randn(shape, generator=generator) * self.deviation
            whole = whole + 1 if _NORM.search(name) else whole
            self._last = (name, shape), whole
        return whole[index]


class Directory:
    """A directory with config.json and one or many safetensors files. Opening it checks the files' headers."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = ModelConfig.from_directory(self.path)
        files = weight_files(self.path)
        # transformers also reads checkpoints of a model without its head, whose names lack the first part
        base = self.config.names.layers.split(".")[0] + "."
        bare = not any(name.startswith(base) for name in files)
        full = {name: base + name if bare and not name.startswith(self.config.names.head) else name for name in files}
        self.files = {full[name]: file for name, file in files.items()}
        self.stored = {full[name]: name for name in files}  # name in the file
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._types: dict[str, str] = {}
        for file in dict.fromkeys(self.files.values()):
            self._read_header(file)
        layer = re.compile(re.escape(self.config.names.layers) + r"\.([0-9]{1,6})\.")
        numbers = [int(match[1]) for name in self.files if (match := layer.match(name))]
        if max(numbers, default=-1) + 1 != self.config.layers:
            found = max(numbers, default=-1) + 1
            raise LadderError(f"{self.path}: config.json calls for {self.config.layers} layers, the files have {found}")
        head = (f"{self.config.names.head}.{kind}" for kind in ("weight", "weight_packed", "qweight"))
        if self.config.tied and not self._shapes.keys().isdisjoint(head):
            # transformers does not tie a head that the files hold; where it equals the embedding, nothing changes
            self.config = replace(self.config, tied=False)

    def _read_header(self, file: Path) -> None:
        with safe_open(file, framework="pt") as opened:
            for name in (name for name, at in self.files.items() if at == file):
                entry = opened.get_slice(self.stored[name])
                self._shapes[name], self._types[name] = tuple(entry.get_shape()), entry.get_dtype()

    def check(self, shards: Iterable[Shard]) -> None:
        """Refuse a directory whose tensors are not those of the model's ranks, before any is read."""
        wanted = {shard.name: shard for shard in shards}
        for name, shard in wanted.items():
            self._check(name, shard.shape)
            _check_type(str(self.path), name, self._types[name], TYPES.get(self._types[name]), shard)
        others = _BUFFERS + (ACTIVATION_TENSORS if self.config.weights else ())
        for name in self._shapes:
            ours = name.startswith(self.config.names.layers.split(".")[0] + ".")
            if ours and name not in wanted and not name.endswith(others):
                raise LadderError(f"{self.path} has the tensor {name!r}, which a model of its config.json does not")
        self._check_values([shard for shard in wanted.values() if shard.holds is not None])

    def _check_values(self, shards: list[Shard]) -> None:
        """Of the small tensors that must be what config.json implies."""
        for file in dict.fromkeys(self.files[shard.name] for shard in shards):
            with safe_open(file, framework="pt") as opened:
                for shard in (shard for shard in shards if self.files[shard.name] == file):
                    assert shard.holds is not None
                    if not torch.equal(opened.get_tensor(self.stored[shard.name]).long(), shard.holds().long()):
                        raise LadderError(f"{self.path}: {shard.name!r} is not what its config.json calls for")

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._shapes:
            raise LadderError(f"{self.path} lacks the tensor {name!r} that its config.json calls for")
        if self._shapes[name] != shape:
            found, needed = list(self._shapes[name]), list(shape)
            raise LadderError(f"{self.path}: {name!r} has shape {found}, its config.json calls for {needed}")

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        """A view of the mapped file; the mapping lives as long as the view."""
        self._check(name, shape)
        with safe_open(self.files[name], framework="pt") as opened:
            piece: Tensor = opened.get_slice(self.stored[name])[index]
            return piece


def load(model: Decoder, source: Source, check: bool = False, progress: Callable[[int], None] | None = None) -> Decoder:
    """Fill every shard of `model`. `check` refuses weights that are not finite; `progress` is told the bytes filled."""
    for shard in model.shards():
        if shard.holds is not None:
            continue
        piece = source.read(shard.name, shard.shape, shard.index)
        _check_type("the checkpoint", shard.name, str(piece.dtype), piece.dtype, shard)
        if check and not _finite(piece):
            raise LadderError(f"the tensor {shard.name!r} holds values that are not finite (NaN or infinity)")
        shard.target.copy_(piece if shard.convert is None else shard.convert(piece))
        del piece  # closes the mapping before the next one is opened
        if progress is not None:
            progress(shard.target.numel() * shard.target.element_size())
    return model


def _check_type(where: str, name: str, found: str, dtype: torch.dtype | None, shard: Shard) -> None:
    if dtype not in shard.types:
        types = " or ".join(sorted(str(each).removeprefix("torch.") for each in shard.types))
        needed = "not a plain float" if shard.types == FLOATS else f"not {types}"
        raise LadderError(f"{where}: {name!r} has type {found}, which is {needed}")


def _finite(piece: Tensor) -> bool:
    if piece.dtype is torch.float8_e4m3fn:  # it has no infinity, and one NaN of either sign
        return bool(((piece.view(torch.uint8) & 0x7F) != 0x7F).all())
    return bool(piece.isfinite().all())


def save(model: Decoder, path: str | Path, file_bytes: int = 5_000_000_000) -> None:
    """Write a Hugging Face directory: config.json and files of at most `file_bytes` (but at least one tensor) each.

    Each file appears under its name only when it is whole, config.json last.
    """
    if model.config.weights:
        raise LadderError("quantized weights cannot be saved: copy the checkpoint, or save the model they come from")
    if model.comm.size != 1:
        raise LadderError(f"saving needs the whole model on one rank, this is one of {model.comm.size}")
    path = Path(path)
    if path.is_dir() and any(path.glob("*.safetensors")):
        raise LadderError(f"{path} already holds weights: choose another directory")
    config = model.config.to_hf()  # refuses what cannot be written, before anything is
    path.mkdir(parents=True, exist_ok=True)
    shards: dict[str, list[Shard]] = {}
    for shard in model.shards():
        shards.setdefault(shard.name, []).append(shard)
    kind = model.embed_tokens.weight.dtype
    empty = {name: torch.empty(parts[0].shape, dtype=kind, device="meta") for name, parts in shards.items()}
    pattern = SINGLE.replace(".safetensors", "{suffix}.safetensors")
    plan = split_torch_state_dict_into_shards(empty, filename_pattern=pattern, max_shard_size=file_bytes)
    for file, names in plan.filename_to_tensors.items():
        save_file({name: _joined(shards[name]) for name in names}, path / f"{file}.partial", metadata={"format": "pt"})
        (path / f"{file}.partial").chmod(0o644)  # safetensors creates it for its owner alone
        os.replace(path / f"{file}.partial", path / file)
    if plan.is_sharded:
        table = dict(sorted(plan.tensor_to_filename.items()))
        _write_json(path / INDEX, {"metadata": plan.metadata, "weight_map": table})
    _write_json(path / "config.json", config)


def _joined(shards: list[Shard]) -> Tensor:
    """A checkpoint's tensor from all of its pieces."""
    if len(shards) == 1 and shards[0].target.shape == shards[0].shape:
        return shards[0].target.contiguous()
    whole = torch.empty(shards[0].shape, dtype=shards[0].target.dtype)
    for shard in shards:
        whole[shard.index] = shard.target.cpu()
    return whole


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it. transformers' rule: the single file if there is one, else the index's.

    By their headers all files are readable, and have the tensors that the index places there.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        return dict.fromkeys(_names(single), single)
    if not index.exists():
        pickled = any(file.suffix in (".bin", ".pth") for file in folder.glob("*.*"))
        hint = ": save pickled weights (.bin, .pth) as safetensors first" if pickled else ""
        raise LadderError(f"{folder} has neither {SINGLE} nor {INDEX}, and only safetensors weights are read{hint}")
    table = index_table(index)
    for file in sorted(set(table.values())):
        present = set(_names(folder / file))
        for name in (name for name, at in table.items() if at == file):
            if name not in present:
                raise LadderError(f"{folder / file} lacks the tensor {name!r} that {INDEX} places there")
    return {name: folder / file for name, file in table.items()}


def beside(source: Path, weights: Collection[Path]) -> list[Path]:
    """The files that belong to a checkpoint besides its weights, its config.json and its card."""
    files = (file for file in sorted(source.iterdir()) if file.is_file() and file not in weights)
    return [file for file in files if any(fnmatch(file.name, known) for known in BESIDE)]


def check_space(out: Path, total: int) -> None:
    """Refuse what does not fit onto the disk."""
    if (free := shutil.disk_usage(writable(out)).free) < total:
        raise LadderError(f"{out} needs {size_text(total)}, its disk has {size_text(free)} left")


def _names(file: Path) -> list[str]:
    if file.exists() and not file.is_file():
        raise LadderError(f"{file} is not a file")
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except FileNotFoundError:
        raise LadderError(f"no such file: {file}") from None
    except (SafetensorError, OSError) as error:
        raise LadderError(f"{file} is truncated or corrupted: {error}") from None


def _write_json(path: Path, content: object) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, path)
