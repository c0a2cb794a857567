"""ladder bench: its file of lines, a sweep that goes on where it was stopped, and what it says about that."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.bench.machine import machine
from ladder.bench.sweep import sweep
from ladder.bench.sweep.cells import Cell, cells
from ladder.bench.sweep.measure import Measured, StepsDone
from ladder.bench.sweep.sweep import bench, done, key, line_of, measured_before, read
from ladder.errors import LadderError, RankError
from ladder.files import LineFile
from tests.test_bench import LAPTOP, TINY, quiet
from tests.test_cli import Run
from tests.test_faults import wait_until_gone, workers


def row_of(cell: Cell) -> dict[str, Any]:
    return {**line_of(cell), **machine(torch.device("cpu")), "tpot_ms_p50": 1.0, "repetitions": cell.repetitions}


def test_lines_survive_a_torn_one(tmp_path: Path) -> None:
    out = tmp_path / "new" / "bench.jsonl"
    first, second, third, *_ = (row_of(cell) for cell in cells(TINY, LAPTOP))
    assert read(out) == [] and done(out) == set()
    lines = LineFile(out)
    lines.append(first)
    with out.open("a") as file:
        file.write(json.dumps(second)[:40])  # the machine stopped here
    assert done(out) == {key(first)}
    lines.append(third)
    assert read(out) == [first, third] and out.read_text().count("\n") == 2
    with out.open("a") as file:
        file.write(json.dumps(second))  # whole, but for its end
    lines.append(second)
    assert read(out) == [first, third, second, second]
    out.write_text('{"measure": "decode"}\n\n' + out.read_text())  # another program's line
    assert done(out) == {key(row) for row in (first, second, third)}
    out.write_text("once upon\na time\n")
    with pytest.raises(LadderError, match="is no file of JSON lines: line 1 is"):
        read(out)
    with pytest.raises(LadderError, match="is a directory"):
        read(tmp_path)


def test_only_what_is_missing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = replace(TINY, out=tmp_path / "bench.jsonl")
    planned = cells(given)
    kept = [row_of(cell) for cell in planned if cell.batch == 1 and cell.arm != "none"]
    for row in kept:
        LineFile(given.out).append(row)
    asked: list[Cell] = []

    def ranks(size: int, device: torch.device, work: object, todo: list[Cell]) -> Any:
        asked.extend(todo)
        yield StepsDone(len(todo) * 3, "all at once")
        yield from (Measured(cell, {"tpot_ms_p50": 2.0, "repetitions": cell.repetitions}) for cell in todo)

    monkeypatch.setattr(sweep, "stream_ranks", ranks)
    heard: list[tuple[int, int, str]] = []
    rows = list(bench(given, lambda *what: heard.append(what)))
    assert asked == [cell for cell in planned if cell.batch == 3 or cell.arm == "none"]
    assert rows[: len(kept)] == kept and len(rows) == len(planned) and read(given.out) == rows
    assert heard[-1][:2] == (3 * len(planned), 3 * len(planned))
    asked.clear()
    assert list(bench(replace(given, repetitions=2), quiet)) == rows and not asked
    list(bench(replace(given, repetitions=4), quiet))
    assert [cell.arm for cell in asked] == [cell.arm for cell in planned]  # what was measured less often is again


def test_what_is_said_of_rows_from_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """How many, whose, and how to be rid of them; nothing where all are new."""
    out = tmp_path / "bench.jsonl"
    rows = [{**row_of(cell), "commit": commit} for cell, commit in zip(cells(TINY), ("aa1", None, "cc3"), strict=False)]
    assert measured_before(rows, [], out) is None
    for row in rows[:2]:
        LineFile(out).append(row)
    monkeypatch.setattr(sweep, "bench", lambda options, progress: iter(rows))
    status, printed, said = run("bench", "--preset", "quick", "--json", "--out", out)
    assert status == 0 and [json.loads(line) for line in printed.splitlines()] == rows
    assert said == (
        f"2 of 3 rows were measured before, at commit aa1, unknown: they are measured again where {out} is removed\n"
    )


def test_ctrl_c_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    out = tmp_path / "bench.jsonl"

    def stopped(*_: object) -> Any:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(sweep, "bench", stopped)
    arguments = ("bench", "--preset", "quick", "--out", out)
    assert run(*arguments) == (130, "", "ladder: stopped: nothing is measured yet, the same command continues\n")
    LineFile(out).append(row_of(cells(TINY)[0]))
    said = f"ladder: stopped: what is measured is in {out}, the same command continues\n"
    assert run(*arguments) == (130, "", said)


LONGER = replace(TINY, batch=(1, 2, 3), emulate_link=("5ms,10GB/s",), arm=("standard", "none"), repetitions=8)


def test_a_rank_that_dies(tmp_path: Path) -> None:
    """The rows so far stay, and nobody waits for it."""
    given = replace(LONGER, out=tmp_path / "bench.jsonl")
    rows = bench(given, quiet)
    found = [next(rows), next(rows)]
    ranks = {process.name: process for process in active_children() if process.name.startswith("ladder-rank")}
    ranks["ladder-rank-1"].kill()
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL; all ranks were stopped"):
        found += rows
    assert time.monotonic() - begin < 10 and not any(process.is_alive() for process in ranks.values())
    assert read(given.out)[:2] == found[:2] and len(read(given.out)) < 6


PROGRAM = """
import sys
from pathlib import Path
from ladder.bench.sweep.options import BenchOptions
from ladder.bench.sweep.sweep import bench
if __name__ == "__main__":
    given = BenchOptions(size=("tiny",), batch=tuple(range(1, 21)), emulate_link=("5ms,10GB/s",),
                         arm=("standard", "none"), prompt=8, new=8, repetitions=3, device="cpu", out=Path(sys.argv[1]))
    for row in bench(given, lambda *_: print("turn", flush=True)):
        print("row", flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_interrupted(tmp_path: Path) -> None:
    """Ctrl-C while the second cell is measured: the rows of the first are there, no rank is left."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "bench.jsonl")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **pipes)  # type: ignore[call-overload]
    try:
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line[0]
            if seen.endswith("rrt"):
                break
        ranks = workers(process.pid)
        assert len(ranks) == 2, seen
        os.killpg(process.pid, signal.SIGINT)  # as from a terminal
        _, said = process.communicate(timeout=20)
        wait_until_gone(ranks, time.monotonic())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0 and said.count("Traceback") == 1 and "KeyboardInterrupt" in said
    assert [row["arm"] for row in read(tmp_path / "bench.jsonl")] == ["standard", "none"]
