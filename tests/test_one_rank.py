"""One rank of many: its communicator, what its schedules take at best, and the lanes of a profiled step."""

import json
import statistics
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.bench import one_rank
from ladder.bench.model import Case, FusedModel, configure, random_model
from ladder.bench.one_rank import MEASUREMENTS, WIRINGS, bound_ms, spread, two_lanes_ms
from ladder.bench.trace import step_trace
from ladder.bench.trace.step_trace import kernels_of, step_of
from ladder.bench.tune import PROCESS_BYTES, DecodeStep, compile_all, tuned
from ladder.comm.base import Solo
from ladder.comm.link import LINKS, Link
from ladder.comm.one_rank import LibraryRank, OneRank
from ladder.comm.signalled import Flagged, Signalled
from ladder.config import ModelConfig
from ladder.engine.executors.heartbeat import Heartbeat, HeartbeatComm
from ladder.engine.graphs import steps as graphs
from ladder.errors import LadderError
from ladder.jit import PRESENT
from ladder.kernels.decode import FusedReader
from ladder.kernels.launch import References
from ladder.kernels.stream import Source
from ladder.kernels.table import SHARED, Gemv, Shape, SmallGemm, Split, Table, candidates, rule, same_bits, sound
from ladder.model import Decoder
from ladder.perf.costs import RankCosts
from ladder.residual import Terms
from ladder.wiring import Wiring

PART = {"attention_us": 15.0, "mlp_us": 40.0, "rest_us": 100.0}


def simulated(pattern: str, wire: float, lanes: int, layers: int) -> float:
    """Milliseconds of a step, sub-block by sub-block: the naive account that the bounds must agree with."""
    now, free, sums = wire, [0.0] * lanes, []
    count = 0
    for layer in Wiring.parse(pattern, layers).sub_blocks():
        for block, us in zip(layer, (PART["attention_us"], PART["mlp_us"]), strict=True):
            now = max([now, *sums[: len(sums) - block.lag]]) + us
            if block.out == "reduce":
                lane = count % lanes
                free[lane] = max(free[lane], now) + wire
                sums.append(free[lane])
                count += 1
    return (max([now, *sums]) + PART["rest_us"]) / 1e3


@pytest.mark.parametrize("pattern, wire", product([name for name in WIRINGS if name != "none"], (0.1, 8, 24, 50, 80)))
def test_the_bound_is_what_the_schedule_takes(pattern: str, wire: float) -> None:
    for lanes in (1, 2) if pattern == "ladder-1-2" else (1,):
        assert bound_ms(pattern, PART, wire, lanes, 7) == pytest.approx(simulated(pattern, wire, lanes, 7), rel=1e-12)


@pytest.mark.parametrize("wire", [8.0, 24.0, 80.0])
def test_the_bound_of_a_layer(wire: float) -> None:
    """As one would write it down."""
    a, m = PART["attention_us"], PART["mlp_us"]
    said = {
        "none": a + m,
        "standard": a + m + 2 * wire,
        "parallel": a + m + wire,
        "ladder": max(a, wire) + max(m, wire),
    }
    for pattern, us in said.items():
        more = bound_ms(pattern, PART, wire, 1, 41) - bound_ms(pattern, PART, wire, 1, 40)
        assert 1e3 * more == pytest.approx(us)


def test_the_estimate_of_two_lanes() -> None:
    """Never less than reading everything; where nothing may run beside anything, that of one lane."""
    costs, layers = RankCosts(ModelConfig.named("llama-3-70b"), 8), 80
    reading = layers * 2 * (costs.attention + costs.mlp()) / 4.6e12
    measured = {"attention_us": 20.0, "mlp_us": 40.0, "rest_us": 100.0}
    for pattern, us in product(("ladder", "ladder-2", "parallel-1"), (0.0, 8.0, 24.0)):
        found = two_lanes_ms(pattern, measured, costs, 4.6, us)
        assert reading * 1e3 + 0.1 <= found <= bound_ms("standard", measured, us, 1, layers)
    one = bound_ms("ladder", measured, 0.0, 1, layers)
    assert two_lanes_ms("ladder", measured, costs, 4.6, 0.0) < 0.85 * one
    for us in (0.0, 24.0):
        one = bound_ms("standard", measured, us, 1, layers)
        assert two_lanes_ms("standard", measured, costs, 4.6, us) == pytest.approx(one)


def test_the_rank_that_is_there() -> None:
    comm = OneRank(4, Link(1.0, 1e9))  # on the CPU nothing is emulated
    x = torch.arange(3.0)
    assert (comm.size, comm.rank) == (4, 0)
    assert torch.equal(comm.all_reduce(x.clone()).wait(), x)
    assert comm.all_gather(x).tolist() == [0.0, 1.0, 2.0] * 4


class Stream:
    """A GPU's stream without a GPU."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> str:
        return "event"


def test_sums_take_turns_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    two = Signalled([OneRank(4, blocks=3), OneRank(4, blocks=5)], torch.device("cpu"), sums=4)
    before = two.all_reduce(torch.zeros(2))
    assert isinstance(before, Flagged) and before.flag is None  # no pass has begun
    two.begin()
    sent = [two.all_reduce(torch.full((2,), float(n))) for n in range(3)]
    assert two.flags.tolist() == [3, 5, 3, 0]
    for number, (pending, need) in enumerate(zip(sent, (3, 5, 3), strict=True)):
        assert isinstance(pending, Flagged) and pending.flag is not None
        assert pending.need == need == int(pending.flag) and pending.wait().tolist() == [number] * 2
    waited: list[object] = []
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: waited.append(event))
    assert sent[0].for_kernel() is sent[0].x and not waited  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert sent[0].for_kernel() is sent[0].x and waited == ["event"]  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    two.end()
    two.flags.zero_()
    two.begin()
    two.all_reduce(torch.zeros(2))
    assert two.flags.tolist() == [3, 0, 0, 0]  # a new pass counts from the first again
    # a library sets no flags: a kernel behind it does, where it says what it needs for itself and enough is left
    watched = HeartbeatComm(LibraryRank(4, multiprocessors=8), Heartbeat([0.0, 0.0], 0))
    library = Signalled([watched], torch.device("cpu"), sums=2)
    library._cores = 132
    library.begin()
    pending = library.all_reduce(torch.ones(2, 3))
    assert isinstance(pending, Flagged) and pending.flag is not None
    assert (int(pending.flag), pending.need, pending.multiprocessors) == (1, 1, 8)
    terms = Terms(torch.zeros(2, 3), (pending,), ())
    assert (Source.of(terms).flags, Source.of(terms).spared) == ((pending.flag,), 8)
    for polls in (True, False):  # or it waits for the event
        source = FusedReader(References(), polls=polls).source(terms)
        assert len(source.flags) == polls and source.sums == (pending.x,)
    assert library.library and not two.library
    assert library.all_reduce(torch.ones(125, 3)).flag is None  # type: ignore[attr-defined]
    solo = Signalled([Solo()], torch.device("cpu"), sums=1)
    solo.begin()
    pending = solo.all_reduce(torch.ones(2))
    assert isinstance(pending, Flagged) and pending.flag is None  # who sets no flags is waited for by events


@pytest.mark.parametrize("part, output", [("attention", "attention.o_proj"), ("mlp", "mlp.down_proj")])
def test_a_step_without_a_sub_block(part: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the logits of a model in which that sub-block adds nothing. A graph is the function it captures here."""

    class Graph:
        def replay(self) -> None: ...

    monkeypatch.setattr(graphs, "capture", lambda step, *_: (Graph(), step()))
    model = random_model(Case("tiny", 1), Solo(), torch.device("cpu"), torch.float32)

    def logits(without: str | None) -> torch.Tensor:
        configure(model, "standard", None)
        return FusedModel(model, model.new_cache(3, 8), References(), without=without).decode_step(2, 8)()

    whole, lacking = logits(None), logits(part)
    for layer in model.layers:
        layer.get_submodule(output).weight.zero_()  # type: ignore[operator, union-attr]
    assert torch.allclose(lacking, logits(None), rtol=1e-5, atol=1e-6) and not torch.allclose(lacking, whole, rtol=1e-2)


def test_cases_of_formats() -> None:
    """One rank of 70B, and 8B, in fp8 and int4: what they are made of can be, and lines will name the format."""
    found = {name: each.args for name, each in MEASUREMENTS.items() if name.endswith(("-fp8", "-int4"))}
    assert set(found) == {f"{name}-{weights}" for name in ("70b", "70b-16", "8b") for weights in ("fp8", "int4")}
    for name, (case, links, wirings) in found.items():
        config = case.config()
        config.check_degree(case.tp)
        RankCosts(config, case.tp).check_groups()
        assert name.endswith(f"-{case.weights}") and RankCosts(config, case.tp).bytes_per_weight < 1.01
        assert (case.batch == 16) == ("-16-" in name) and {"standard", "ladder", "parallel-1"} <= set(wirings)
        assert [round(LINKS[link].alpha * 1e6) for link in links] == ([8, 24, 62] if case.tp == 8 else [])


def test_spread() -> None:
    found = [float(n) for n in range(1, 26)]
    assert spread(found)["ms"] == statistics.median(found) and spread(found)["steps"] == 25


def test_lanes_of_a_profiled_step(tmp_path: Path) -> None:
    """A step of two layers as the profiler would tell it, in microseconds; the MLP of layer 1 waits for 4 of them."""
    events, at = [("_start", 0, 2), ("_emulate_all_reduce", 2, 5)], 5
    for _ in range(2):
        for name, us in (("_gemv", 3), ("_attend", 1), ("_gemv", 2), ("_gemv", 6), ("_gemv", 4)):
            at += us
            events.append((name, at - us - 1, at))  # they start early
    ends = [end for name, _, end in events if name in ("_gemv", "_attend")]
    sums = [ends[2], ends[4], ends[7], ends[9]]
    events += [
        ("_emulate_all_reduce", sums[0], sums[0] + 1),
        ("_emulate_all_reduce", sums[1], sums[1] + 10),
        ("_emulate_all_reduce", 28, 29),
        ("_emulate_all_reduce", 45, 46),
    ]
    events.append(("_emulate_all_reduce", 50, 51))  # the gathering of the logits
    raw = [{"cat": "kernel", "name": name, "ts": begin, "dur": end - begin} for name, begin, end in events]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [*raw, {"cat": "cpu_op", "name": "x"}]}))
    model = Decoder(ModelConfig(16, 2, 4, 4, 16, vocab=16).rewired("ladder"), device="meta")
    step = step_of(kernels_of(tmp_path / "trace.json"), model, "ladder")
    assert [span.name for span in step.compute] == ["attention 0", "MLP 0", "attention 1", "MLP 1"]
    assert [(round(w.begin * 1e3), round(w.end * 1e3)) for w in step.waits[1:]] == [(27, 31)]
    assert len(step.comm) == 5


SHAPES = [
    Shape(kernel, batch, outputs, inputs, kernel == "gate_up", size)
    for kernel, batch, outputs, inputs, size in product(
        ("qkv", "gate_up", "row", "head"),
        (1, 2, 16, 64),
        (13, 1280, 16032),
        (16, 96, 4096, 8192, 14336, 16384),
        (2, 4),
    )
]


def test_configurations_by_rule_fit_a_chip() -> None:
    """Shared memory, and shapes that Triton can compile."""
    for shape in SHAPES:
        config = rule(shape)
        width = 1 << (shape.inputs - 1).bit_length()
        if isinstance(config, Gemv):
            assert config.rows * width * shape.bytes * (1 + shape.pair) * (config.stages - 1) <= SHARED, shape
        else:
            assert isinstance(config, SmallGemm)
            tile = (config.rows + max(16, shape.batch)) * config.depth * shape.bytes
            assert tile * (config.stages - 1) <= SHARED, shape
            assert shape.inputs % config.splits == 0 and config.early <= shape.inputs // config.splits
            assert config.splits == 1 or shape.splittable
        assert all(sound(shape, other) for other in candidates(shape)) and config in candidates(shape)
        beside = candidates(replace(shape, lanes=2), config)
        assert config in beside and len(beside) > 1
        assert all(sound(shape, other) and same_bits(config, other) for other in beside)
    assert rule(Shape("qkv", 128, 1280, 8192)) is None  # the library's


@pytest.mark.parametrize("batch, heads, positions", product((1, 16, 64), (1, 8), (16, 300, 1 << 17)))
def test_attention_by_rule(batch: int, heads: int, positions: int) -> None:
    config = rule(Shape("attend", batch, heads, positions))
    assert isinstance(config, Split) and config.splits & (config.splits - 1) == 0
    assert config.splits == 1 or (config.splits * batch * heads <= 256 and config.splits * 16 <= positions)


def test_the_table_of_the_package_has_the_same_bits_on_two_lanes() -> None:
    table = Table.of("NVIDIA H200")
    beside = [shape for shape in table.rows if shape.lanes > 1]
    assert beside and all(table[shape] == table.rows[shape] for shape in beside)


def test_a_table_is_its_lines() -> None:
    rows = {
        Shape("qkv", 1, 8, 16): Gemv(1, 4, 256, 3),
        Shape("row", 2, 8, 16): None,
        Shape("attend", 1, 1, 64): Split(4, 64, 4, 3, 1),
    }
    table = Table("a chip", rows)
    assert Table.read(json.loads(json.dumps(table.lines()))) == {"a chip": rows}
    # on two lanes what was tuned for them, else what was tuned for one
    table.rows[Shape("qkv", 1, 8, 16, lanes=2)] = Gemv(1, 4, 32, 3)
    table.rows[Shape("qkv", 1, 8, 16, lanes=2, flags=True)] = Gemv(1, 4, 64, 5)
    assert table[Shape("qkv", 1, 8, 16, lanes=2)] == Gemv(1, 4, 32, 3) != table[Shape("qkv", 1, 8, 16)]
    assert table[Shape("qkv", 1, 8, 16, lanes=2, flags=True)] == Gemv(1, 4, 64, 5)
    table.rows[Shape("qkv", 1, 8, 16, lanes=2, flags=True)] = Gemv(1, 8, 64, 5)  # other bits than on one lane
    assert table[Shape("qkv", 1, 8, 16, lanes=2, flags=True)] == Gemv(1, 4, 32, 3)
    assert table[Shape("attend", 1, 1, 64, lanes=2)] == Split(4, 64, 4, 3, 1)
    table.rows[Shape("attend", 1, 1, 64, lanes=2)] = Split(4, 64, 4, 5, 0)
    assert table[Shape("attend", 1, 1, 64, lanes=2)] == Split(4, 64, 4, 5, 0)
    table.rows[Shape("attend", 1, 1, 64, lanes=2)] = Split(8, 64, 4, 5, 0)  # other bits
    assert table[Shape("attend", 1, 1, 64, lanes=2)] == Split(4, 64, 4, 3, 1)
    older = {"chip": "a chip", "kernel": "attend", "batch": 1, "outputs": 1, "inputs": 64}
    read = Table.read([{**older, "config": {"kind": "split", "splits": 4, "positions": 64, "warps": 4}}])
    assert read["a chip"][Shape("attend", 1, 1, 64)] == Split(4, 64, 4, 3, 0)

    assert table[Shape("qkv", 1, 8, 32, lanes=2)] == rule(Shape("qkv", 1, 8, 32))
    assert table[Shape("qkv", 1, 8, 16)] == Gemv(1, 4, 256, 3) and table[Shape("qkv", 2, 8, 16)] == rule(
        Shape("qkv", 2, 8, 16)
    )


def test_blocks_of_attention_fit_into_shared_memory() -> None:
    for d, shared in ((64, 96 << 10), (128, 220 << 10), (128, 96 << 10), (256, 220 << 10), (256, 40 << 10)):
        line = 2 * d * 2
        for batch in (1, 4, 16, 64, 256):
            config = rule(Shape("attend", batch, 8, 2048))
            assert isinstance(config, Split)
            fits = config.within(shared, line)
            assert fits.positions >= 16 and fits.positions * line * ((fits.stages - 1) // 2) <= shared
            assert same_bits(config, fits) == (config.positions * line * ((config.stages - 1) // 2) <= shared)
    assert Split(1, 128, 4, 5, 0).within(1, 1024).positions == 16


@pytest.mark.parametrize(
    "shape, config",
    [
        (Shape("qkv", 1, 8, 16), Gemv(3, 4, 256, 3)),
        (Shape("qkv", 1, 8, 16), Gemv(1, 4, 0, 3)),
        (Shape("qkv", 1, 8, 16), Gemv("many", 4, 256, 3)),  # type: ignore[arg-type]
        (Shape("qkv", 4, 8, 16), Gemv(1, 4, 256, 3)),
        (Shape("row", 4, 64, 1024), SmallGemm(64, 128, 4, 5, 4, 0)),
        (Shape("qkv", 4, 64, 1024), SmallGemm(64, 128, 8, 5, 4, 256)),
        (Shape("qkv", 4, 64, 1020), SmallGemm(64, 128, 8, 5, 4, 0)),
        (Shape("qkv", 4, 64, 1024, bits=4, group=128), SmallGemm(64, 128, 4, 5, 4, 128)),
        (Shape("qkv", 4, 64, 1024, bits=4, group=128), SmallGemm(64, 128, 16, 5, 4, 0)),
        (Shape("qkv", 4, 64, 1024, bits=4, group=128), SmallGemm(64, 16, 4, 5, 4, 0)),
        (Shape("attend", 1, 1, 64), None),
        (Shape("row", 1, 8, 16), Split(4, 64, 4, 3, 1)),
        (Shape("nonsense", 1, 8, 16), None),
    ],
)
def test_configurations_that_would_compute_something_else(shape: Shape, config: object) -> None:
    assert not sound(shape, config)  # type: ignore[arg-type]


def test_the_shipped_table_is_sound() -> None:
    rows = Table.of("NVIDIA H200").rows
    assert all(sound(shape, config) for shape, config in rows.items())
    assert any(shape.outputs == 3584 and shape.batch == 1 for shape in rows)
    assert Table.of("an unknown chip").rows == {}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("llama-3-70b", 3, (1,)), "cannot be shared|degrees"),
        (("no-such-size", 8, (1,)), "no-such-size"),
        (("llama-3-70b", 8, (65,)), "batch must be from 1 to 64"),
        (("llama-3-70b", 8, ()), "batch must be from 1 to 64"),
        (("llama-3-70b", 8, (1,), 3), "lanes must be 1 or 2, not 3"),
        (("llama-3-70b", 8, (1,), 1, "int5"), "unknown format of weights 'int5'"),
    ],
)
def test_tuning_refuses(tmp_path: Path, arguments: Any, message: str) -> None:
    with pytest.raises(LadderError, match=message):
        next(tuned(tmp_path / "table.jsonl", *arguments))


@pytest.mark.parametrize(
    "program, message",
    [
        ("one_rank lane", "unknown measurement 'lane': known are 70b, .*; the nearest is 'lanes'"),
        ("step_trace", r"give a folder, and a link if need be, not 0 arguments: OUT \[LINK\]"),
        ("step_trace new nvlink_ncl", "unknown link 'nvlink_ncl': .*; the nearest is 'nvlink_nccl'"),
        pytest.param(
            "one_rank",
            "device 'cuda:0' is not there",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
    ],
)
def test_programs_refuse(program: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started or made."""
    name, *arguments = program.split()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LadderError, match=f"^{message}") as refused:
        {"one_rank": one_rank, "step_trace": step_trace}[name].main(arguments)
    assert "\n" not in str(refused.value) and not list(tmp_path.iterdir())


def test_a_program_that_refuses_says_one_sentence() -> None:
    done = subprocess.run([sys.executable, "-m", "ladder.bench.one_rank", "nonsense"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("one_rank: unknown measurement 'nonsense'"), done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the processes find a GPU, and compile")
def test_tuning_goes_on_without_the_processes_that_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which fail here, as there is no GPU; and none is started where the GPU's memory has no room for two."""
    step = DecodeStep(Case("tiny", 1), "none", None, 1)
    shape = Shape("row", 1, 64, 64)
    tries, device = [(shape, config) for config in candidates(shape)], torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 0)
    for free, warnings in ((PROCESS_BYTES, 0), (2 * PROCESS_BYTES, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_, free=free: (free, free))
        compile_all(step, tries, device)
        assert len(caplog.records) == warnings
    assert caplog.records[0].getMessage().startswith("configurations are compiled one after the other")


@pytest.mark.skipif(torch.cuda.is_available() or not PRESENT, reason="for machines without a GPU")
def test_tuning_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(LadderError, match="cuda"):
        next(tuned(tmp_path / "table.jsonl", "llama-3-8b", 1, (1,)))
    assert not list(tmp_path.iterdir())
