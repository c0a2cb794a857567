"""The original's answers on disk: asked for once, by one rank or several, in one go or not, for one run or several."""

import fcntl
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from ladder.data.shards import Sequences, Shards
from ladder.errors import LadderError
from ladder.train import teacher
from ladder.train.distill import adapt
from ladder.train.head import Head
from ladder.train.teacher import CacheBuilder, RankGroup
from tests import training as tiny
from tests.tolerance import unit
from tests.training import SEQ_LEN, Stop, adapting, distilling, log, same, silent, until, weights

TOP = 3


class Original:
    """A model that counts the sequences that it is asked about. Every rank loads one of its own."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.model = AutoModelForCausalLM.from_config(tiny.config())
        self.loads = self.rows = 0

    def _count(self, module: Any, arguments: Any, named: dict[str, Any], output: Any) -> None:
        tokens = named["input_ids"]
        self.rows += len(tokens) if tokens.shape[1] == SEQ_LEN else 0  # not where a pass of two tokens tells of a head

    def __call__(self) -> Any:
        self.loads += 1
        found = AutoModelForCausalLM.from_config(tiny.config())
        found.load_state_dict(self.model.state_dict())
        found.register_forward_hook(self._count, with_kwargs=True)
        return found


@pytest.fixture
def sequences(data: Path) -> Sequences:
    return Sequences(Shards.open(data), SEQ_LEN)


@pytest.fixture
def original() -> Original:
    return Original()


@pytest.fixture
def build(sequences: Sequences, original: Original, tmp_path: Path) -> Callable[..., Any]:
    def build(
        folder: str = "teacher", count: int = TOP, progress: Any = silent, asked: Any = sequences, weights: str = "a",
        ranks: RankGroup | None = None,
    ) -> Any:  # fmt: skip
        builder = CacheBuilder(asked, tmp_path / folder, count, {"weights": weights}, ranks)
        if ranks is not None:
            ranks.barrier()
        return builder.build(original, progress)

    return build


def together(count: int, work: Callable[[RankGroup], Any]) -> list[str]:
    """What became of each rank: the sentence that it was refused with, or how it ended."""
    barrier, ended = threading.Barrier(count, timeout=60), [""] * count

    def rank(number: int) -> None:
        try:
            work(RankGroup(number, count, barrier.wait))
            ended[number] = "well"
        except (Stop, LadderError, threading.BrokenBarrierError) as error:
            barrier.abort()
            ended[number] = str(error) or type(error).__name__

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(count)]
    # looking at a head sets torch.compile's stance, which is the process's: ranks are processes, and these are threads
    with patch.object(Head, "_reason", lambda *_: None):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return ended


def files(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("logs.bin", "ids.bin")]


def test_the_likeliest_tokens(build: Callable[..., Any], sequences: Sequences, original: Original) -> None:
    found = build()
    for row in (0, 5, len(sequences) - 1):
        said = original.model(input_ids=sequences[row]["input_ids"][None]).logits[0].log_softmax(-1)
        logs, ids = said.topk(TOP)[0], found[row]["teacher_ids"].long()
        assert len(found) == len(sequences) and all(len(set(each)) == TOP for each in ids.tolist())
        # of another batch, so those that are equally likely may have changed places; stored in float16
        torch.testing.assert_close(said.gather(-1, ids), logs, rtol=0, atol=tiny.nats())
        kept = {"rtol": unit(torch.float16), "atol": tiny.nats()}
        torch.testing.assert_close(found[row]["teacher_log_probs"].float(), logs, **kept)


def test_asked_once(build: Callable[..., Any], original: Original, sequences: Sequences, tmp_path: Path) -> None:
    """Not even loaded where its answers are there; other answers, and such as were cut, are refused."""
    first, again = build(), build()
    assert original.loads == 1 and torch.equal(first[3]["teacher_ids"], again[3]["teacher_ids"])
    assert {file.name for file in (tmp_path / "teacher").iterdir()} == {"logs.bin", "ids.bin", "teacher.json", "lock"}
    others = Sequences(Shards.open(tiny.tokens(tmp_path / "other", seed=2)), SEQ_LEN, limit=len(first))
    assert len(others) == len(first)
    for change, fact in (
        ({"weights": "b"}, "weights a instead of b"),
        ({"count": 4}, "top 3"),
        ({"asked": others}, "sample"),
    ):
        with pytest.raises(LadderError, match=f"teacher is another cache, of {fact}.*: name another --teacher"):
            build(**change)
    os.truncate(tmp_path / "teacher/logs.bin", 100)
    with pytest.raises(LadderError, match="teacher is damaged: remove it"):
        CacheBuilder(sequences, tmp_path / "teacher", TOP, {"weights": "a"})
    assert original.loads == 1


def test_what_is_refused_is_refused_before_anything_is_written(
    sequences: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/ids.bin").write_text("precious")
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "closed")
    before = sorted(tmp_path.rglob("*"))
    for name, count, sentence in (
        ("new", 10**12, r"the teacher's cache needs .* GB, the disk has .* GB: lower --teacher-top"),
        ("file", 1, "file cannot be made: .*file is a file"),
        ("file/deep", 1, "deep cannot be made: .*file is a file"),
        ("closed/deep", 1, "deep cannot be written: nothing can be made in .*closed"),
        ("foreign", 1, "foreign holds something else than a teacher's cache: name another --teacher"),
    ):
        with pytest.raises(LadderError, match=sentence):
            CacheBuilder(sequences, tmp_path / name, count, {})
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "foreign/ids.bin").read_text() == "precious"


def test_goes_on_where_it_was_stopped(
    build: Callable[..., Any], original: Original, sequences: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is safe on the disk is not asked again; what is begun is not taken for other answers."""
    build("whole")
    monkeypatch.setattr(teacher, "_FLUSH_EVERY", 2)
    original.rows = 0
    with pytest.raises(Stop):
        build(progress=until(5 * 8, building=True))
    assert original.rows == 5 * 8 and not (tmp_path / "teacher/teacher.json").exists()
    with pytest.raises(LadderError, match="is another cache, of weights a instead of b"):
        build(weights="b")
    original.rows = 0
    build()
    assert original.rows == len(sequences) - 4 * 8 and files(tmp_path / "teacher") == files(tmp_path / "whole")


@pytest.mark.parametrize("size", [None, 0, 2])
def test_an_account_that_was_cut_is_none(
    size: int | None, build: Callable[..., Any], original: Original, sequences: Sequences, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """All is asked anew; nothing that was not answered is taken for an answer."""
    build("whole")
    monkeypatch.setattr(teacher, "_FLUSH_EVERY", 1)
    with pytest.raises(Stop):
        build(progress=until(5 * 8, building=True))
    account = tmp_path / "teacher/answered.bin"
    account.unlink() if size is None else os.truncate(account, size)
    original.rows = 0
    build()
    assert original.rows == len(sequences) and files(tmp_path / "teacher") == files(tmp_path / "whole")


def test_what_an_earlier_version_left(build: Callable[..., Any], original: Original, tmp_path: Path) -> None:
    """Its answers are taken, as far as it noted what they are; what it had begun is begun anew."""
    known = tmp_path / "teacher/teacher.json"
    build()
    facts = json.loads(known.read_text())
    known.write_text(json.dumps({"model": "m", **{name: facts[name] for name in ("top", "windows", "window")}}))
    build()
    assert original.loads == 1
    known.unlink()
    (tmp_path / "teacher/lock").unlink()
    (tmp_path / "teacher/asked.json.partial").write_text("{")  # of this version, killed as it began
    build()
    assert original.loads == 2 and json.loads(known.read_text()) == facts


def test_ranks_share_the_questions(
    build: Callable[..., Any], original: Original, sequences: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of them, after two of which were stopped; the answers are those of one."""
    build("whole")
    monkeypatch.setattr(teacher, "_FLUSH_EVERY", 1)
    original.rows = 0
    ended = together(2, lambda ranks: build(ranks=ranks, progress=until(64, building=True)))
    assert "Stop" in ended and "well" not in ended and 0 < original.rows < len(sequences)
    assert together(3, lambda ranks: build(ranks=ranks)) == ["well"] * 3
    assert files(tmp_path / "teacher") == files(tmp_path / "whole")
    assert len(sequences) <= original.rows <= len(sequences) + 2 * 8  # what was under way was asked again


def test_ranks_that_do_not_see_each_other(build: Callable[..., Any], tmp_path: Path) -> None:
    """Each on a disk of its own; nobody takes a part for the whole."""
    ended = together(2, lambda ranks: build(str(ranks.rank), ranks=ranks))
    assert ended[1].endswith("as others do: all machines must") and ended[0] == "BrokenBarrierError"
    with pytest.raises(LadderError, match=r"some ranks' results are not in .*: all machines must see it"):
        build(ranks=RankGroup(0, 2))
    assert not [*tmp_path.glob("*/teacher.json")] and len(build())


def test_one_run_at_a_time(build: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "teacher").mkdir()
    with (tmp_path / "teacher/lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ended = together(2, lambda ranks: build(ranks=ranks))
        assert len([told for told in ended if told.startswith("another run is building the teacher's cache")]) == 2
        assert ended[0].endswith("teacher: wait until it has")
    assert len(build())


def test_runs_share_the_answers(model: Path, data: Path, tmp_path: Path) -> None:
    """The second asks nothing, and learns the same; one with other questions is refused, and leaves nothing."""
    told: list[list[str]] = [[], []]
    for number, said in enumerate(told):
        options = distilling(model, tmp_path / str(number), teacher_top=8, teacher=tmp_path / "shared")
        adapt(options, adapting(data, 8), lambda done, total, what, said=said: said.append(what))  # type: ignore[misc]
    assert ["running the original" in said for said in told] == [True, False]
    assert log(tmp_path / "0") == log(tmp_path / "1") and same(weights(tmp_path / "0"), weights(tmp_path / "1"))
    assert not (tmp_path / "0" / "teacher").exists()
    for folder, changes, sentence in (
        ("shared", {"batch": 4}, r"shared is another cache, of .*: name another --teacher"),
        ("shared", {"dtype": "bfloat16"}, "of dtype float32 instead of bfloat16"),
        ("2", {}, "2 is where the run goes: name another --teacher"),
        ("0", {}, "0 holds something else than a teacher's cache"),
    ):
        with pytest.raises(LadderError, match=sentence):
            adapt(
                distilling(model, tmp_path / "2", teacher_top=8, teacher=tmp_path / folder),
                adapting(data, 8, **changes), silent,
            )  # fmt: skip
        assert not (tmp_path / "2").exists()


def test_two_processes(model: Path, data: Path, tmp_path: Path) -> None:
    """As torchrun starts them: they build together, and learn what one learns."""
    one, two = (distilling(model, tmp_path / name, teacher_top=8) for name in ("one", "two"))
    adapt(one, adapting(data, 8), silent)
    assert tiny.end(tiny.start("adapt", two, adapting(data, 8), ranks=2)) == [0, 0]
    assert files(one.out / "teacher") == files(two.out / "teacher")
    assert [loss for _, loss in log(two.out)] == pytest.approx([loss for _, loss in log(one.out)], abs=tiny.nats(8))
