"""`ladder demo`: both sides write the same text on real ranks; the figures follow from what was measured."""

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from psutil import Process
from rich.console import Console

from ladder.bench.demo import gpu, run, screen
from ladder.bench.demo.options import DemoOptions
from ladder.bench.demo.run import Found, Side
from ladder.bench.demo.timeline import LETTERS, lanes
from ladder.bench.demo.write import SHOWN, WAYS, Chosen, Wrote
from ladder.bench.sweep.cells import Hardware, cells
from ladder.bench.sweep.options import BenchOptions
from ladder.bench.sweep.sweep import line_of
from ladder.bench.trace.lanes import Span, Step
from ladder.comm.at_once import AtOnce
from ladder.comm.base import Comm, Solo
from ladder.comm.emulated import World
from ladder.comm.link import Link
from ladder.config import ModelConfig
from ladder.errors import LadderError, install
from ladder.model import Decoder
from ladder.perf.plan import predict

GB = 10**9


def test_at_once_changes_nothing_but_the_waiting(worlds: dict[int, World]) -> None:
    """The same logits, bit for bit; an all-reduce is complete when it is given back."""
    config = ModelConfig.named("tiny").rewired("ladder")
    tokens = torch.arange(6)[None]

    def logits(comm: Comm) -> torch.Tensor:
        model, source = Decoder(config, comm), torch.Generator().manual_seed(comm.rank)  # of this thread alone
        for parameter in model.parameters():
            parameter.data.normal_(std=0.02, generator=source)
        with torch.inference_mode():
            return model(tokens, model.new_cache(1, 8))

    def asked(comm: Comm) -> bool:
        """Whether a peer's part has been added before anything was waited for."""
        x = torch.full((1,), float(comm.rank + 1))
        pending = AtOnce(comm).all_reduce(x)
        return float(vars(pending)["_x"]) == 3.0

    plain, at_once = worlds[2].run(logits), worlds[2].run(lambda comm: logits(AtOnce(comm)))
    assert all(torch.equal(one, other) for one, other in zip(plain, at_once, strict=True))
    assert worlds[2].run(asked) == [True, True]
    assert float(AtOnce(Solo()).all_gather(torch.ones(1))) == 1


def test_the_demo(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """Real ranks. The link is chosen by the compute, no side shares the time of another, and the texts are the same."""
    status, out, err = run("demo", "--device", "cpu", "--seconds", 1, "--json", "--out", tmp_path / "a.png")
    assert status == 0, err
    found = json.loads(out)
    assert found["same_text"] and found["link_kind"] == "emulated" and found["cores"]
    assert found["link_alpha_us"] == pytest.approx(found["link_in_sub_blocks"] * found["sub_block_us"])
    rates, account = found["tokens_per_s"], found["account"]
    assert set(rates) == set(WAYS) and min(found["tokens"].values()) > 0
    assert found["speedup"] == pytest.approx(rates["overlapping"] / rates["waiting"])
    assert account["waiting"]["hidden"] == 0 and account["waiting"]["all_reduces"] == 16
    for way in SHOWN:
        assert account[way]["comm_ms"] >= 16 * found["link_alpha_us"] / 1e3
        assert account[way]["exposed_ms"] <= account[way]["step_ms"]


def test_what_is_said_without_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = finished()
    console = Console(file=io.StringIO(), width=100)
    monkeypatch.setattr(screen, "draw", refuse)
    assert screen.show(iter([found]), console) is found
    screen.end(found, console, tmp_path / "a.png")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    plain = " ".join(text.split())
    assert "\x1b" not in text and "Ladder was 1.50 times as fast as waiting, measured just now" in plain
    assert "without any communication it would be 1.80 times" in plain
    assert "emulated: an all-reduce takes 2.00 ms, 1.17 times as long" in plain
    assert "60 tokens in 2.0 s: 30.0 tokens/s" in plain and "40 tokens in 2.0 s: 20.0 tokens/s" in plain
    assert f"no picture file: pictures need matplotlib: {install('plot')}" in plain
    assert all(command in text for command, _ in screen.NEXT)
    rows = [line for line in text.splitlines() if line.startswith(("compute ", "link "))]
    assert len(rows) == 4 and all(set(row[10:]) <= {*LETTERS.values(), " "} for row in rows)


def test_sides_as_they_are_written() -> None:
    """On a terminal side by side, under each other where it is narrow, at any width without an error."""
    found = finished()
    for width in (20, 60, 100):
        console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        assert screen.show(iter([Found(**{**vars(found), "chosen": None}), found]), console) is found
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert any("30.0 tokens/s" in line and "20.0 tokens/s" in line for line in text.splitlines()) == (width == 100)


def test_a_difference_is_a_defect() -> None:
    found = finished()
    found.sides["waiting"].tokens[3] += 1
    assert not found.same_text
    found.sides["none"].seconds *= 10  # a machine too busy to tell
    assert found.bound is None


def test_cells_of_a_timeline() -> None:
    compute = [Span("attention 0", 0, 2), Span("MLP 0", 4, 6)]
    comm = [Span("all-reduce 0", 2, 4), Span("all-reduce 1", 6, 8)]
    step = Step("waiting", 0, compute, comm, comm)
    assert plain(step, 16, 16) == {"compute": "AA..MM..        ", "link": "  ==  --        "}
    assert plain(step, 4, 8) == {"compute": "A.M.", "link": " = -"}
    both = [Span("attention 0", 0, 2), Span("MLP 0", 0, 4), Span("attention 1", 6, 8)]
    two = Step("two lanes", 0, both, comm, [Span("all-reduce 0", 0, 0), Span("attention 1", 4, 6)])
    assert plain(two, 8, 8) == {"attention": "AA  ..AA", "MLP": "MMMM    ", "link": "  ==  --"}


def plain(step: Step, width: int, ms: float) -> dict[str, str]:
    return {name: line.plain for name, line in lanes(step, width, ms)}


def test_the_proportion_is_that_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `ladder plan`, not by a figure of the demo's."""
    standard, none = (predict(run.replace(run.LIKE, wiring=name)) for name in ("standard", "none"))
    assert run.link_in_sub_blocks() == pytest.approx(standard["all_reduce_us"] * 160 / none["tpot_ms"] / 1e3)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--seconds 0", "seconds must be from 1 to 600, not 0"),
        ("--device tpu", "unknown device 'tpu'"),
        ("--out picture", "picture must end in .png, .svg or .pdf"),
        (f"--out {__file__}/a.png", "cannot be made: "),
    ],
)
def test_refused(run: Callable[..., tuple[int, str, str]], flags: str, message: str) -> None:
    status, out, err = run("demo", *flags.split())
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err


def test_an_empty_prompt_is_refused(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = run("demo", "--device", "cpu", "--prompt", "")
    assert (status, out, err.count("\n")) == (2, "", 1) and "is empty" in err


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """While the ranks write: no process is left."""
    command = [sys.executable, "-m", "ladder", "demo", "--device", "cpu", "--seconds", "60"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout is not None and demo.stderr is not None
            assert "embedded model" in demo.stdout.readline()  # said once the link is chosen: the ranks are writing
            children = Process(demo.pid).children(recursive=True)
            assert len(children) >= 2
            demo.send_signal(signal.SIGINT)
            assert demo.wait(30) == 130 and "Traceback" not in demo.stderr.read()
        finally:
            demo.kill()
    deadline = time.monotonic() + 10
    while any(alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(alive(child) for child in children)


# --- on a GPU -------------------------------------------------------------------------------------------------------


def test_what_a_gpu_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest model that fits, and one rank of a large one where its shard fits."""

    def sizes(gigabytes: int) -> list[tuple[str, int]]:
        planned = gpu.planned(tmp_path / "bench.jsonl", Hardware(1, gigabytes * GB, 100 * GB))
        return [(options.size[0], options.tp[0]) for options in planned]

    monkeypatch.setattr(gpu, "PRESENT", False)
    assert sizes(141) == [("llama-3-8b", 1)]  # without Triton
    monkeypatch.setattr(gpu, "PRESENT", True)
    assert sizes(141) == [("llama-3-8b", 1), ("llama-3-70b", 8)]
    assert sizes(12) == [("llama-3.2-3b", 1)]
    with pytest.raises(LadderError, match="use --device cpu"):
        sizes(0)


def test_the_demo_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cells are those of `ladder bench`; what would measure them is a stand-in."""
    monkeypatch.setattr(Hardware, "present", lambda: Hardware(1, 141 * GB, 100 * GB))
    monkeypatch.setattr(gpu, "PRESENT", True)
    measured: list[tuple[str, int, str]] = []

    def measure(options: BenchOptions, progress: Callable[[int, int, str], None]) -> Iterator[dict[str, Any]]:
        for cell in cells(options, Hardware.present()):
            progress(1, 2, "decoding")
            measured.append((cell.size, cell.batch, cell.arm))
            ms = 4.0 if cell.arm == "standard" else 3.2
            figures = {"tpot_ms_p50": ms, "exposed_ms": 1.0, "hidden": 0.5 if cell.tp > 1 else None, "lanes": 2}
            yield {**line_of(cell), **figures}

    def trace(arguments: list[str]) -> None:
        out, link = Path(arguments[0]), arguments[1]
        lines = [json.dumps({**asdict(step), "step_ms": 9.5, "link": link}) for step in finished().steps.values()]
        (out / "one_rank_steps.jsonl").write_text("\n".join(lines) + "\n")

    console = Console(file=io.StringIO(), width=140)
    options = DemoOptions(device="cuda", out=tmp_path / "new" / "a.svg")
    gpu.demo_gpu(options, console, measure, trace)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    cell_names = [("llama-3-8b", 1), ("llama-3-8b", 16), ("llama-3-70b", 1)]
    assert measured == [(*cell, arm) for cell in cell_names for arm in ("standard", "ladder")]
    assert "llama-3-8b, batch 16, on this GPU alone: Ladder 1.25 times as fast as standard" in text
    assert "llama-3-70b, batch 1, as one rank of 8: Ladder 1.25 times" in text
    assert "waiting: 9.50 ms in all" in text and f"wrote {tmp_path}" in text and "compute   " in text
    assert b"<svg" in options.out.read_bytes()[:100]
    assert "emulated (nvlink_nccl)" in text and "random" in text and "ladder doctor" in text
    refused = Console(file=io.StringIO(), width=140)
    gpu.demo_gpu(options, refused, measure, refuse)
    assert f"no timeline: pictures need matplotlib: {install('plot')}" in refused.file.getvalue()  # type: ignore[attr-defined]
    written = Console(file=io.StringIO())
    gpu.demo_gpu(DemoOptions(device="cuda", json=True), written, measure)
    lines = [json.loads(line) for line in written.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert len(lines) == 6 and [gpu.speedup(lines, line) for line in lines[:2]] == [1, 1.25]


# --- what the tests share -------------------------------------------------------------------------------------------


class Letters:
    """Text of tokens: each is a word."""

    def add(self, token: int) -> str:
        return f" word{token}"


def finished() -> Found:
    """A demo that has ended: 20 tokens a second waiting, 30 not, 36 without communication."""
    sides = {name: Side(Letters()) for name in WAYS}  # type: ignore[arg-type]
    found = Found("Once", 11_000_000, 8, sides, 1.17, {"all_reduce_us": 65.0})
    found.add(Chosen(2e-3 / 1.17, Link(2e-3, 10e9)))
    for name, count in (("waiting", 40), ("overlapping", 60), ("standard", 40), ("none", 72)):
        found.add(Wrote(name, (0,), 0.0))
        found.add(Wrote(name, tuple(range(1, count + 1)), 2.0))
    comm = [Span(f"all-reduce {n}", 10.0 * n, 10.0 * n + 5) for n in range(17)]
    compute = [Span(f"attention {n}", 10.0 * n + 5, 10.0 * n + 10) for n in range(16)]
    for name in SHOWN:
        found.steps[name] = Step(name, 0, compute, comm, comm)
    return found


def refuse(*_: Any) -> None:
    raise LadderError(f"pictures need matplotlib: {install('plot')}")


def alive(process: Process) -> bool:
    return process.is_running() and process.status() != "zombie"
