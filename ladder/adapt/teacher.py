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

from ladder.adapt.folder import write
from ladder.adapt.log import Progress
from ladder.adapt.loss import Top, top
from ladder.config.fields import read_json
from ladder.errors import LadderError

KNOWN, ASKED, ANSWERED = "teacher.json", "asked.json", "answered.bin"
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


def remember(
    original: Callable[[], Any],
    windows: Any,
    folder: Path,
    count: int,
    facts: dict[str, Any],
    progress: Progress,
    ranks: Ranks | None = None,
) -> Memory:
    """Ask the teacher about every window, once, each rank about its share. What lies in `folder` of the same `facts` is
    taken as it is, and where it is complete the original not even loaded.
    """
    ranks = ranks or Ranks()
    facts = {**facts, "top": count, "windows": len(windows), "window": len(windows[0]["input_ids"])}
    facts["sample"] = _sample(windows)
    if not _holds(folder / KNOWN, facts) and not _holds(folder / ASKED, facts):
        need, free = len(windows) * facts["window"] * count * 6, shutil.disk_usage(_there(folder)).free
        if need > free:
            raise LadderError(
                f"the teacher's answers need {need / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB: lower --teacher-top"
            )
    ranks.meet()  # until then the others look at what is there
    with ExitStack() as stack:
        if ranks.rank == 0 and not (folder / KNOWN).exists():
            stack.enter_context(_owned(folder))
            if not _holds(folder / KNOWN, facts) and not _holds(folder / ASKED, facts):
                _begin(folder, len(windows), facts)
        ranks.meet()
        if not (folder / KNOWN).exists():
            before = (folder / ANSWERED).read_bytes()
            ranks.meet()  # until then all read the same there
            _ask(original(), windows, folder, count, before, progress, ranks)
            ranks.meet()
            if ranks.rank == 0:
                _end(folder, facts)
            ranks.meet()
    return Memory(windows, folder)


def _begin(folder: Path, windows: int, facts: dict[str, Any]) -> None:
    for name in (*KINDS, ANSWERED):
        (folder / name).write_bytes(b"")
    os.truncate(folder / ANSWERED, -(-windows // _AT_ONCE))
    write(folder / ASKED, json.dumps(facts))


def _end(folder: Path, facts: dict[str, Any]) -> None:
    if not all((folder / ANSWERED).read_bytes()):
        raise LadderError(f"not all ranks' answers are in {folder}: it must be one that all machines see")
    write(folder / KNOWN, json.dumps(facts))
    for name in (ASKED, ANSWERED):
        (folder / name).unlink()


def _ask(model: Any, windows: Any, folder: Path, count: int, before: bytes, progress: Progress, ranks: Ranks) -> None:
    """This rank's share of what was not answered before. An answer counts once it is safe on the disk."""
    left = [at for at, known in enumerate(before) if not known][ranks.rank :: ranks.count]
    rest = ranks.count * len(left)
    with _still(model), ExitStack() as stack:
        files = {name: stack.enter_context((folder / name).open("r+b")) for name in (*KINDS, ANSWERED)}
        for some in (left[at : at + _SAFE] for at in range(0, len(left), _SAFE)):
            for at in some:
                rows = range(at * _AT_ONCE, min((at + 1) * _AT_ONCE, len(windows)))
                tokens = torch.stack([windows[row]["input_ids"] for row in rows])
                said = model(input_ids=tokens.to(model.device), use_cache=False).logits
                found = [top(each, count) for each in said]
                answers = {LOGS: [each.logs for each in found], IDS: [each.ids for each in found]}
                for name, kind in KINDS.items():
                    files[name].seek(rows.start * tokens.shape[1] * count * np.dtype(kind).itemsize)
                    files[name].write(torch.stack(answers[name]).cpu().numpy().astype(kind).tobytes())
                rest -= ranks.count
                progress(min(len(windows), (len(before) - rest) * _AT_ONCE), len(windows), "asking the original")
            for name in KINDS:
                files[name].flush()
                os.fsync(files[name].fileno())
            for at in some:
                files[ANSWERED].seek(at)
                files[ANSWERED].write(b"\1")
            files[ANSWERED].flush()


def _holds(file: Path, facts: dict[str, Any]) -> bool:
    """Whether these answers are there, or begun; what an earlier version did not note is not asked for."""
    if not file.exists():
        return False
    if not read_json(file).items() <= facts.items():
        raise LadderError(f"{file.parent} holds the answers of another teacher or to other data: remove it")
    return True


def _sample(windows: Any) -> str:
    """Which windows they are, as far as some of them tell."""
    found = hashlib.sha256()
    for at in np.linspace(0, len(windows) - 1, min(64, len(windows))).astype(int):
        found.update(np.asarray(windows[int(at)]["input_ids"]).astype("<i8").tobytes())
    return found.hexdigest()[:16]


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """One run at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LadderError(f"another run is asking the original for {folder}: wait until it has") from None
        yield


def _there(folder: Path) -> Path:
    return next(path for path in (folder, *folder.resolve().parents) if path.exists())


@contextmanager
def _still(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    with torch.inference_mode():
        yield
    model.train(training)
