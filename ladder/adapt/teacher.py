"""The original, as its student sees it: a model in memory, or its likeliest tokens on disk."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ladder.adapt.log import Progress
from ladder.adapt.loss import Top, top
from ladder.config.fields import read_json
from ladder.errors import LadderError

_AT_ONCE = 8  # rows of a teacher's pass


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

    Two flat files and `teacher.json`, which is written last: a folder without it is begun anew.
    """

    def __init__(self, windows: Any, folder: Path) -> None:
        self._windows, self._folder = windows, folder
        facts = read_json(folder / "teacher.json")
        self._shape = (len(windows), int(facts["window"]), int(facts["top"]))
        self._files: tuple[Any, Any] | None = None
        try:
            _open(folder, self._shape, "r")
        except (OSError, ValueError):
            raise LadderError(f"{folder} is damaged: remove it, and the original is asked again") from None

    def __len__(self) -> int:
        return len(self._windows)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_files": None}  # another process opens them for itself

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self._files is None:
            self._files = _open(self._folder, self._shape, "r")
        logs, ids = (torch.from_numpy(np.array(file[index])) for file in self._files)
        return {**self._windows[index], "teacher_logs": logs, "teacher_ids": ids}


def _open(folder: Path, shape: tuple[int, ...], mode: Any) -> tuple[Any, Any]:
    kinds = (("logs.bin", np.float16), ("ids.bin", np.int32))
    logs, ids = (np.memmap(folder / name, kind, mode, shape=shape) for name, kind in kinds)
    return logs, ids


def remember(
    original: Callable[[], Any], windows: Any, folder: Path, count: int, facts: dict[str, Any], progress: Progress
) -> Memory:
    """Ask the teacher about every window, once; what lies in `folder` of the same `facts` is taken as it is, and the
    original not even loaded.
    """
    facts = {**facts, "top": count, "windows": len(windows), "window": len(windows[0]["input_ids"])}
    known = folder / "teacher.json"
    if known.exists():
        if read_json(known) != facts:
            raise LadderError(f"{folder} holds the answers of another teacher or to other data: remove it")
        return Memory(windows, folder)
    shape = (facts["windows"], facts["window"], count)
    need, free = shape[0] * shape[1] * shape[2] * 6, shutil.disk_usage(_there(folder)).free
    if need > free:
        raise LadderError(
            f"the teacher's answers need {need / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB: lower --teacher-top"
        )
    folder.mkdir(parents=True, exist_ok=True)
    model = original()
    logs, ids = _open(folder, shape, "w+")
    with _still(model):
        for at in range(0, len(windows), _AT_ONCE):
            rows = range(at, min(at + _AT_ONCE, len(windows)))
            tokens = torch.stack([windows[row]["input_ids"] for row in rows]).to(model.device)
            for row, said in zip(rows, model(input_ids=tokens, use_cache=False).logits, strict=True):
                found = top(said, count)
                logs[row], ids[row] = found.logs.half().cpu().numpy(), found.ids.int().cpu().numpy()
            progress(rows.stop, len(windows), "asking the original")
    logs.flush()
    ids.flush()
    partial = folder / "teacher.json.partial"
    partial.write_text(json.dumps(facts), encoding="utf-8")
    os.replace(partial, known)
    return Memory(windows, folder)


def _there(folder: Path) -> Path:
    return next(path for path in (folder, *folder.resolve().parents) if path.exists())


@contextmanager
def _still(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    with torch.inference_mode():
        yield
    model.train(training)
