"""Safetensors files, streamed: tensors are read some rows at a time, and written to places that are known before."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from ladder.checkpoint import INDEX, SINGLE, TYPES, Directory
from ladder.errors import LadderError
from ladder.files import write_json

NAMES = {dtype: name for name, dtype in TYPES.items()}
FILE_BYTES = 5_000_000_000  # of a file, or one tensor
AHEAD = 2  # pieces that are being written, or wait to be

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Spec:
    """What a tensor takes in a file: its type by safetensors' name, its shape, its bytes."""

    kind: str
    shape: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, dtype: torch.dtype, *shape: int) -> "Spec":
        return Spec(NAMES[dtype], shape, prod(shape) * dtype.itemsize)

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return self.size // max(1, prod(self.shape))


@dataclass(frozen=True)
class Entry(Spec):
    """A tensor in a file."""

    file: Path
    start: int

    def pieces(self, most: int) -> Iterator[bytearray]:
        """Its bytes, at most so many at a time; the next ones are read meanwhile."""
        return _ahead(self._read(most))

    def _read(self, most: int) -> Iterator[bytearray]:
        with self.file.open("rb") as opened:
            opened.seek(self.start)
            for start in range(0, self.size, most):
                piece = bytearray(min(most, self.size - start))
                if opened.readinto(piece) != len(piece):
                    raise LadderError(f"{self.file} is truncated or corrupted: it ends before its last tensor does")
                yield piece

    def rows(self, count: int) -> Iterator[Tensor]:
        """A matrix, so many rows at a time."""
        for piece in self.pieces(count * self.size // self.shape[0]):
            yield torch.frombuffer(piece, dtype=TYPES[self.kind]).view(-1, *self.shape[1:])


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """The same; each is made by a thread while the one before it is used."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


@contextmanager
def side_by_side(most: int) -> Iterator[Callable[[Callable[[T], R], Iterable[T]], Iterator[R]]]:
    """A `map` by as many threads as there are cores, at most so many, each of which computes with one thread of torch.
    Results come in order; no more items are taken than that the threads have something to do.
    """
    count, before = min(most, len(os.sched_getaffinity(0))), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count) as pool:

            def each(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
                working = deque[Future[R]]()
                for item in items:
                    working.append(pool.submit(function, item))
                    if len(working) > count:
                        yield working.popleft().result()
                while working:
                    yield working.popleft().result()

            yield each
    finally:
        torch.set_num_threads(before)


def entries(source: Directory) -> dict[str, Entry]:
    """All tensors of a directory, whose headers have been checked."""
    headers: dict[Path, tuple[int, dict[str, Any]]] = {}
    found = {}
    for name, file in source.files.items():
        if file not in headers:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                headers[file] = 8 + length, json.loads(opened.read(length))
        first, header = headers[file]
        raw = header[source.stored[name]]
        start, end = raw["data_offsets"]
        found[name] = Entry(raw["dtype"], tuple(raw["shape"]), end - start, file, first + start)
    return found


class Output:
    """New safetensors files in a folder, with an index where they are several. Each tensor is written from its first
    byte to its last, in any number of pieces; the tensors in any order. A thread writes: what it could not write is
    raised by a later piece, or at the end.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Spec], file_bytes: int = FILE_BYTES) -> None:
        parts: list[dict[str, Spec]] = [{}]
        for name, spec in tensors.items():
            if parts[-1] and sum(each.size for each in parts[-1].values()) + spec.size > file_bytes:
                parts.append({})
            parts[-1][name] = spec
        self._opened, self._left = ExitStack(), {name: spec.size for name, spec in tensors.items()}
        self._thread, self._writing = ThreadPoolExecutor(1), deque[Future[None]]()
        self._places: dict[str, tuple[int, int]] = {}  # a file's descriptor, and where the next byte goes
        table: dict[str, str] = {}
        for number, part in enumerate(parts, 1):
            many = f"model-{number:05}-of-{len(parts):05}.safetensors"
            file = folder / (SINGLE if len(parts) == 1 else many)
            self._begin(file, part)
            table |= dict.fromkeys(part, file.name)
        if len(parts) > 1:
            total = sum(spec.size for spec in tensors.values())
            write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": table})

    def _begin(self, file: Path, tensors: Mapping[str, Spec]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        starts, end = {}, 0
        # as safetensors orders them: the widest elements first, so that all begin at multiples of their size
        for name, spec in sorted(tensors.items(), key=lambda pair: (-pair[1].item, pair[0])):
            starts[name] = end
            header[name] = {"dtype": spec.kind, "shape": spec.shape, "data_offsets": [end, end + spec.size]}
            end += spec.size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        opened = self._opened.enter_context(file.open("xb"))
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)
        opened.flush()
        self._places |= {name: (opened.fileno(), 8 + len(text) + start) for name, start in starts.items()}

    def write(self, name: str, piece: Tensor | bytearray) -> None:
        """The next piece of a tensor, which nobody changes any more."""
        raw = memoryview(piece.flatten().view(torch.uint8).numpy().data if isinstance(piece, Tensor) else piece)
        descriptor, at = self._places[name]
        self._left[name] -= len(raw)
        assert self._left[name] >= 0, name
        self._places[name] = descriptor, at + len(raw)
        self._writing.append(self._thread.submit(_write, descriptor, raw, at))
        while len(self._writing) > AHEAD:  # memory does not grow where the disk is slow
            self._writing.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self._thread.shutdown(cancel_futures=kind is not None)  # before files are closed
        self._opened.close()
        for each in self._writing if kind is None else ():
            each.result()
        assert kind is not None or not any(self._left.values()), self._left


def _write(descriptor: int, raw: memoryview, at: int) -> None:
    done = 0
    while done < len(raw):
        done += os.pwrite(descriptor, raw[done:], at + done)
