"""ladder trace: one decode step, when each sub-block computed, when each all-reduce ran, and what waited.

For every rank and wiring a trace for Chrome or Perfetto; from the first rank a picture, the wirings' lanes under each
other, and the figures: all-reduces, time of communication, time exposed (a sub-block waited), share hidden.
"""

import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from ladder.bench.machine import machine
from ladder.bench.model import watch_sub_blocks
from ladder.bench.ranks import run_ranks
from ladder.bench.trace.lanes import Span, Step, draw
from ladder.charts.library import installed, missing
from ladder.checkpoint import Source, load
from ladder.comm.base import Comm, Pending
from ladder.comm.link import LINKS, Link
from ladder.comm.timed import Timed
from ladder.config import ModelConfig
from ladder.errors import LadderError
from ladder.files import write_text
from ladder.model import Decoder

WARM_UP = 3
STEPS = 7  # timed without the profiler, which slows what it looks at; the one of median length is shown


@dataclass(frozen=True)
class TraceSetting:
    """What is to be traced; checked before a rank is started."""

    config: ModelConfig
    source: Source
    wirings: tuple[str, ...]
    link: Link | None
    device: torch.device
    batch: int
    context: int
    out: Path


class Recorder:
    """The marks of one step: the wall clock on the CPU, events in the stream on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self.begin()

    def begin(self) -> None:
        self._spans: list[tuple[str, str, Any, Any]] = []
        self._first = self.mark()

    def mark(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, lane: str, name: str, begin: Any, end: Any) -> None:
        self._spans.append((lane, name, begin, end))

    def spans(self, lane: str) -> list[Span]:
        if self._gpu:
            torch.cuda.synchronize()
        found = [(name, begin, end) for where, name, begin, end in self._spans if where == lane]
        return sorted((Span(name, self._ms(begin), self._ms(end)) for name, begin, end in found), key=lambda s: s.begin)

    def _ms(self, mark: Any) -> float:
        return float(self._first.elapsed_time(mark) if self._gpu else (mark - self._first) * 1e3)


class Traced:
    """`inner`, with the times of every all-reduce: a thread (on the GPU: a stream) of its own waits for each."""

    def __init__(self, inner: Comm, recorder: Recorder, device: torch.device) -> None:
        self._inner = inner
        self._recorder = recorder
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sent: queue.SimpleQueue[_CpuAllReduce | None] = queue.SimpleQueue()
        self._waiter = threading.Thread(target=self._wait_for_each, daemon=True)
        self._waiter.start()
        self.count = 0
        self.size = inner.size
        self.rank = inner.rank

    def all_reduce(self, x: Tensor) -> Pending:
        name = f"all-reduce {self.count}"
        self.count += 1
        sent = self._recorder.mark()
        if self._stream is not None:
            return _GpuAllReduce(self._inner.all_reduce(x), name, sent, self._recorder, self._stream)
        pending = _CpuAllReduce(self._inner.all_reduce(x), name, sent, self._recorder)
        self._sent.put(pending)
        return pending

    def all_gather(self, x: Tensor) -> Tensor:
        return self._inner.all_gather(x)

    def _wait_for_each(self) -> None:
        while (pending := self._sent.get()) is not None:
            pending.complete()

    def close(self) -> None:
        self._sent.put(None)
        self._waiter.join()


class _CpuAllReduce:
    def __init__(self, inner: Pending, name: str, sent: Any, recorder: Recorder) -> None:
        self._inner, self._name, self._sent, self._recorder = inner, name, sent, recorder
        self._arrived = threading.Event()
        self._x: Tensor | None = None

    def complete(self) -> None:
        with record_function(self._name):
            self._x = self._inner.wait()
        self._recorder.add("comm", self._name, self._sent, self._recorder.mark())
        self._arrived.set()

    def wait(self) -> Tensor:
        begin = self._recorder.mark()
        with record_function(f"wait for {self._name}"):
            self._arrived.wait()
        self._recorder.add("wait", self._name, begin, self._recorder.mark())
        assert self._x is not None
        return self._x


class _GpuAllReduce:
    def __init__(self, inner: Pending, name: str, sent: Any, recorder: Recorder, stream: torch.cuda.Stream) -> None:
        self._name, self._recorder = name, recorder
        with torch.cuda.stream(stream), record_function(name):
            self._x = inner.wait()
            self._arrived = recorder.mark()
        recorder.add("comm", name, sent, self._arrived)

    def wait(self) -> Tensor:
        begin = self._recorder.mark()
        torch.cuda.current_stream().wait_event(self._arrived)
        self._recorder.add("wait", self._name, begin, self._recorder.mark())
        return self._x


def record_sub_blocks(model: Decoder, recorder: Recorder) -> None:
    """A span, and a range in the profiler's trace, for every attention and every MLP."""
    begun: list[tuple[Any, record_function]] = []

    def begin(name: str) -> None:
        begun.append((recorder.mark(), record_function(name)))
        begun[-1][1].__enter__()

    def end(name: str) -> None:
        mark, range_ = begun.pop()
        range_.__exit__(None, None, None)
        recorder.add("compute", name, mark, recorder.mark())

    watch_sub_blocks(model, begin, end)


@contextmanager
def _without_standard_error() -> Iterator[None]:
    """torch's profiler prints lines of its own where it starts and stops, and no option turns them off."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def trace_rank(comm: Comm, device: torch.device, setting: TraceSetting) -> None:
    """One rank: every wiring, timed and then profiled; writes its files into the setting's folder."""
    recorder = Recorder(device)
    traced = Traced(comm if setting.link is None else Timed(comm, setting.link), recorder, device)
    model = load(Decoder(setting.config, traced, device), setting.source)
    record_sub_blocks(model, recorder)
    cache = model.new_cache(setting.batch, setting.context)
    cache.advance([setting.context - 1] * setting.batch)
    tokens = torch.zeros(setting.batch, 1, dtype=torch.long, device=device)

    def step(wiring: str) -> Step:
        comm.all_gather(torch.zeros(1, device=device))  # ranks begin together
        traced.count = 0
        recorder.begin()
        model(tokens, cache)
        lanes = (recorder.spans(lane) for lane in ("compute", "comm", "wait"))
        return Step(wiring, comm.rank, *lanes)

    steps = []
    for wiring in setting.wirings:
        model.rewire(wiring)
        for _ in range(WARM_UP):
            step(wiring)
        timed = sorted((step(wiring) for _ in range(STEPS)), key=lambda step: step.ms)
        steps.append(timed[STEPS // 2])
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with _without_standard_error(), profile(activities=activities, experimental_config=every_thread) as profiler:
            step(wiring)
        name = wiring.replace(" ", "_").replace(":", "-")
        profiler.export_chrome_trace(str(setting.out / f"{name}.rank{comm.rank}.trace.json"))
    traced.close()
    about = {**_about(setting, comm.size), **machine(device)}
    lines = [json.dumps({**asdict(step), **about}) for step in steps]
    write_text(setting.out / f"steps.rank{comm.rank}.jsonl", "\n".join(lines) + "\n")


def _about(setting: TraceSetting, tp: int) -> dict[str, Any]:
    """What a reader of a step's line needs to know, under the keys of `ladder bench`."""
    link, real = setting.link, "nccl" if setting.device.type == "cuda" else "gloo"
    if link is not None:
        own = f"{link.alpha * 1e6:g}us,{link.beta / 1e9:g}GB/s"
        real = next((name for name, known in LINKS.items() if known == link), own)
    kind = {"mode": "ranks", "link": real, "link_kind": "real" if link is None else "emulated"}
    moment = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return {**kind, "tp": tp, "batch": setting.batch, "context": setting.context, "time": moment}


def trace(setting: TraceSetting, tp: int) -> list[Step]:
    """Run the ranks; returns the first rank's steps, the picture drawn where the library for it is installed."""
    if setting.device.type == "cuda" and torch.cuda.device_count() < tp:
        # gloo, which ranks on one GPU would use, holds up the host and not the stream: its waits could not be seen
        raise LadderError(f"a trace of {tp} ranks needs {tp} GPUs, this machine has {torch.cuda.device_count()}")
    setting.out.mkdir(parents=True, exist_ok=True)
    run_ranks(tp, setting.device, trace_rank, setting)
    lines = (setting.out / "steps.rank0.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [Step.read(json.loads(line)) for line in lines]
    link = (
        ("NCCL" if setting.device.type == "cuda" else "gloo") + " as it is"
        if setting.link is None
        else f"emulated link, {setting.link.alpha * 1e6:g} us + bytes / {setting.link.beta / 1e9:g} GB/s"
    )
    what = f"One decode step, rank 0 of {tp}, batch {setting.batch}, context {setting.context}, {setting.device.type}"
    if installed():
        draw(steps, f"{what}; {link}", setting.out / "lanes.png")
    else:
        logging.getLogger(__name__).warning("no picture: %s", missing())
    return steps
