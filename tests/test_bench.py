"""ladder bench: its plan, what it refuses, its turns, its figures, and real ranks."""

import json
import os
import signal
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.text import Text

from ladder.bench.model import Case, random_model
from ladder.bench.ranks import stream_ranks
from ladder.bench.sweep import measure, sweep
from ladder.bench.sweep.cells import Cell, Hardware, cells, comparisons, needs
from ladder.bench.sweep.measure import Measured, StepsDone, Timings, figures, in_turns
from ladder.bench.sweep.options import PRESETS, BenchOptions
from ladder.bench.sweep.runners import GraphRunner, PlainRunner, pieces
from ladder.bench.sweep.sweep import COLUMNS, KEYS, bench, done, key, line_of, read, table
from ladder.comm.base import Comm, Solo
from ladder.comm.one_rank import OneRank
from ladder.config.quantization import NAMED
from ladder.errors import LadderError, RankError
from ladder.kernels.launch import Launch, References
from ladder.layers.cache import KVCache
from ladder.layers.quantized import Quantized
from ladder.model import Decoder
from ladder.perf.arms import ARMS, wiring_of
from tests.graphs import recorded
from tests.recording import Recording

GIB = 1 << 30
LAPTOP, ONE_GPU, EIGHT = Hardware(0, 0, 8 * GIB), Hardware(1, 139 * GIB, 128 * GIB), Hardware(8, 139 * GIB, 512 * GIB)
LINE = {
    *("size", "wiring", "arm", "tp", "batch", "prompt", "new", "context", "link", "link_alpha_us", "link_beta_gb_s"),
    *("link_kind", "mode", "chip", "cores", "dtype", "layers", "of_layers", "ttft_ms", "tpot_ms_p50", "tpot_ms_p99"),
    *("tpot_ms_q1", "tpot_ms_q3", "tokens_per_s", "tokens_per_s_user", "tokens_per_s_gpu", "peak_memory_gb", "hidden"),
    *("bandwidth_tb_s", "bandwidth_share", "prefill_tflop_s", "prefill_share", "all_reduces", "comm_ms", "exposed_ms"),
    *("repetitions", "torch", "triton", "python", "commit", "time", "cell_link", "ttft_repetitions"),
    *("ttft_ms_q1", "ttft_ms_q3"),
}
TINY = BenchOptions(
    size=("tiny",), tp=(2,), batch=(1, 3), emulate_link=("2ms,10GB/s",), prompt=8, new=8, repetitions=3, device="cpu"
)


def quiet(*_: object) -> None: ...


def test_quick_is_all_arms_in_turns() -> None:
    found = cells(BenchOptions(preset="quick"), ONE_GPU)  # a GPU does not change what it measures
    assert [[cell.arm for cell in compared] for compared in comparisons(found)] == [list(ARMS)] * 2
    assert {(cell.device, cell.mode, cell.tp, cell.link_kind) for cell in found} == {("cpu", "ranks", 2, "emulated")}
    assert {cell.link for cell in found if cell.arm != "standard-fused"} == {found[0].cell_link}
    assert {cell.wiring for cell in found if cell.arm == "hybrid"} == {"standard:4 ladder:4"}


def test_the_papers_protocol() -> None:
    found = cells(BenchOptions(preset="paper"), ONE_GPU)
    assert len(found) == 3 * 4 * 2 * 8 and {(cell.prompt, cell.new, cell.context) for cell in found} == {
        (1024, 512, 1280)
    }
    links = {(cell.tp, cell.cell_link) for cell in found}
    assert links == {(tp, link) for tp in (2, 4, 8) for link in ("nvlink_nccl", f"pcie_shm_tp{tp}")}
    fused = [cell for cell in found if cell.arm == "standard-fused"]
    assert {cell.link for cell in fused} == {"nvlink_fused"} and {cell.wiring for cell in fused} == {"standard"}
    assert {cell.mode for cell in found} == {"one-rank"}
    real = cells(BenchOptions(preset="paper"), EIGHT)  # several GPUs use their own link
    assert {(cell.mode, cell.link, cell.link_kind) for cell in real} == {("ranks", "nccl", "real")}
    assert len(real) == 3 * 4 * 7 and "standard-fused" not in {cell.arm for cell in real}
    asked = cells(BenchOptions(preset="paper", emulate_link=("ib_2node_nccl",), tp=(8,), batch=(1,)), EIGHT)
    assert {(cell.link_kind, cell.cell_link) for cell in asked} == {("emulated", "ib_2node_nccl")} and len(asked) == 8


@pytest.mark.parametrize("name, prompt", [("1k1k", 1024), ("8k1k", 8192)])
def test_todays_protocols(name: str, prompt: int) -> None:
    found = cells(BenchOptions(preset=name), ONE_GPU)
    assert len(found) == 3 * 3 * 8 and {(cell.prompt, cell.new, cell.tp) for cell in found} == {(prompt, 1024, 8)}
    assert {cell.cell_link for cell in found} == {"nvlink_nccl", "nvlink_oneshot", "pcie_shm_tp8"}


def test_flags_override_the_preset() -> None:
    given = BenchOptions(preset="quick", arm=("ladder",), wiring=("ladder-1", "ladder@3"), batch=(2, 4), prompt=5)
    found = cells(given, LAPTOP)
    assert [(cell.batch, cell.arm, cell.wiring) for cell in found[:3]] == [
        (2, "ladder", "ladder"),
        (2, "ladder-1", "ladder"),
        (2, "ladder@3", "standard:3 ladder:1 standard:4"),
    ]
    assert {cell.prompt for cell in found} == {5} and {cell.new for cell in found} == {PRESETS["quick"].new}
    alone = cells(BenchOptions(preset="quick", tp=(1,)), LAPTOP)  # one rank needs no link
    assert {(cell.link, cell.link_kind) for cell in alone} == {(None, "real")} and len(alone) == 2 * 7
    few = cells(BenchOptions(preset="quick", layers=3, emulate_link=("real",)), LAPTOP)
    assert {(cell.link, cell.link_kind, cell.layers, cell.of_layers) for cell in few} == {("gloo", "real", 3, 8)}
    assert wiring_of("hybrid", 1).layers == ("standard",)


@pytest.mark.parametrize(
    "given, here, message",
    [
        ({"preset": "quik"}, LAPTOP, "unknown preset 'quik'.*nearest is 'quick'"),
        ({"preset": "quick", "size": ("llama-3-70",)}, LAPTOP, "unknown size.*nearest is 'llama-3-70b'"),
        ({"preset": "quick", "arm": ("lader",)}, LAPTOP, "unknown wiring 'lader'.*nearest is 'ladder'"),
        ({"preset": "quick", "emulate_link": ("nvlink_ncl",)}, LAPTOP, "unknown link.*nearest is 'nvlink_nccl'"),
        ({"preset": "quick", "tp": (3,)}, LAPTOP, "3 ranks cannot share.*degrees that work are.*nearest is 2"),
        ({"preset": "quick", "tp": (2, 5)}, LAPTOP, "5 ranks cannot share.*nearest is 4"),
        ({"preset": "quick", "prompt": 4000}, LAPTOP, "more than quick's context of 2048: the longest prompt is 1984"),
        ({"preset": "quick", "arm": ("ladder:3",)}, LAPTOP, "covers 3 layers"),
        ({"preset": "quick", "layers": 9}, LAPTOP, "at most quick's 8"),
        ({"preset": "quick", "repetitions": 1}, LAPTOP, "repetitions must be from 2"),
        ({"preset": "quick", "batch": (0,)}, LAPTOP, "batch must be from 1"),
        ({"preset": "quick", "weights": ("fp9",)}, LAPTOP, "unknown format of weights 'fp9'.*nearest is 'fp8'"),
        ({"preset": "quick", "weights": ("fp8,",)}, LAPTOP, "unknown format of weights ''"),
        (
            {"preset": "quick", "size": ("embedded",), "weights": ("int4",)},
            LAPTOP,
            "2 ranks would cut the groups of 128 of a matrix's 320 inputs",
        ),
        (
            {"preset": "quick", "size": ("embedded",), "weights": ("int4-64",), "tp": (1,)},
            LAPTOP,
            "864 inputs of a rank's matrix cannot be stored as int4 in groups of 64 inputs: groups of 32 can be",
        ),
        ({"preset": "quick", "mode": "one"}, LAPTOP, "unknown mode 'one'.*'one-rank'"),
        ({"preset": "quick", "mode": "one-rank"}, LAPTOP, "needs a GPU"),
        ({"preset": "quick", "device": "cuda"}, LAPTOP, "torch sees no GPU"),
        ({"preset": "quick", "arm": ("standard-fused",), "emulate_link": ("real",)}, LAPTOP, "give --emulate-link"),
        ({"preset": "paper"}, LAPTOP, "on this machine .282.2 GB of weights.*try (a smaller size|--layers)"),
        ({"preset": "paper"}, Hardware(1, 24 * GIB, 64 * GIB), "on each GPU .70.6 GB of weights.*try --tp 8"),
        ({"preset": "paper"}, Hardware(8, 80 * GIB, 64 * GIB), "at TP 2, batch 64, needs.*try --batch 39$"),
        ({"preset": "paper", "tp": (8,)}, Hardware(8, 16 * GIB, 64 * GIB), "try --layers"),
        ({"preset": "paper", "batch": (65,)}, ONE_GPU, "batch must be from 1 to 64 on a GPU"),
        ({"preset": "paper", "mode": "ranks"}, ONE_GPU, "2 ranks need 2 GPUs, this machine has 1"),
        ({"preset": "paper", "emulate_link": ("real",)}, ONE_GPU, "one rank alone has no real link"),
        ({}, LAPTOP, "nothing to measure: give --preset quick"),
    ],
)
def test_refused(given: dict[str, Any], here: Hardware, message: str) -> None:
    with pytest.raises(LadderError, match=message):
        cells(BenchOptions(**given), here)


@pytest.mark.parametrize("gib, flag", [(16, "layers"), (80, "batch")])
def test_what_is_offered_fits(gib: int, flag: str) -> None:
    """And one more does not."""
    here = Hardware(8, gib * GIB, 64 * GIB)
    given = BenchOptions(preset="paper", tp=(2,) if flag == "batch" else (8,))
    with pytest.raises(LadderError) as refusal:
        cells(given, here)
    *_, offered, number = str(refusal.value).split()
    assert offered == f"--{flag}"
    fits, not_fits = (int(number), int(number) + 1) if flag == "layers" else ((int(number),), (int(number) + 1,))
    assert cells(replace(given, **{flag: fits}), here)
    with pytest.raises(LadderError, match="try --"):
        cells(replace(given, **{flag: not_fits}), here)


def who_started(comm: Comm, device: torch.device) -> Iterator[tuple[int, bool]]:
    yield os.getppid(), signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_ranks_are_forked_from_one_process_and_hear_no_ctrl_c() -> None:
    """Each cell of a sweep starts ranks anew: what they import is imported once."""
    found = [list(stream_ranks(2, torch.device("cpu"), who_started)) for _ in range(2)]
    (parent, deaf), *others = found[0]
    assert found[0] == found[1] and parent != os.getpid() and deaf and not others


def test_real_ranks(tmp_path: Path) -> None:
    """All arms on two processes, a link far slower than the sub-blocks: the standard wiring waits for all of it."""
    given = replace(TINY, out=tmp_path / "bench.jsonl")
    rows = list(bench(given, quiet))
    assert [(row["batch"], row["arm"]) for row in rows] == [(batch, arm) for batch in (1, 3) for arm in ARMS]
    assert [json.loads(line) for line in given.out.read_text().splitlines()] == rows
    assert all(row.keys() >= LINE and set(KEYS) <= row.keys() for row in rows)
    for row in rows:
        assert row["tpot_ms_q1"] <= row["tpot_ms_p50"] <= row["tpot_ms_q3"] and row["repetitions"] == 3
        assert row["ttft_ms_q1"] <= row["ttft_ms"] <= row["ttft_ms_q3"] and row["ttft_repetitions"] >= 3
        assert row["context"] == 12 and row["mode"] == "ranks" and row["link_kind"] == "emulated"
        spent = row["ttft_ms"] + 7 * row["tpot_ms_p50"]
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 8 / spent * 1e3, rel=1e-3)
        assert row["tokens_per_s_gpu"] * 2 == pytest.approx(row["tokens_per_s"], rel=1e-2)
    one = {row["arm"]: row for row in rows[:8]}
    assert [one[arm]["all_reduces"] for arm in ARMS] == [9, 9, 5, 5, 9, 9, 5, 0]  # the embedding's is one of them
    assert one["standard"]["comm_ms"] >= 20 and one["standard"]["tpot_ms_p50"] >= 20  # the all-gather is emulated too
    assert one["none"]["hidden"] is None and one["none"]["exposed_ms"] == one["none"]["comm_ms"] == 0
    assert one["standard-fused"]["link"] == "nvlink_fused" and one["standard-fused"]["cell_link"] == "2ms,10GB/s"
    grid = table(rows)
    assert grid.row_count == len(rows) + 2 and "ranks" in str(grid.caption)
    assert grid.title == "tiny, TP 2, 8+8 tokens, link 2ms,10GB/s (emulated)"
    assert table(rows[:8]).title == "tiny, TP 2, batch 1, 8+8 tokens, link 2ms,10GB/s (emulated)"


@pytest.mark.parametrize("weights", [name for name in NAMED if name not in ("bf16", "int4")])  # tiny has no 128 inputs
def test_random_quantized_models(weights: str) -> None:
    """Every weight is a number, about as large as a dense one."""
    model = random_model(Case("tiny", 1, weights=weights), Solo(), torch.device("cpu"), torch.float32)
    found = [module for module in model.modules() if isinstance(module, Quantized)]
    assert len(found) == 4 * model.config.layers and {each.storage for each in found} == {NAMED[weights]}
    for each in found:
        dense, scales = each.dequantized(), each.scales[:: each.rows_alike]  # one of each block
        assert dense.isfinite().all() and scales.unique().numel() > scales.numel() / 2
        # scales are within a half of their mean
        low, high = (0.015, 0.027) if scales.numel() > 10 else (0.009, 0.031)
        assert low < dense.std() < high and dense.mean().abs() < 0.004
    assert model(torch.tensor([[1, 2, 3]])).isfinite().all()
    assert model.lm_head.quantized is None and model.embed_tokens.weight.std() == pytest.approx(0.02, rel=0.05)


def test_formats_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model for each format, standard and ladder measured on it; lines name the format."""
    monkeypatch.setattr(sweep, "stream_ranks", lambda size, device, work, todo: work(Solo(), device, todo))
    monkeypatch.setattr(measure, "core_peaks", lambda dtype: {"read_tb_s": 1e-6, "tflop_s": 1e-6})
    given = replace(TINY, arm=("standard", "ladder"), weights=("bf16,fp8", "int4-32"), batch=(1,), repetitions=2)
    planned = cells(given, LAPTOP)
    assert [(cell.weights, cell.arm) for cell in planned[1:4]] == [
        *(("bf16", "ladder"), ("fp8", "standard"), ("fp8", "ladder")),
    ]
    assert [len(compared) for compared in comparisons(planned)] == [2, 2, 2]
    bytes_of = [needs(cell).weights for cell in planned[::2]]
    assert bytes_of[0] > bytes_of[1] > bytes_of[2]
    out = tmp_path / "bench.jsonl"
    with torch.inference_mode():
        rows = list(bench(replace(given, weights=("fp8",), tp=(1,), out=out), quiet))
    assert [row["weights"] for row in rows] == ["fp8", "fp8"] and rows == read(out)
    assert all(row["tpot_ms_p50"] > 0 and row["bandwidth_share"] > 0 for row in rows)
    old = [{name: value for name, value in row.items() if name != "weights"} for row in rows]  # which are of bf16
    out.write_text("".join(f"{json.dumps(row)}\n" for row in old))
    assert {row["weights"] for row in read(out)} == {"bf16"} and done(out) == {
        *(key({**row, "weights": "bf16"}) for row in rows),
    }
    grid = table([{**rows[0], "weights": "bf16"}, *rows])
    assert "weights" not in str(grid.title) and [cell for cell in grid.columns[0].cells if "weights" in str(cell)] == [
        *(Text("weights bf16"), Text("weights fp8")),
    ]
    assert "weights fp8" in str(table(rows).title)


def test_the_table_shows_lanes_where_lines_have_them() -> None:
    figures = ("ttft_ms", "tpot_ms_p50", "tpot_ms_p99", "tokens_per_s", "comm_ms", "exposed_ms", "bandwidth_share")
    old = {**line_of(tiny_cell()), "chip": "c", "commit": None, "hidden": None, **dict.fromkeys(figures, 1.0)}
    assert [column.header for column in table([old]).columns] == [*COLUMNS]
    last = table([old, {**old, "lanes": 1}, {**old, "lanes": 2}]).columns[-1]
    assert last.header == "lanes" and [*last.cells] == ["-", "1", "2"]


def tiny_cell(**changes: Any) -> Cell:
    return replace(cells(replace(TINY, batch=(1,)), LAPTOP)[0], **changes)


class Fake:
    """An arm that takes what `seconds` says of a call's number and its arm."""

    lanes = 2

    def __init__(self, arm: str, calls: list[tuple[str, str]]) -> None:
        self.arm, self._calls = arm, calls

    def prompt(self) -> None:
        self._calls.append(("prompt", self.arm))

    def step(self) -> None:
        self._calls.append(("step", self.arm))


def told_by_fakes(
    lot: list[Cell], seconds: Callable[[list[tuple[str, str]]], float], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[StepsDone | Measured], list[tuple[str, str]]]:
    """What is told of arms whose every call takes `seconds` of all calls so far; and those calls."""
    calls: list[tuple[str, str]] = []

    def clock(work: Callable[[], object]) -> float:
        work()
        return seconds(calls)

    monkeypatch.setattr(measure, "runner", lambda model, cache, cell, *_: Fake(cell.arm, calls))
    monkeypatch.setattr(measure, "_clock", lambda device: clock)
    model = random_model(lot[0].case(), Solo(), torch.device("cpu"), torch.float32)
    return list(in_turns(model, Solo(), lot, {"read_tb_s": 1.0, "tflop_s": 1.0}, None)), calls


def test_arms_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repetition by repetition, `none` always among them; and what a line says follows from the times."""
    lot = [tiny_cell(arm=arm, wiring=arm, tp=1, link=None, cell_link=None) for arm in ("standard", "ladder")]
    times = {"standard": 5e-3, "ladder": 3e-3, "none": 2e-3}
    told, calls = told_by_fakes(lot, lambda calls: times[calls[-1][1]], monkeypatch)
    steps = [arm for what, arm in calls if what == "step"]
    assert steps == ["standard", "ladder", "none"] * (3 + measure.WARM_UP["cpu"])
    assert sum(each.steps for each in told if isinstance(each, StepsDone)) == 3 * len(lot)
    rows = {each.cell.arm: each.figures for each in told if isinstance(each, Measured)}
    assert list(rows) == ["standard", "ladder"]  # `none` was not asked for
    assert [rows[arm]["exposed_ms"] for arm in rows] == [3.0, 1.0] and rows["ladder"]["hidden"] is None


@pytest.mark.parametrize("usual, expected", [(0.01, 9), (0.25, 4), (10.0, 3)])
def test_a_first_prompt_counts_for_nothing(usual: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles for a minute; how often the others are measured is a matter of their own time, three at least."""
    cell = tiny_cell(tp=1, link=None, cell_link=None, repetitions=9)
    told, calls = told_by_fakes([cell], lambda calls: 60.0 if len(calls) <= 2 else usual, monkeypatch)
    (row,) = (each.figures for each in told if isinstance(each, Measured))
    assert row["ttft_repetitions"] == expected and row["ttft_ms"] == row["ttft_ms_q3"] == usual * 1e3
    assert calls.count(("prompt", "standard")) == calls.count(("prompt", "none")) == expected + 1


@pytest.mark.parametrize(
    "kind, link, expected", [("emulated", "1ms,10GB/s", PlainRunner), ("real", "nccl", GraphRunner)]
)
def test_all_arms_run_the_same_software(kind: str, link: str, expected: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated link cannot be part of a graph, `none` could be: then no arm is one."""
    made: list[object] = []
    make = measure.runner

    def runner(model: Decoder, cache: KVCache, cell: Cell, comm: Comm, launch: Launch | None) -> object:
        made.append(make(model, cache, cell, comm, launch))
        return made[-1]

    monkeypatch.setattr(measure, "runner", runner)
    monkeypatch.setattr(measure, "Signalled", lambda wires, *_: wires[0])
    recorded(monkeypatch)
    rest: dict[str, Any] = {"link_kind": kind, "link": link, "cell_link": link, "repetitions": 2, "prompt": 16}
    lot = [tiny_cell(arm=arm, wiring=arm, **rest) for arm in ("standard", "ladder")]
    model = random_model(lot[0].case(), OneRank(2), torch.device("cpu"), torch.float32)
    list(in_turns(model, OneRank(2), lot, {"read_tb_s": 1.0, "tflop_s": 1.0}, References()))
    assert [type(each) for each in made] == [expected] * 3


@pytest.mark.parametrize("arm", ["standard", "parallel", "ladder", "none"])
def test_communication_is_counted_as_it_happens(arm: str) -> None:
    """All-reduces of a step, the embedding's too, and one all-gather; nothing at all without communication."""
    cell = tiny_cell(arm=arm, wiring=arm)
    model = random_model(cell.case(), OneRank(2), torch.device("cpu"), torch.float32)
    log: list[tuple[str, int]] = []
    measure.runner(model, model.new_cache(2, 16), cell, Recording(OneRank(2), log), None).step()
    sent, gathered = (sum(event == what for event, _ in log) for what in ("send", "gather"))
    timings = Timings([1.0, 1.0], [1.0, 1.0], 1.0, all_reduce=1.0, all_gather=0.25, memory=1.0)
    found = figures(cell, model.config, timings, {"read_tb_s": 1.0, "tflop_s": 1.0})
    assert (found["all_reduces"], found["comm_ms"]) == (sent, sent + 0.25 * gathered)
    assert gathered == (arm != "none")


def test_figures() -> None:
    cell = tiny_cell(tp=2, wiring="ladder", new=11)
    steps = [float(n) for n in range(1, 101)]
    timings = Timings([10.0, 20.0, 30.0], steps, none=40.5, all_reduce=2.0, all_gather=2.0, memory=3e9)
    found = figures(cell, cell.case().config(), timings, {"read_tb_s": 1e-3, "tflop_s": 1.0})
    assert (found["ttft_ms"], found["tpot_ms_p50"], found["tpot_ms_p99"]) == (20.0, 50.5, pytest.approx(99.01))
    assert found["tpot_ms_p50"] == statistics.median(steps) and found["repetitions"] == 100
    assert (found["ttft_ms_q1"], found["ttft_ms_q3"], found["ttft_repetitions"]) == (10.0, 30.0, 3)
    assert (found["all_reduces"], found["comm_ms"], found["exposed_ms"], found["hidden"]) == (9, 20.0, 10.0, 0.5)
    assert found["tokens_per_s"] == pytest.approx(11 / (0.02 + 10 * 0.0505), rel=1e-4)
    assert found["bandwidth_share"] == pytest.approx(found["bandwidth_tb_s"] * 1e3, abs=0.005)
    assert found["peak_memory_gb"] == 3.0


@pytest.mark.parametrize("batch, prompt, passes", [(1, 8, 1), (64, 1024, 4), (3, 8192, 2), (2, 100_000, 2)])
def test_prompts_go_in_pieces(batch: int, prompt: int, passes: int) -> None:
    found = list(pieces(tiny_cell(batch=batch, prompt=prompt)))
    assert len(found) == passes and [slot for some in found for slot in some] == list(range(batch))


@pytest.mark.parametrize("batch", (1, 3))
def test_one_rank_by_graphs(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: reference implementations for kernels, and a graph that computes again. Each arm
    keeps its own wiring and communicator when arms take turns, and chooses the tokens that the decoder's layers do.
    """
    made = recorded(monkeypatch)
    monkeypatch.setattr(measure, "configure", lambda model, *_: setattr(model, "comm", OneRank(2)))
    arms = [tiny_cell(batch=batch, mode="one-rank", arm=arm, wiring=arm) for arm in ("standard", "ladder")]
    model = random_model(arms[0].case(), OneRank(2), torch.device("cpu"), torch.float32)
    cache = model.new_cache(batch + 1, 64)
    by_graphs = [measure.runner(model, cache, arm, OneRank(2), References()) for arm in arms]
    plain = [PlainRunner(model, cache, arm, OneRank(2)) for arm in arms]
    assert len(made) == 2
    for _ in range(2):
        for graph, layers in zip(by_graphs, plain, strict=True):
            assert isinstance(graph, GraphRunner)
            graph.step()
            graph.prompt()
            layers.prompt()
            assert graph._choice is not None and layers._choice is not None and len(graph._choice) == batch
            assert torch.equal(graph._choice, layers._choice)
    assert [graph.replays for graph in made] == ([2, 2, 2, 2] if batch == 1 else [2, 2])  # short prompts have graphs


def fails(comm: Comm, device: torch.device, error: Exception) -> Iterator[str]:
    yield "begun"
    if comm.rank == 1:
        raise error
    comm.all_gather(torch.ones(1))  # waits for the other rank


@pytest.mark.parametrize(
    "error, message",
    [
        (LadderError("no such thing"), "no such thing"),
        (KeyError("x"), "rank 1 failed: KeyError: 'x'; all ranks were stopped"),
    ],
)
def test_a_rank_that_fails(error: Exception, message: str) -> None:
    results = stream_ranks(2, torch.device("cpu"), fails, error)
    with pytest.raises(LadderError if isinstance(error, LadderError) else RankError) as raised:
        assert list(results) == ["begun"]
    assert str(raised.value) == message
