"""The original's answers on disk: asked for once, by one rank or several, in one go or not, for one run or several."""

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ladder.adapt import teacher
from ladder.adapt.distill import adapt
from ladder.adapt.options import AdaptOptions
from ladder.adapt.shards import Shards, Windows
from ladder.adapt.teacher import Ranks, remember
from ladder.errors import LadderError
from tests import training as tiny
from tests.training import WINDOW, Stop, adapting, log, same, silent, until, weights

TOP = 3


class Original:
    """A model that counts the rows that it is asked about."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.model = AutoModelForCausalLM.from_config(tiny.config())
        self.loads = self.rows = 0
        self.model.register_forward_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, arguments: Any, named: dict[str, Any], output: Any) -> None:
        self.rows += len(named["input_ids"])

    def __call__(self) -> Any:
        self.loads += 1
        return self.model


@pytest.fixture
def windows(data: Path) -> Windows:
    return Windows(Shards.open(data), WINDOW)


@pytest.fixture
def original() -> Original:
    return Original()


@pytest.fixture
def ask(windows: Windows, original: Original, tmp_path: Path) -> Callable[..., Any]:
    def ask(
        folder: str = "teacher", count: int = TOP, progress: Any = silent, asked: Any = windows, **more: Any
    ) -> Any:
        facts = {"model": more.pop("model", "a")}
        return remember(original, asked, tmp_path / folder, count, facts, progress, more.pop("ranks", None))

    return ask


def files(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("logs.bin", "ids.bin")]


def test_the_likeliest_tokens(ask: Callable[..., Any], windows: Windows, original: Original) -> None:
    found = ask()
    for row in (0, 5, len(windows) - 1):
        said = original.model(input_ids=windows[row]["input_ids"][None]).logits[0].log_softmax(-1)
        logs, ids = said.topk(TOP)
        assert torch.equal(found[row]["teacher_ids"].long(), ids) and len(found) == len(windows)
        torch.testing.assert_close(found[row]["teacher_logs"].float(), logs, rtol=1e-3, atol=1e-2)


def test_asked_once(ask: Callable[..., Any], original: Original, tmp_path: Path, data: Path) -> None:
    """Not even loaded where its answers are there; of other facts, or cut, they are refused; so is a full disk."""
    first, again = ask(), ask()
    assert original.loads == 1 and torch.equal(first[3]["teacher_ids"], again[3]["teacher_ids"])
    assert {file.name for file in (tmp_path / "teacher").iterdir()} == {"logs.bin", "ids.bin", "teacher.json", "lock"}
    others = Windows(Shards.open(tiny.tokens(tmp_path / "other", seed=2)), WINDOW, limit=len(first))
    assert len(others) == len(first)
    for change in ({"model": "b"}, {"count": TOP + 1}, {"asked": others}):
        with pytest.raises(LadderError, match="holds the answers of another teacher or to other data: remove it"):
            ask(**change)
    os.truncate(tmp_path / "teacher/logs.bin", 100)
    with pytest.raises(LadderError, match="teacher is damaged: remove it"):
        ask()
    with pytest.raises(LadderError, match=r"the teacher's answers need .* GB, the disk has .* GB: lower --teacher-top"):
        ask("full", 10**12)
    assert original.loads == 1 and not (tmp_path / "full").exists()


def test_goes_on_where_it_was_stopped(
    ask: Callable[..., Any], original: Original, windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is safe on the disk is not asked again; what is begun is not taken for other answers."""
    ask("whole")
    monkeypatch.setattr(teacher, "_SAFE", 2)
    original.rows = 0
    with pytest.raises(Stop):
        ask(progress=until(5 * 8, asking=True))
    assert original.rows == 5 * 8 and not (tmp_path / "teacher/teacher.json").exists()
    with pytest.raises(LadderError, match="holds the answers of another teacher"):
        ask(model="b")
    original.rows = 0
    ask()
    assert original.rows == len(windows) - 4 * 8 and files(tmp_path / "teacher") == files(tmp_path / "whole")


def test_ranks_share_the_questions(
    ask: Callable[..., Any], original: Original, windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of them, after two of which were stopped; the answers are those of one."""
    ask("whole")
    monkeypatch.setattr(teacher, "_SAFE", 1)
    original.rows, ended = 0, list[str]()

    def together(count: int, progress: Any) -> None:
        barrier = threading.Barrier(count, timeout=60)

        def rank(number: int) -> None:
            try:
                ask(ranks=Ranks(number, count, barrier.wait), progress=progress)
                ended.append("well")
            except Stop:
                barrier.abort()
                ended.append("stopped")
            except threading.BrokenBarrierError:
                ended.append("alone")

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    together(2, until(64, asking=True))
    before = original.rows
    assert "stopped" in ended and "well" not in ended and 0 < before < len(windows)
    ended.clear()
    together(3, silent)
    assert ended == ["well"] * 3 and files(tmp_path / "teacher") == files(tmp_path / "whole")
    assert len(windows) <= original.rows <= len(windows) + 2 * 8  # what was under way was asked again


def test_ranks_that_do_not_see_each_other(ask: Callable[..., Any], tmp_path: Path) -> None:
    """One of two, on a disk of its own."""
    with pytest.raises(LadderError, match=r"not all ranks' answers are in .*: it must be one that all machines see"):
        ask(ranks=Ranks(0, 2))
    assert not (tmp_path / "teacher/teacher.json").exists() and len(ask())


def test_one_run_at_a_time(ask: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "teacher").mkdir()
    with (tmp_path / "teacher/lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LadderError, match=r"another run is asking the original for .*teacher: wait until it has"):
            ask()
    assert len(ask())


def test_runs_share_the_answers(model: Path, data: Path, tmp_path: Path) -> None:
    """The second asks nothing, and learns the same."""
    told: list[list[str]] = [[], []]
    for number, said in enumerate(told):
        options = AdaptOptions(str(model), tmp_path / str(number), teacher_top=8, teacher=tmp_path / "shared")
        adapt(options, adapting(data, 8), lambda done, total, what, said=said: said.append(what))  # type: ignore[misc]
    assert ["asking the original" in said for said in told] == [True, False]
    assert log(tmp_path / "0") == log(tmp_path / "1") and same(weights(tmp_path / "0"), weights(tmp_path / "1"))
    assert not (tmp_path / "0" / "teacher").exists()
    with pytest.raises(LadderError, match="shared holds the answers of another teacher or to other data"):
        adapt(
            AdaptOptions(str(model), tmp_path / "2", teacher_top=8, teacher=tmp_path / "shared"),
            adapting(data, 8, batch=4), silent,
        )  # fmt: skip


def test_two_processes(model: Path, data: Path, tmp_path: Path) -> None:
    """As torchrun starts them: they ask together, and learn what one learns."""
    one, two = (AdaptOptions(str(model), tmp_path / name, teacher_top=8) for name in ("one", "two"))
    adapt(one, adapting(data, 8), silent)
    assert tiny.end(tiny.start("adapt", two, adapting(data, 8), ranks=2)) == [0, 0]
    assert files(one.out / "teacher") == files(two.out / "teacher")
    assert [loss for _, loss in log(two.out)] == pytest.approx([loss for _, loss in log(one.out)], rel=1e-4)
