"""The original as a teacher: a model in memory (online), or a cache of its likeliest tokens on disk."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor
from torch.utils.data import Dataset

from ladder.config.fields import read_json
from ladder.errors import LadderError
from ladder.files import writable, write_json, write_text
from ladder.progress import Progress
from ladder.train.head import Head, Logits, chunks
from ladder.train.loss import TopTokens, top_tokens

COMPLETE, STARTED, DONE, LOCK = "teacher.json", "asked.json", "answered.bin", "lock"
LOG_PROBS, IDS = "logs.bin", "ids.bin"
KINDS = {LOG_PROBS: np.float16, IDS: np.int32}
_BATCH = 8  # sequences of a teacher's pass
_FLUSH_EVERY = 16  # passes
_LOCK_SECONDS = 1.0  # the ranks of a run look at the lock one after the other; a builder holds it much longer


class Teacher(Protocol):
    """The original's logits for a batch."""

    online: bool  # it can evaluate any text
    model: Any  # which runs in every step; None: none does

    def outputs(
        self, inputs: dict[str, Tensor], streams: bool = False
    ) -> tuple[Tensor | TopTokens | Logits, tuple[Tensor, ...]]:
        """For a batch [sequences, tokens]: logits [sequences * tokens, vocabulary], or the top of them; and with
        `streams` the residual stream after each layer.
        """
        ...


class OnlineTeacher:
    """The original itself, frozen, beside its student."""

    online = True

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self._head = Head(model, tells=False)  # its student does

    def outputs(self, inputs: dict[str, Tensor], streams: bool = False) -> tuple[Tensor | Logits, tuple[Tensor, ...]]:
        tokens = inputs["input_ids"]
        if self.model.device != tokens.device:
            self.model.to(tokens.device)

        def run(tokens: Tensor) -> Any:
            return self.model(input_ids=tokens, use_cache=False, output_hidden_states=streams)

        with torch.no_grad():
            found, logits = self._head.logits(run, tokens)
        return logits, found.hidden_states[1:] if streams else ()


class CachedTeacher:
    """The top of the logits, which `TeacherCache` puts into each batch."""

    online = False
    model = None

    def outputs(self, inputs: dict[str, Tensor], streams: bool = False) -> tuple[TopTokens, tuple[Tensor, ...]]:
        log_probs, ids = (inputs[name].flatten(0, 1) for name in ("teacher_log_probs", "teacher_ids"))
        return TopTokens(log_probs.float(), ids.long()), ()


class TeacherCache(Dataset[dict[str, Tensor]]):
    """Sequences with the top of the teacher's logits: [tokens, k] log-probabilities and ids beside the tokens.

    Two flat files and `teacher.json`, which is written last. Until then `asked.json` stands in its place, and
    `answered.bin` has a byte for each pass, 1 when its results are on disk: an interrupted build is continued.
    """

    def __init__(self, sequences: Any, folder: Path) -> None:
        self._sequences, self._folder = sequences, folder
        facts = read_json(folder / COMPLETE)
        self._shape = (len(sequences), int(facts["window"]), int(facts["top"]))
        self._files: tuple[Any, Any] | None = None
        try:
            _open(folder, self._shape)
        except (OSError, ValueError):
            raise LadderError(f"{folder} is damaged: remove it, and it is built again") from None

    def __len__(self) -> int:
        return len(self._sequences)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_files": None}  # another process opens them for itself

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self._files is None:
            self._files = _open(self._folder, self._shape)
        log_probs, ids = (torch.from_numpy(np.array(file[index])) for file in self._files)
        return {**self._sequences[index], "teacher_log_probs": log_probs, "teacher_ids": ids}


def _open(folder: Path, shape: tuple[int, ...]) -> tuple[Any, Any]:
    log_probs, ids = (np.memmap(folder / name, kind, "r", shape=shape) for name, kind in KINDS.items())
    return log_probs, ids


@dataclass(frozen=True)
class RankGroup:
    """The ranks that build a cache together."""

    rank: int = 0
    size: int = 1
    barrier: Callable[[], None] = lambda: None


class CacheBuilder:
    """Runs the original once over every sequence, each rank over its share. A folder of the same facts is reused, and
    where it is complete the original is not even loaded. The constructor makes all checks, on all ranks alike, before
    anything is written.
    """

    def __init__(
        self, sequences: Any, folder: Path, count: int, facts: dict[str, Any], ranks: RankGroup | None = None
    ) -> None:
        self._sequences, self._folder, self._count, self._ranks = sequences, folder, count, ranks or RankGroup()
        self._seq_len, self._passes = len(sequences[0]["input_ids"]), -(-len(sequences) // _BATCH)
        # "windows" and "window": the keys of the format on disk
        own = {"top": count, "windows": len(sequences), "window": self._seq_len, "sample": _sample(sequences)}
        self._facts = {**facts, **own}
        if self._matches(COMPLETE):
            TeacherCache(sequences, folder)  # which refuses a damaged one
        else:
            self._check()

    def build(self, load_original: Callable[[], Any], progress: Progress) -> TeacherCache:
        """The complete cache; what is missing is computed now."""
        folder, first, barrier = self._folder, self._ranks.rank == 0, self._ranks.barrier
        with ExitStack() as stack:
            if first and not (folder / COMPLETE).exists():
                stack.enter_context(_locked(folder))
                if not self._matches(COMPLETE) and not self._started():
                    self._start()
            barrier()
            if not (folder / COMPLETE).exists():
                if not self._started():
                    raise LadderError(f"this rank does not see {folder} as others do: all machines must")
                before = (folder / DONE).read_bytes()
                barrier()  # until then all ranks read the same there
                self._run(load_original(), before, progress)
                barrier()
                if first:
                    if not all((folder / DONE).read_bytes()):
                        raise LadderError(f"some ranks' results are not in {folder}: all machines must see it")
                    write_json(folder / COMPLETE, self._facts)
                barrier()
            if first:
                for name in (STARTED, DONE):
                    (folder / name).unlink(missing_ok=True)
        return TeacherCache(self._sequences, folder)

    def _check(self) -> None:
        there = writable(self._folder)
        if there == self._folder.absolute():
            if (there / LOCK).exists():
                with _locked(there):
                    pass
            found = {file.name for file in there.iterdir()} - {LOCK, f"{STARTED}.partial"}
            if not self._matches(STARTED) and found and found != KINDS.keys():  # started by an earlier version
                raise LadderError(f"{there} holds something else than a teacher's cache: name another --teacher")
        need, free = len(self._sequences) * self._seq_len * self._count * 6, shutil.disk_usage(there).free
        if not self._started() and need > free:
            raise LadderError(
                f"the teacher's cache needs {need / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB: lower --teacher-top"
            )

    def _matches(self, name: str) -> bool:
        """Whether a file of these facts is there. Other facts are refused; facts that an earlier version did not write
        are not compared.
        """
        if not (self._folder / name).exists():
            return False
        found = read_json(self._folder / name)
        for fact in found.keys() & self._facts.keys():
            if found[fact] != self._facts[fact]:
                raise LadderError(
                    f"{self._folder} is another cache, of {fact} {found[fact]} instead of {self._facts[fact]}: name "
                    "another --teacher, or remove it if it is not needed"
                )
        return True

    def _started(self) -> bool:
        file = self._folder / DONE
        return self._matches(STARTED) and file.exists() and file.stat().st_size == self._passes

    def _start(self) -> None:
        write_json(self._folder / STARTED, self._facts)
        for name in KINDS:
            (self._folder / name).write_bytes(b"")
        write_text(self._folder / DONE, "\0" * self._passes)

    def _run(self, model: Any, before: bytes, progress: Progress) -> None:
        """This rank's share of the passes that are not done. A pass is done once its results are on the disk."""
        ranks, sequences = self._ranks, self._sequences
        left = [at for at, done in enumerate(before) if not done][ranks.rank :: ranks.size]
        rest = ranks.size * len(left)
        teacher = OnlineTeacher(model)
        with ExitStack() as stack:
            files = {name: stack.enter_context((self._folder / name).open("r+b")) for name in (*KINDS, DONE)}
            for some in (left[at : at + _FLUSH_EVERY] for at in range(0, len(left), _FLUSH_EVERY)):
                for at in some:
                    batch = range(at * _BATCH, min((at + 1) * _BATCH, len(sequences)))
                    tokens = torch.stack([sequences[index]["input_ids"] for index in batch]).to(model.device)
                    logits, _ = teacher.outputs({"input_ids": tokens})
                    parts = chunks(logits.shape, tokens.device)
                    tops = [top_tokens(logits[part], self._count) for part in parts]
                    values = {LOG_PROBS: [top.log_probs for top in tops], IDS: [top.ids for top in tops]}
                    for name, kind in KINDS.items():
                        files[name].seek(batch.start * self._seq_len * self._count * np.dtype(kind).itemsize)
                        files[name].write(torch.cat(values[name]).cpu().numpy().astype(kind).tobytes())
                    rest -= ranks.size
                    done = min(len(sequences), (len(before) - rest) * _BATCH)
                    progress(done, len(sequences), "running the original")
                for name in KINDS:
                    files[name].flush()
                    os.fsync(files[name].fileno())
                for at in some:
                    files[DONE].seek(at)
                    files[DONE].write(b"\1")
                files[DONE].flush()


def _sample(sequences: Any) -> str:
    """A digest of some of the sequences."""
    found = hashlib.sha256()
    for at in np.linspace(0, len(sequences) - 1, min(64, len(sequences))).astype(int):
        found.update(np.asarray(sequences[int(at)]["input_ids"]).astype("<i8").tobytes())
    return found.hexdigest()[:16]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One builder at a time."""
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_LOCK_SECONDS)
    except Timeout:  # which is an OSError too
        raise LadderError(f"another run is building the teacher's cache {folder}: wait until it has") from None
    except OSError as error:
        raise LadderError(f"the teacher's cache cannot be written: {error}") from None
    try:
        yield
    finally:
        lock.release()
