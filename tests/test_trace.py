"""The trace command, the account of a step, and the overlap program: real ranks, small models."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ladder.bench.trace.lanes import Span, Step
from ladder.cli import main

SIGNATURE = b"\x89PNG"


def test_account() -> None:
    """Of two sums after the embedding's, 10 ms each, one is waited for in full and one for 2 ms."""
    comm = [Span("all-reduce 0", 0, 5), Span("all-reduce 1", 6, 16), Span("all-reduce 2", 16, 26)]
    waits = [Span("all-reduce 0", 1, 5), Span("all-reduce 1", 6, 16), Span("all-reduce 2", 24, 26)]
    account = Step("ladder", 1, [Span("attention 0", 5, 6)], comm, waits).account()
    assert account == {
        **{"wiring": "ladder", "rank": 1, "all_reduces": 2, "step_ms": 26},
        **{"comm_ms": 20, "exposed_ms": 12, "hidden": pytest.approx(0.4)},
    }
    queue = [
        Span("all-reduce 0", 0, 5),
        Span("all-reduce 1", 6, 16),
        Span("all-reduce 2", 8, 26),
        Span("all-reduce 3", 10, 36),
    ]
    account = Step("ladder-2", 0, [Span("attention 0", 5, 6)], queue, [*waits, Span("all-reduce 3", 26, 36)]).account()
    assert account["comm_ms"] == 30 and account["hidden"] == pytest.approx(1 - 22 / 30)  # one after the other
    assert Step("none", 0, [Span("MLP 0", 0, 1)], comm[:1], waits[:1]).account()["hidden"] is None


def test_trace(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """A link far slower than the sub-blocks: the standard wiring waits for most of it."""
    flags = ["--size", "tiny", "--tp", 2, "--emulate-link", "20ms,10GB/s", "--batch", 2, "--context", 16, "--json"]
    wirings = ["--wiring", "standard", "--wiring", "ladder", "--wiring", "none"]
    status, out, err = run("trace", "--out", tmp_path, *wirings, *flags)
    assert status == 0, err
    standard, ladder, none = (json.loads(line) for line in out.splitlines())
    assert [account["all_reduces"] for account in (standard, ladder, none)] == [8, 8, 0]
    assert standard["comm_ms"] >= 8 * 20 and standard["exposed_ms"] > 0.5 * standard["comm_ms"]
    assert 8 * 20 <= ladder["comm_ms"] <= ladder["step_ms"] and ladder["exposed_ms"] <= ladder["step_ms"]
    assert none["exposed_ms"] == none["comm_ms"] == 0
    assert (tmp_path / "lanes.png").read_bytes().startswith(SIGNATURE)
    for wiring in ("standard", "ladder", "none"):
        for rank in (0, 1):
            trace = json.loads((tmp_path / f"{wiring}.rank{rank}.trace.json").read_text())
            names = {event.get("name") for event in trace["traceEvents"]}
            assert {"attention 0", "MLP 3", "wait for all-reduce 0", "all-reduce 0"} <= names
            assert ("all-reduce 8" in names) == (wiring != "none")
    steps = [Step.read(json.loads(line)) for line in (tmp_path / "steps.rank1.jsonl").read_text().splitlines()]
    assert [step.wiring for step in steps] == ["standard", "ladder", "none"]
    assert all(len(step.compute) == 8 and len(step.comm) == len(step.waits) for step in steps)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--tp 3", "3 ranks cannot share"),
        ("--size huge", "unknown size 'huge'"),
        ("--wiring ladder:3", "covers 3 layers"),
        ("--emulate-link slow", "unknown link 'slow'"),
        ("--batch 0", "batch must be at least 1"),
        ("--context 100000", "context 100000 is more than the model's"),
        ("--model nowhere", "no such model directory"),
    ],
)
def test_refused(
    flags: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ladder", "trace", "--out", str(tmp_path / "out"), *flags.split()])
    with pytest.raises(SystemExit) as left:
        main()
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1) and message in err
    assert not (tmp_path / "out").exists()


def test_overlap_program() -> None:
    """It runs and its figures follow from its lines; whether they are good is not a test's business."""
    small = "OverlapSetting(hidden=64, ffn=64, layers=4)"
    program = f"from ladder.bench.overlap import *; run_ranks(2, torch.device('cpu'), work, {small})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *lines, summary = (json.loads(line) for line in done.stdout.splitlines())
    pairs, alone = lines[:5], lines[5:]
    assert [line["round"] for line in lines] == [*range(5)] * 2
    for line in pairs:
        times = line["step_ms"]
        hidden = (times["standard"] - times["ladder"]) / (times["standard"] - times["none"])
        assert line["hidden"] == pytest.approx(hidden) and line["link"] == "emulated" and line["tp"] == 2
        assert times["standard"] > 8 * line["alpha_ms"] and line["alpha_ms"] > 0
    assert summary["hidden"] == statistics.median(line["hidden"] for line in pairs)
    cost = statistics.median(line["step_ms"]["ladder"] / line["step_ms"]["standard"] for line in alone)
    assert summary["one_rank_ladder_over_standard"] == pytest.approx(cost)
