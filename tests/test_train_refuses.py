"""What ladder train refuses: one sentence each, and nothing is begun."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ladder.errors import LadderError
from ladder.train import run
from ladder.train import trainer as module
from ladder.train.options import ScratchOptions, TrainingOptions
from ladder.train.scratch import train
from tests import training as tiny
from tests.training import silent, training


@pytest.mark.parametrize("own, changes, message", [
    ({"size": "huge"}, {}, "unknown size 'huge': known are 1B"),
    ({"size": None}, {}, "give either --size or --recipe; recipes are paper-1B"),
    ({"recipe": "50M"}, {}, "give either --size or --recipe"),
    ({"size": None, "recipe": "soup"}, {}, "unknown recipe 'soup': known are paper-1B"),
    ({"wiring": "rope"}, {}, "unknown wiring 'rope'"),
    ({"wiring": "none", "ranks": 2}, {}, "ends with partial sums that are kept local"),
    ({"wiring": "desync-2x"}, {}, "keeps partial sums local, which is another model at every TP degree: give --ranks"),
    ({"wiring": "none"}, {}, "keeps partial sums local"),
    ({"ranks": 3}, {}, "3 ranks cannot share 8 heads"),
    ({}, {"seq_len": 1024, "batch": 1}, "--seq-len 1024 is more than the model's context of 512"),
    ({}, {"batch": 500}, r"has \d+ tokens: a step needs 8000, and an evaluation \d+ of them; give more data"),
    ({}, {"batch": 500, "valid": "data"}, r"has \d+ tokens, a step needs 8000: give more data, or a smaller --batch"),
    ({}, {"batch": 10, "micro_batch_size": 4}, "10 sequences of a rank are no multiple of --micro-batch-size 4"),
    ({}, {"valid": "other"}, "other was tokenized with another tokenizer than .*/tokenizer's"),
    ({}, {"data": "nothing"}, "no such folder of tokens: .*nothing; ladder data makes one"),
    ({}, {"data": "empty"}, "empty has no shards.json: name a folder that ladder data made"),
    ({}, {"data": "cut"}, r"shard-00000.bin is damaged: it has 100 bytes, not \d+; run ladder data again"),
    ({}, {"fsdp": True}, "--fsdp shards over ranks, and there is one: start it with torchrun, or leave --fsdp out"),
])  # fmt: skip
def test_refused(own: dict[str, Any], changes: dict[str, Any], message: str, data: Path, tmp_path: Path) -> None:
    folders = {"data": data, "nothing": tmp_path / "nothing", "empty": tmp_path / "empty", "cut": tmp_path / "cut"}
    folders["empty"].mkdir()
    if changes.get("data") == "cut":
        tiny.tokens(folders["cut"])
        with (folders["cut"] / "shard-00000.bin").open("r+b") as file:
            file.truncate(100)
    if changes.get("valid") == "other":
        folders["other"] = tiny.tokens(tmp_path / "other", seed=2, vocab=280)
    changes = {name: folders[value] if isinstance(value, str) else value for name, value in changes.items()}
    with pytest.raises(LadderError, match=message) as refused:
        train(
            ScratchOptions(tmp_path / "out", **{"size": "tiny", **own}), training(**{"data": data, **changes}), silent
        )
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes, message", [
    ({"schedule": "triangle"}, "unknown schedule 'triangle': known are cosine, linear, constant"),
    ({"dtype": "float16"}, "unknown dtype 'float16'"),
    ({"compile": "maybe"}, "unknown compile 'maybe'"),
    ({"device": "tpu"}, "unknown device 'tpu'"),
    ({"tokens": 0}, "tokens must be at least 1, not 0"),
    ({"seq_len": 1}, "seq-len must be at least 2, not 1"),
    ({"save_every": 0}, "save-every must be at least 1, not 0"),
    ({"lr": 0.0}, "lr must be a number above 0 and at most 10.0, not 0.0"),
    ({"lr": math.nan}, "lr must be a number above 0"),
    ({"weight_decay": -0.1}, "weight-decay must be a number from 0 to 10.0, not -0.1"),
    ({"warmup": 1.0}, "warmup must be from 0 to below 1, not 1.0"),
    ({"seed": -1}, r"seed must be from 0 to 2\^32 - 1, not -1"),
    ({"batch": 1.5}, "batch must be int, not 1.5"),
])  # fmt: skip
def test_refused_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LadderError, match=message):
        TrainingOptions(**changes)


def test_a_batch_that_ranks_cannot_share(data: Path) -> None:
    with pytest.raises(LadderError, match="a batch of 8 sequences cannot be divided evenly by 3 ranks"):
        training(data).micro_batches(3)
    assert training(data, micro_batch_size=3, batch=12).micro_batches(2) == (3, 2)
    assert training(data, micro_batch_size=30).micro_batches(2) == (4, 1)


def test_a_folder_that_is_something_else(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out, message in ((tmp_path, "there already, and no run of ours"), (tmp_path / "file", "is a file")):
        with pytest.raises(LadderError, match=message):
            train(ScratchOptions(out, size="tiny"), training(data), silent)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_accelerate(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(LadderError, match="training needs accelerate: pip install"):
        train(ScratchOptions(tmp_path / "out", size="tiny"), training(data), silent)
    assert not (tmp_path / "out").exists()


def test_the_original_is_whole_on_every_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of four ranks on one machine, by hand: --fsdp shards what is trained alone."""
    found: list[float] = []
    monkeypatch.setattr(run, "torchrun_rank", lambda: SimpleNamespace(size=4, local_size=4))
    monkeypatch.setattr(run, "check_host", lambda what, need, ways: found.append(need))
    for fsdp in (True, False):
        options = TrainingOptions(data=tmp_path, device="cpu", fsdp=fsdp)
        run.check_memory("m", 10, 16, options, whole=2)
    assert found == [4 * 10 * (16 / 4 + 2), 4 * 10 * (16 + 2)]


def test_a_process_takes_one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of four that it sees: transformers would spread a batch over all, and count one share of its tokens."""
    args = module.arguments(TrainingOptions(data=tmp_path, device="cpu"), tmp_path)
    _ = args.device
    monkeypatch.setattr(args, "_n_gpu", 4)
    assert args.n_gpu == 1 and args.train_batch_size == args.per_device_train_batch_size
