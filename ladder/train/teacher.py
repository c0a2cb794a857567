"""The original, as its student sees it: a model in memory, or its likeliest tokens on disk."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ladder.config.fields import read_json
from ladder.errors import LadderError
from ladder.files import writable
from ladder.train.folder import write
from ladder.train.log import Progress
from ladder.train.loss import Top, top

KNOWN, ASKED, ANSWERED, LOCK = "teacher.json", "asked.json", "answered.bin", "lock"
LOGS, IDS = "logs.bin", "ids.bin"
KINDS = {LOGS: np.float16, IDS: np.int32}
_AT_ONCE = 8  # rows of a teacher's pass
_SAFE = 16  # passes, after which what was answered is brought to safety


class Teacher(Protocol):
    """Who knows what the original would say."""

    present: bool  # it can be asked about any text

    def answers(self, inputs: dict[str, Tensor], streams: bool = False) -> tuple[Tensor | Top, tuple[Tensor, ...]]:
        """For a batch [rows, tokens]: logits [rows * tokens, vocabulary], or the top of them; and where `streams` are
        wanted the stream after each layer.
        """
        ...


class Present:
    """The original itself, frozen, beside its student."""

    present = True

    def __init__(self, model: Any) -> None:
        self._model = model.eval().requires_grad_(False)

    def answers(self, inputs: dict[str, Tensor], streams: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
        tokens = inputs["input_ids"]
        if self._model.device != tokens.device:
            self._model.to(tokens.device)
        with torch.no_grad():
            said = self._model(input_ids=tokens, use_cache=False, output_hidden_states=streams)
        return said.logits.flatten(0, 1), said.hidden_states[1:] if streams else ()


class Remembered:
    """What was kept on disk comes with the batch."""

    present = False

    def answers(self, inputs: dict[str, Tensor], streams: bool = False) -> tuple[Top, tuple[Tensor, ...]]:
        return Top(inputs["teacher_logs"].flatten(0, 1).float(), inputs["teacher_ids"].flatten(0, 1).long()), ()


class Memory(Dataset[dict[str, Tensor]]):
    """Windows with the top of the teacher's answers: [window, k] log-probabilities and ids beside the tokens.

    Two flat files and `teacher.json`, which is written last. Until then `asked.json` stands in its place, and
    `answered.bin` has a byte for each pass that was made: what was asked is not asked again.
    """

    def __init__(self, windows: Any, folder: Path) -> None:
        self._windows, self._folder = windows, folder
        facts = read_json(folder / KNOWN)
        self._shape = (len(windows), int(facts["window"]), int(facts["top"]))
        self._files: tuple[Any, Any] | None = None
        try:
            _open(folder, self._shape)
        except (OSError, ValueError):
            raise LadderError(f"{folder} is damaged: remove it, and the original is asked again") from None

    def __len__(self) -> int:
        return len(self._windows)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_files": None}  # another process opens them for itself

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self._files is None:
            self._files = _open(self._folder, self._shape)
        logs, ids = (torch.from_numpy(np.array(file[index])) for file in self._files)
        return {**self._windows[index], "teacher_logs": logs, "teacher_ids": ids}


def _open(folder: Path, shape: tuple[int, ...]) -> tuple[Any, Any]:
    logs, ids = (np.memmap(folder / name, kind, "r", shape=shape) for name, kind in KINDS.items())
    return logs, ids


@dataclass(frozen=True)
class Ranks:
    """Those that ask together, and where they meet."""

    rank: int = 0
    count: int = 1
    meet: Callable[[], None] = lambda: None


class Questions:
    """About every window, asked once, by each rank about its share. What lies in the folder of the same facts is taken
    as it is, and where it is complete the original is not even loaded. Whatever can be refused is, when this is made:
    by all ranks alike, and before anything is written.
    """

    def __init__(
        self, windows: Any, folder: Path, count: int, facts: dict[str, Any], ranks: Ranks | None = None
    ) -> None:
        self._windows, self._folder, self._count, self._ranks = windows, folder, count, ranks or Ranks()
        self._window, self._passes = len(windows[0]["input_ids"]), -(-len(windows) // _AT_ONCE)
        asked = {"top": count, "windows": len(windows), "window": self._window, "sample": _sample(windows)}
        self._facts = {**facts, **asked}
        if self._holds(KNOWN):
            Memory(windows, folder)  # which refuses what is damaged
        else:
            self._check()

    def answers(self, original: Callable[[], Any], progress: Progress) -> Memory:
        """All of them; what is missing is asked now."""
        folder, first, meet = self._folder, self._ranks.rank == 0, self._ranks.meet
        with ExitStack() as stack:
            if first and not (folder / KNOWN).exists():
                stack.enter_context(_owned(folder))
                if not self._holds(KNOWN) and not self._begun():
                    self._begin()
            meet()
            if not (folder / KNOWN).exists():
                if not self._begun():
                    raise LadderError(f"this rank does not see {folder} as others do: all machines must")
                before = (folder / ANSWERED).read_bytes()
                meet()  # until then all read the same there
                self._ask(original(), before, progress)
                meet()
                if first:
                    if not all((folder / ANSWERED).read_bytes()):
                        raise LadderError(f"some ranks' answers are not in {folder}: all machines must see it")
                    write(folder / KNOWN, json.dumps(self._facts))
                meet()
            if first:
                for name in (ASKED, ANSWERED):
                    (folder / name).unlink(missing_ok=True)
        return Memory(self._windows, folder)

    def _check(self) -> None:
        there = writable(self._folder)
        if there == self._folder.absolute():
            _refuse_locked(there)
            found = {file.name for file in there.iterdir()} - {LOCK, f"{ASKED}.partial"}
            if not self._holds(ASKED) and found and found != KINDS.keys():  # of an earlier version, begun
                raise LadderError(f"{there} holds something else than a teacher's answers: name another --teacher")
        need, free = len(self._windows) * self._window * self._count * 6, shutil.disk_usage(there).free
        if not self._begun() and need > free:
            raise LadderError(
                f"the teacher's answers need {need / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB: lower --teacher-top"
            )

    def _holds(self, name: str) -> bool:
        """Whether these answers are there, or begun; what an earlier version did not note is not asked for."""
        if not (self._folder / name).exists():
            return False
        found = read_json(self._folder / name)
        for fact in found.keys() & self._facts.keys():
            if found[fact] != self._facts[fact]:
                raise LadderError(
                    f"{self._folder} holds other answers, of {fact} {found[fact]} instead of {self._facts[fact]}: name "
                    "another --teacher, or remove it if nobody needs it"
                )
        return True

    def _begun(self) -> bool:
        file = self._folder / ANSWERED
        return self._holds(ASKED) and file.exists() and file.stat().st_size == self._passes

    def _begin(self) -> None:
        write(self._folder / ASKED, json.dumps(self._facts))
        for name in KINDS:
            (self._folder / name).write_bytes(b"")
        write(self._folder / ANSWERED, "\0" * self._passes)

    def _ask(self, model: Any, before: bytes, progress: Progress) -> None:
        """This rank's share of what was not answered before. An answer counts once it is safe on the disk."""
        ranks, windows = self._ranks, self._windows
        left = [at for at, known in enumerate(before) if not known][ranks.rank :: ranks.count]
        rest = ranks.count * len(left)
        with _still(model), ExitStack() as stack:
            files = {name: stack.enter_context((self._folder / name).open("r+b")) for name in (*KINDS, ANSWERED)}
            for some in (left[at : at + _SAFE] for at in range(0, len(left), _SAFE)):
                for at in some:
                    rows = range(at * _AT_ONCE, min((at + 1) * _AT_ONCE, len(windows)))
                    tokens = torch.stack([windows[row]["input_ids"] for row in rows]).to(model.device)
                    found = [top(said, self._count) for said in model(input_ids=tokens, use_cache=False).logits]
                    values = {LOGS: [each.logs for each in found], IDS: [each.ids for each in found]}
                    for name, kind in KINDS.items():
                        files[name].seek(rows.start * self._window * self._count * np.dtype(kind).itemsize)
                        files[name].write(torch.stack(values[name]).cpu().numpy().astype(kind).tobytes())
                    rest -= ranks.count
                    progress(min(len(windows), (len(before) - rest) * _AT_ONCE), len(windows), "asking the original")
                for name in KINDS:
                    files[name].flush()
                    os.fsync(files[name].fileno())
                for at in some:
                    files[ANSWERED].seek(at)
                    files[ANSWERED].write(b"\1")
                files[ANSWERED].flush()


def _sample(windows: Any) -> str:
    """Which windows they are, as far as some of them tell."""
    found = hashlib.sha256()
    for at in np.linspace(0, len(windows) - 1, min(64, len(windows))).astype(int):
        found.update(np.asarray(windows[int(at)]["input_ids"]).astype("<i8").tobytes())
    return found.hexdigest()[:16]


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """One run at a time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a")
    except OSError as error:
        raise LadderError(f"the teacher's answers cannot be written: {error}") from None
    with file:
        _lock(file, fcntl.LOCK_EX, folder)
        yield


def _refuse_locked(folder: Path) -> None:
    if (folder / LOCK).exists():
        with (folder / LOCK).open() as file:
            _lock(file, fcntl.LOCK_SH, folder)


def _lock(file: Any, kind: int, folder: Path) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LadderError(f"another run is asking the original for {folder}: wait until it has") from None


@contextmanager
def _still(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    with torch.inference_mode():
        yield
    model.train(training)
