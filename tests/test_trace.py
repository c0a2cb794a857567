"""The trace command, the account of a step, and the overlap program: real ranks, small models."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.bench.trace import lanes as lanes_module
from ladder.bench.trace import trace as trace_module
from ladder.bench.trace.lanes import Span, Step, first_layers, timeline
from ladder.bench.trace.step_trace import draw_first, kernels_of, step_of
from ladder.bench.trace.trace import TraceSetting
from ladder.charts import library
from ladder.charts.library import picture
from ladder.checkpoint import Random
from ladder.cli import main
from ladder.config import ModelConfig
from ladder.errors import LadderError, install
from ladder.model import Decoder
from ladder.report.charts import timeline_title, timelines
from ladder.report.lines.rows import Lanes

SIGNATURE = b"\x89PNG"


def test_account() -> None:
    """Of two sums after the embedding's, 10 ms each, one is waited for in full and one for 2 ms."""
    comm = [Span("all-reduce 0", 0, 5), Span("all-reduce 1", 6, 16), Span("all-reduce 2", 16, 26)]
    waits = [Span("all-reduce 0", 1, 5), Span("all-reduce 1", 6, 16), Span("all-reduce 2", 24, 26)]
    compute = [Span("attention 0", 5, 6), Span("MLP 0", 16, 24)]
    account = Step("ladder", 1, compute, comm, waits).account()
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
    account = Step("ladder-2", 0, compute, queue, [*waits, Span("all-reduce 3", 26, 36)]).account()
    assert account["comm_ms"] == 30 and account["hidden"] == pytest.approx(1 - 22 / 30)  # one after the other
    assert Step("none", 0, [Span("MLP 0", 0, 1)], comm[:1], waits[:1]).account()["hidden"] is None


def test_nothing_hides_where_nothing_computes() -> None:
    """A process that was not running while an all-reduce was, has waited for it, though its own clock says 1 ms."""
    comm = [Span("all-reduce 0", 0, 5), Span("all-reduce 1", 6, 16)]
    waits = [Span("all-reduce 0", 1, 5), Span("all-reduce 1", 16, 17)]
    for end in (6, 7):  # the sub-block returns when its all-reduce begins, or later
        step = Step("standard", 0, [Span("attention 0", 5, end), Span("MLP 0", 17, 18)], comm, waits)
        assert step.account()["hidden"] == 0 and step.account()["exposed_ms"] == 11


def test_the_account_of_two_lanes() -> None:
    """One lane's wait is exposed while the other does not compute: here for 3 of 12 ms."""
    compute = [Span("attention 0", 5, 8), Span("MLP 0", 5, 15), Span("attention 1", 18, 20)]
    comm = [Span("all-reduce 0", 0, 5), Span("all-reduce 1", 8, 18), Span("all-reduce 2", 18, 20)]
    waits = [Span("all-reduce 0", 0, 5), Span("attention 1", 8, 18)]
    step = Step("ladder, two lanes", 0, compute, comm, waits)
    assert step.two_lanes and not Step("ladder", 0, compute[1:], comm, waits).two_lanes
    assert step.account()["exposed_ms"] == 3 and step.account()["hidden"] == pytest.approx(1 - 3 / 12)
    assert step.title_of(30).startswith("ladder, two lanes: 30.00 ms, 2 all-reduces, 75%")
    assert first_layers(step, 1).compute == compute[:2]  # until the later one ends, whichever comes last


LAYERS = 8
MICROSECONDS = {"attention": (8, 6, 6), "MLP": (28, 16)}  # of a sub-block's kernels
LAUNCHES = {"attention": (49184, 36864, 65664), "MLP": (131104, 98368)}  # bytes of shared memory


def profiled(lag: int, lanes: int, link: int = 24) -> tuple[list[dict[str, Any]], list[Span], list[Span]]:
    """A step as the profiler would tell it, in the order of the capture; and its sub-blocks and their waits.

    The lanes' kernels are on streams 9 and 7, the all-reduces on 20; each starts 2 us before the last one ends.
    """
    events: list[dict[str, Any]] = []
    sums: list[float] = []
    compute, waits = [], []

    def add(name: str, begin: float, end: float, stream: int, shared: int = 0) -> None:
        about = {"stream": stream, "shared memory": shared, "block": [128, 1, 1]}
        events.append({"cat": "kernel", "name": name, "ts": 1e6 + begin, "dur": end - begin, "args": about})

    add("_embed", 0, 2, 7)
    add("_emulate_all_reduce", 2, 2 + link, 20)
    free = {"attention": 2.0 + link, "MLP": 2.0 + link}
    linked = 2.0 + link
    for layer in range(LAYERS):
        for kind, durations in MICROSECONDS.items():
            ready = free[kind]
            at = arrived = max([ready, *sums[: max(0, len(sums) - lag)]])
            if arrived > ready:
                waits.append(Span(f"{kind} {layer}", ready / 1e3, arrived / 1e3))
            for number, us in enumerate(durations):
                name = "_attend" if kind == "attention" and number == 1 else "_gemv"
                begin = ready if number == 0 else at - 2
                add(name, begin, at + us, 9 if kind == "attention" and lanes == 2 else 7, LAUNCHES[kind][number])
                at += us
            compute.append(Span(f"{kind} {layer}", arrived / 1e3, at / 1e3))
            for lane in (kind,) if lanes == 2 else free:
                free[lane] = at
            add("_emulate_all_reduce", max(at, linked), max(at, linked) + link, 20)
            linked = max(at, linked) + link
            sums.append(linked)
    add("_gemv", linked - 2, linked + 30, 7, 49184)  # the head, launched like attention's first
    add("_argmax", linked + 30, linked + 33, 20)
    add("_emulate_all_reduce", linked + 33, linked + 57, 7)
    return events, compute, waits


def traced(path: Path, events: list[dict[str, Any]], wiring: str, name: str, lanes: int) -> tuple[Step, float]:
    """The step of a trace, and the milliseconds of the whole."""
    others = [
        {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 1},
        {"ph": "M", "name": "process_name"},
    ]
    path.write_text(json.dumps({"traceEvents": [*others, *reversed(events)]}))
    model = Decoder(ModelConfig(16, LAYERS, 4, 4, 16, vocab=16).rewired(wiring), device="meta")
    kernels = kernels_of(path)
    return step_of(kernels, model, name, lanes), max(kernel.end for kernel in kernels)


def same(found: Sequence[Span], wanted: Sequence[Span]) -> bool:
    times = [time for span in wanted for time in (span.begin, span.end)]
    return [span.name for span in found] == [span.name for span in wanted] and [
        time for span in found for time in (span.begin, span.end)
    ] == pytest.approx(times, abs=1e-6)


@pytest.mark.parametrize("wiring, lag, lanes", [("standard", 0, 1), ("ladder", 1, 1), ("ladder", 1, 2)])
def test_a_profiled_step(wiring: str, lag: int, lanes: int, tmp_path: Path) -> None:
    events, compute, waits = profiled(lag, lanes)
    step, whole = traced(tmp_path / "trace.json", events, wiring, wiring, lanes)
    assert same(step.compute, compute) and same(step.waits[1:], waits) and len(step.comm) == 2 * LAYERS + 1
    assert step.two_lanes == (lanes == 2) and whole > step.ms
    assert Step.read(json.loads(json.dumps(asdict(step)))) == step


@pytest.mark.parametrize("told", ["streams", "nodes", "launches"])
def test_what_tells_the_lanes_apart(told: str, tmp_path: Path) -> None:
    """A replay may use other streams than the capture: then the graph's nodes, or else how a kernel was launched."""
    events, compute, waits = profiled(1, 2)
    for number, event in enumerate(events):
        if told != "streams":
            event["args"]["stream"] = (7, 9, 20)[number % 3]
        if told == "nodes":
            event["args"]["graph node id"] = (5 << 32) + 3 * number
        if told != "launches":
            del event["args"]["shared memory"]
    step, _ = traced(tmp_path / "trace.json", events, "ladder", "ladder, two lanes", 2)
    assert same(step.compute, compute) and same(step.waits[1:], waits)


def test_lanes_that_nothing_tells_apart(tmp_path: Path) -> None:
    events, _, _ = profiled(1, 2)
    for number, event in enumerate(events):
        event["args"] = {"stream": 7, "graph node id": -number}  # in no order that a step can have
    with pytest.raises(LadderError, match="does not tell which kernels are the attention's"):
        traced(tmp_path / "trace.json", events, "ladder", "ladder, two lanes", 2)


def test_the_picture_of_three_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for a step on one lane, two on two; the time of the whole step in its title."""
    drawn: list[dict[str, Any]] = []
    monkeypatch.setattr(lanes_module, "picture", lambda chart, path: (drawn.append(chart), picture(chart, path)))
    runs = [("standard", 0, 1, "standard"), ("ladder", 1, 1, "ladder, one lane"), ("ladder", 1, 2, "ladder, two lanes")]
    found = [traced(tmp_path / "trace.json", profiled(lag, lanes)[0], w, name, lanes) for w, lag, lanes, name in runs]
    draw_first([step for step, _ in found], [ms for _, ms in found], "a model", tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(SIGNATURE)
    bars = drawn[0]["datasets"]["bars"]
    for (step, ms), (*_, name) in zip(found, runs, strict=True):
        own = [bar for bar in bars if bar["heading"].startswith(f"{name}: {ms:.2f} ms, 16 all-reduces")]
        assert {bar["label"] for bar in own if "label" in bar} == {str(layer) for layer in range(6)} and ms > step.ms
        rows = {(bar["top"], bar["bottom"]) for bar in own if bar["kind"] in ("attention", "MLP")}
        assert len(rows) == (2 if "two" in name else 1)
        assert {bar["kind"] for bar in own} - {"wait"} == {"attention", "MLP", "all-reduce"}
    assert "First 6 of 8 layers" in drawn[0]["title"]["subtitle"][0]


def test_a_picture_of_all_layers_has_the_figures_of_the_step(tmp_path: Path) -> None:
    """The wait for the last all-reduces is part of it, and no headline is computed of a part."""
    compute = [Span("attention 0", 0, 1), Span("MLP 0", 1, 2), Span("attention 1", 2, 3), Span("MLP 1", 3, 4)]
    comm = [Span("all-reduce 0", 0, 0), Span("all-reduce 1", 3, 8)]
    step = Step("ladder", 0, compute, comm, [Span("all-reduce 0", 0, 0), Span("all-reduce 1", 4, 8)])
    assert first_layers(step, 2) == first_layers(step, 6) == step
    (cut, whole) = (timeline([step], count)["datasets"]["bars"] for count in (1, 6))
    assert {bar["heading"] for bar in (*cut, *whole)} == {
        "ladder: 8.00 ms, 1 all-reduces, 20% of the communication hidden"
    }
    assert [bar["end"] for bar in whole if bar["kind"] == "wait"] == [8] and max(bar["end"] for bar in cut) == 2
    lane = Lanes("steps.jsonl", 0, [step], {})
    assert timeline_title(lane).startswith("All 2 layers of a step")
    (name,) = timelines(lane)
    assert name == "all 2"


def test_a_trace_without_the_library_has_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step = Step("ladder", 0, [Span("attention 0", 0, 1), Span("MLP 0", 1, 2)], [Span("all-reduce 0", 0, 0)], [])
    steps = json.dumps(asdict(step))
    monkeypatch.setattr(trace_module, "run_ranks", lambda *_: (tmp_path / "steps.rank0.jsonl").write_text(steps))
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    setting = TraceSetting(ModelConfig.named("tiny"), Random(), ("ladder",), None, torch.device("cpu"), 1, 8, tmp_path)
    assert trace_module.trace(setting, 2) == [step]
    assert install("plot") in caplog.text and not (tmp_path / "lanes.png").exists()


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
    about = json.loads((tmp_path / "steps.rank1.jsonl").read_text().splitlines()[0])
    assert about["mode"] == "ranks" and about["link_kind"] == "emulated" and about["link"] == "20000us,10GB/s"
    assert about["chip"] and "commit" in about and about["time"].endswith("Z")
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
        ("--model nowhere", "no model 'nowhere': there is no such directory"),
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
