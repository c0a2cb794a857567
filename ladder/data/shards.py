"""Tokens on disk, as training reads them: a folder of memory-mapped shards, and sequences of equal length from them.

    shards.json        what the folder holds, and by which tokenizer it was made
    shard-00000.bin    ids one after the other, little-endian, two bytes each where the vocabulary allows it, else four
    tokenizer/         that tokenizer

The shards are one long sequence of tokens: documents, each with the end-of-text token behind it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ladder.config.fields import read_json, whole_number
from ladder.data.check import INDEX, check_tokens
from ladder.errors import LadderError
from ladder.files import write_json

VERSION = 1
TOKENIZER = "tokenizer"
EDGE = 4096  # tokens of a shard's beginning and end that are checked when it is opened
MAPS = 256  # shards that are open at a time, at most: each takes a file descriptor
_DTYPES = {"uint16": "<u2", "uint32": "<u4"}


@dataclass(frozen=True)
class ShardFile:
    """A file of the folder, and how many tokens it has."""

    name: str
    tokens: int


@dataclass(frozen=True)
class ShardIndex:
    """What shards.json says."""

    vocab: int  # every id is smaller
    dtype: str
    eos: int  # the id behind each document
    fingerprint: str  # the tokenizer's
    documents: int
    tokens: int
    bytes: int  # of the text, as UTF-8
    files: tuple[ShardFile, ...]
    version: int = VERSION

    @property
    def width(self) -> int:
        """Bytes of an id."""
        return np.dtype(_DTYPES[self.dtype]).itemsize

    @classmethod
    def read(cls, path: Path) -> "ShardIndex":
        raw = read_json(path)
        try:
            return cls._of(raw)
        except LadderError as error:
            raise LadderError(f"{path} is damaged: {error}; run ladder data again") from None

    @classmethod
    def _of(cls, raw: dict[str, Any]) -> "ShardIndex":
        if (version := whole_number(raw, "version")) != VERSION:
            raise LadderError(f"it is of version {version}, this program knows {VERSION}")
        if unknown := sorted(raw.keys() - {field.name for field in fields(cls)}):
            raise LadderError(f"unknown key {unknown[0]!r}")
        counts = {name: whole_number(raw, name) for name in ("vocab", "eos", "documents", "tokens", "bytes")}
        dtype, fingerprint, files = (raw.get(name) for name in ("dtype", "fingerprint", "files"))
        if not isinstance(fingerprint, str) or not isinstance(files, list):
            raise LadderError("it needs a 'fingerprint' and a list of 'files'")
        if dtype not in _DTYPES or dtype != dtype_of(counts["vocab"]):
            raise LadderError(f"the dtype {dtype!r} does not belong to a vocabulary of {counts['vocab']}")
        if min(counts.values()) < 0 or counts["eos"] >= counts["vocab"]:
            raise LadderError(f"numbers that cannot be: {counts}")
        shards = tuple(_shard(entry) for entry in files)
        if (found := sum(shard.tokens for shard in shards)) != counts["tokens"]:
            raise LadderError(f"its files have {found} tokens together, not {counts['tokens']}")
        return cls(**counts, dtype=dtype, fingerprint=fingerprint, files=shards)


def _shard(entry: Any) -> ShardFile:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise LadderError(f"{entry!r} is not a file of the folder")
    if (tokens := whole_number(entry, "tokens")) < 1:
        raise LadderError(f"{name} has {tokens} tokens")
    return ShardFile(name, tokens)


def dtype_of(vocab: int) -> str:
    """The smallest type that holds every id."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


class Shards:
    """One sequence of `tokens` ids. Pickled without its open files: each process of a DataLoader opens its own."""

    def __init__(self, folder: Path, index: ShardIndex) -> None:
        self.folder, self.index = folder, index
        self.tokens, self.documents, self.bytes = index.tokens, index.documents, index.bytes
        self.vocab, self.eos, self.fingerprint = index.vocab, index.eos, index.fingerprint
        self._starts = [0, *accumulate(shard.tokens for shard in index.files)]
        self._maps: dict[int, np.ndarray[Any, Any]] = {}

    @classmethod
    def open(cls, folder: Path) -> "Shards":
        """The folder that `ladder data` made, complete as far as lengths and the edges of its files tell."""
        folder = Path(folder)
        check_tokens(folder)
        index = ShardIndex.read(folder / INDEX)
        if not index.tokens:
            raise LadderError(f"{folder} has no tokens: run ladder data again")
        for shard in index.files:
            path, wanted = folder / shard.name, shard.tokens * index.width
            if not path.is_file():
                raise LadderError(f"no such file: {path}, which {INDEX} names; run ladder data again")
            if (found := path.stat().st_size) != wanted:
                raise LadderError(f"{path} is damaged: it has {found} bytes, not {wanted}; run ladder data again")
        shards = cls(folder, index)
        shards.check()
        return shards

    def read(self, start: int, count: int) -> Tensor:
        """The `count` ids from `start` on, [count] int64, from as many shards as they lie in."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens {start} to {start + count} of {self.tokens}")
        ids = np.empty(count, np.int64)
        number, done = bisect_right(self._starts, start) - 1, 0
        while done < count:
            within = start + done - self._starts[number]
            piece = self._map(number)[within : within + count - done]
            ids[done : done + len(piece)] = piece
            number, done = number + 1, done + len(piece)
        if count and (largest := int(ids.max())) >= self.vocab:
            raise LadderError(
                f"{self.folder} is damaged: there is an id {largest} among tokens {start} to {start + count},"
                f" the vocabulary has {self.vocab}; run ladder data again"
            )
        return torch.from_numpy(ids)

    def check(self) -> None:
        """Refuse ids beyond the vocabulary, as far as the files' edges tell. (`read` looks at all that it reads.)"""
        for start, stop in zip(self._starts, self._starts[1:], strict=False):
            edge = min(EDGE, stop - start)
            self.read(start, edge)
            self.read(stop - edge, edge)

    def check_tokenizer(self, found: str, whose: str) -> None:
        """Refuse a model whose tokenizer, of the fingerprint `found`, would give other ids."""
        if found != self.fingerprint:
            raise LadderError(
                f"{self.folder} was tokenized with another tokenizer than {whose}'s:"
                f" run ladder data OUT FILE... --tokenizer {whose}"
            )

    def check_vocab(self, size: int, whose: str) -> None:
        """Refuse a model that has fewer rows than there are ids."""
        if self.vocab > size:
            raise LadderError(
                f"{self.folder} has a vocabulary of {self.vocab}, {whose} one of {size}:"
                f" run ladder data OUT FILE... --tokenizer {whose}"
            )

    def _map(self, number: int) -> np.ndarray[Any, Any]:
        if number not in self._maps:
            if len(self._maps) >= MAPS:
                self._maps.clear()
            shard = self.index.files[number]
            path, dtype = self.folder / shard.name, np.dtype(_DTYPES[self.index.dtype])
            try:
                self._maps[number] = np.memmap(path, dtype, "r", shape=(shard.tokens,))
            except (OSError, ValueError) as error:  # gone or shorter since it was checked
                raise LadderError(f"{path} cannot be read: {error}") from None
        return self._maps[number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}


class Sequences(Dataset[dict[str, Tensor]]):
    """Packed sequences of `length` tokens, one after the other; documents cross their borders, a last part is left out.

    Of the tokens // length sequences, those from `skip` on, and of these the first `limit`.
    """

    def __init__(self, shards: Shards, length: int, skip: int = 0, limit: int | None = None) -> None:
        if length < 1 or skip < 0 or (limit is not None and limit < 1):
            raise LadderError(f"sequences of {length} tokens, {skip} left out, at most {limit}: no such sequences")
        whole = shards.tokens // length
        if not whole:
            raise LadderError(
                f"{shards.folder} has {shards.tokens} tokens, fewer than one sequence of {length}: take shorter ones"
            )
        if whole <= skip:
            raise LadderError(f"{shards.folder} has {whole} sequences of {length} tokens: none is left after {skip}")
        self.shards, self.length, self.skip = shards, length, skip
        self._count = whole - skip if limit is None else min(limit, whole - skip)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -self._count <= index < self._count:
            raise IndexError(f"sequence {index} of {self._count}")
        ids = self.shards.read((self.skip + index % self._count) * self.length, self.length)
        return {"input_ids": ids, "labels": ids}


class EvenSample(Dataset[dict[str, Tensor]]):
    """So many of the sequences, evenly spread over all of them."""

    def __init__(self, sequences: Sequences, count: int) -> None:
        self._sequences, self._count = sequences, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(f"sequence {index} of {self._count}")
        return self._sequences[index * len(self._sequences) // self._count]


class ShardWriter:
    """Writes such a folder: ids are appended, one file is open at a time, `finish` writes shards.json."""

    def __init__(self, folder: Path, vocab: int, shard_tokens: int) -> None:
        self._folder, self._vocab, self._most = folder, vocab, shard_tokens
        self._dtype = dtype_of(vocab)
        self._counts: list[int] = []  # tokens of each file so far
        self._file: BinaryIO | None = None

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def add(self, ids: Sequence[int]) -> None:
        left = np.asarray(ids, _DTYPES[self._dtype])
        while len(left):
            if self._file is None or self._counts[-1] == self._most:
                self._next()
            piece = left[: self._most - self._counts[-1]]
            assert self._file is not None
            self._file.write(piece.tobytes())
            self._counts[-1] += len(piece)
            left = left[len(piece) :]

    def finish(self, eos: int, fingerprint: str, documents: int, bytes: int) -> None:
        self._close()
        files = tuple(ShardFile(_name(number), tokens) for number, tokens in enumerate(self._counts))
        tokens = sum(self._counts)
        index = ShardIndex(self._vocab, self._dtype, eos, fingerprint, documents, tokens, bytes, files)
        write_json(self._folder / INDEX, asdict(index))

    def _next(self) -> None:
        self._close()
        self._file = (self._folder / _name(len(self._counts))).open("xb")
        self._counts.append(0)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _name(number: int) -> str:
    return f"shard-{number:05}.bin"
