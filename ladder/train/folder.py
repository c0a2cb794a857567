"""The folder of a run: its options, its progress, and in the end the model. Files in it are written atomically.

run.json       the options, and digests of the model and the data; a run is continued only with the same
log.jsonl      a line for every logged step and evaluation
fitted/        what `ladder fit` makes of the weights, where a run begins with that
checkpoints/   a complete one can be resumed from; removed when the run is finished
teacher/       with --teacher-top: the cache of the original's logits, unless --teacher names another folder
config.json    and the other files of a model: written last, when everything is done
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from ladder.config.fields import read_json
from ladder.engine.executors.torchrun import torchrun_rank
from ladder.errors import LadderError
from ladder.files import check_unlocked, locked, writable, write_json
from ladder.train.options import AdaptOptions, ScratchOptions, TrainingOptions

RUN, CHECKPOINTS, FINAL, FINISHED = "run.json", "checkpoints", "final.partial", "finished"
FITTED = "fitted"
CONTENTS, _EDGE = "contents", 1 << 16
COMPLETE = "complete"  # a file in a checkpoint that all ranks have written: the sizes of the others
_FREE = {"keep", "out"}  # what may change from one start to the next
_RENAMED = {"window": "seq_len", "micro": "micro_batch_size", "begin": "init_from", "rank": "lora_rank"}
_DEFAULTS = {  # of options that were added after a run was started
    entry.name: entry.default
    for kind in (TrainingOptions, AdaptOptions, ScratchOptions)
    for entry in fields(kind)
    if entry.default is not MISSING
} | {"lm_weight": 0.0, "fit_tokens": 0}  # as they were then
_NEW_DEFAULTS = ("batch", "lr", "warmup", "weight_decay", "lm_weight", "fit_tokens")  # in `ladder adapt`


def described(*options: Any, **folders: Path | None) -> dict[str, Any]:
    """Options as run.json has them, and digests of the named folders."""
    found: dict[str, Any] = {}
    for group in options:
        found |= {name: str(value) if isinstance(value, Path) else value for name, value in asdict(group).items()}
    held = {name: digest(folder) for name, folder in folders.items() if folder is not None and folder.exists()}
    return {**{name: value for name, value in found.items() if name not in _FREE}, CONTENTS: held}


def digest(path: Path) -> str:
    """Of the names, lengths and edges of a folder's files, or of a file: another text or model under the same name has
    another.
    """
    found = hashlib.sha256()
    files = path.iterdir() if path.is_dir() else (path,)
    for file in sorted(each for each in files if each.suffix in (".json", ".bin", ".safetensors")):
        size = file.stat().st_size
        found.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            found.update(opened.read(_EDGE))
            opened.seek(max(0, size - _EDGE))
            found.update(opened.read(_EDGE))
    return found.hexdigest()[:16]


def check(out: Path, wanted: dict[str, Any]) -> None:
    """Refuse a folder that is something else, a run of other options, or one that is finished."""
    if out.exists() and not out.is_dir():
        raise LadderError(f"{out} is a file: name a new folder")
    writable(out)
    if not out.exists() or not any(out.iterdir()):
        return
    own = torchrun_rank()
    if own is None or own.rank == 0:
        check_unlocked(out)
    if not (out / RUN).exists():
        raise LadderError(f"{out} is there already, and no run of ours: name a new folder")
    before = _read_run(out)
    differing = {
        name: (was, value)
        for name, value in json.loads(json.dumps(wanted)).items()
        if name != CONTENTS and (was := before.get(name, _DEFAULTS.get(name))) != value
    }
    changed = [name for name in _NEW_DEFAULTS if name in differing]
    if changed and "fit_tokens" in wanted and "fit_tokens" not in before:
        same = " ".join(f"--{name.replace('_', '-')} {differing[name][0]}" for name in changed)
        raise LadderError(f"{out} was begun when defaults were others: add {same} to continue it, or name a new folder")
    for name, (was, value) in differing.items():
        flag = name.replace("_", "-")
        raise LadderError(f"{out} is a run with {flag} {was}, not {value}: give the same, or name a new folder")
    for name, value in wanted[CONTENTS].items():
        if before.get(CONTENTS, {}).get(name) != value:
            raise LadderError(f"{wanted[name]} has changed since {out} was started: name a new folder")
    if before.get(FINISHED):
        raise _finished(out)


def _finished(out: Path) -> LadderError:
    return LadderError(f"{out} is finished: name a new folder (and --init-from {out}, to train it further)")


def _read_run(out: Path) -> dict[str, Any]:
    """run.json, its keys under their present names."""
    found = {_RENAMED.get(name, name): value for name, value in read_json(out / RUN).items()}
    held = found.get(CONTENTS, {})
    return {**found, CONTENTS: {_RENAMED.get(name, name): value for name, value in held.items()}}


def finished(out: Path) -> bool:
    return (out / RUN).exists() and bool(read_json(out / RUN).get(FINISHED))


@contextmanager
def owned(out: Path, wanted: dict[str, Any]) -> Iterator[None]:
    """The run's folder, begun or continued: no other process writes it while the block runs."""
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        if finished(out):
            raise _finished(out)
        for left in out.glob(f"{FINAL}*"):  # by a run that was killed at its end
            shutil.rmtree(left, ignore_errors=True)
        write_json(out / RUN, wanted)
        yield


def finish(out: Path) -> None:
    """The files in `final.partial` become the folder's own; config.json, which makes it a model, comes last."""
    final = out / FINAL
    for file in sorted(final.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(file, out / file.name)
    final.rmdir()
    write_json(out / RUN, {**read_json(out / RUN), FINISHED: True})
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)


def mark_complete(checkpoint: Path) -> None:
    """All ranks have written it: it can be resumed from."""
    written = {str(path.relative_to(checkpoint)): path for path in checkpoint.rglob("*") if path.is_file()}
    for path in written.values():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    write_json(checkpoint / COMPLETE, {name: path.stat().st_size for name, path in written.items()})


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that can be resumed from, oldest first."""
    found = [path.parent for path in folder.glob(f"checkpoint-*/{COMPLETE}")]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint to resume from. A damaged one is refused: the run must not silently start anew."""
    if not (found := complete_checkpoints(folder)):
        return None
    for name, size in _sizes(found[-1]).items():
        file = found[-1] / name
        if (held := file.stat().st_size if file.exists() else 0) != size:
            raise _damaged(found[-1], f"{name} has {held} bytes of {size}")
    return found[-1]


def _sizes(checkpoint: Path) -> dict[str, int]:
    """Of a checkpoint's files; none, of one from before they were written down."""
    try:
        found = json.loads((checkpoint / COMPLETE).read_bytes().decode() or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(type(size) is int for size in found.values()):
        raise _damaged(checkpoint, f"{COMPLETE} cannot be read")
    return found


def _damaged(checkpoint: Path, how: str) -> LadderError:
    return LadderError(
        f"{checkpoint} is damaged, {how}: remove it, and the run resumes from the one before it, or starts anew"
    )
