"""The performance model: the schedule by hand, the shipped rows against what was measured."""

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.comm.base import RankOnly
from ladder.comm.link import LINKS, Link
from ladder.config import ModelConfig
from ladder.config.model import Experts
from ladder.config.quantization import DENSE, NAMED, named_format
from ladder.errors import LadderError
from ladder.layers.quantized import Quantized
from ladder.model import Decoder
from ladder.perf import calibrate
from ladder.perf.arms import ARMS
from ladder.perf.chips import CHIPS, Chip
from ladder.perf.costs import ELEMENT_BYTES, RankCosts
from ladder.perf.engines import ENGINES
from ladder.perf.plan import AS_BF16, Deployment, best, over_nodes, plan, predict, setting, swept
from ladder.perf.predict import Setting, decoding, prefill, tpot_ms
from ladder.perf.reach import RANKS, across
from ladder.perf.schedule import Phase, walk, walk_two_lanes
from ladder.wiring import Wiring

RESULTS = Path(__file__).parent.parent / "results"
PAPER = Deployment("llama-3-70b", "h100", 8, "nvlink_nccl", 4, 1024, 512, "ladder")
KEYS = {"prefill_s", "decode_s", "tokens_per_s", "tpot_ms", "comm_ms", "exposed_ms"}


def blocks(pattern: str, attention: float, mlp: float, layers: int) -> list[tuple]:  # type: ignore[type-arg]
    table = Wiring.parse(pattern, layers).sub_blocks()
    return [pair for a, m in table for pair in ((a, attention), (m, mlp))]


@pytest.mark.parametrize(
    "pattern, all_reduce, total, count, waited",
    [
        # two layers; attention computes for 2, the MLP for 5
        ("standard", 3.0, 2 * (2 + 3 + 5 + 3), 4, 12.0),
        ("parallel", 3.0, 2 * (2 + 5 + 3), 2, 6.0),
        ("none", 3.0, 14.0, 0, 0.0),
        ("desync-2x", 3.0, 2 * (2 + 5 + 3), 2, 6.0),
        # attention's all-reduce is hidden by the MLP, the MLP's leaves 1 over; the last has nothing to hide it
        ("ladder", 3.0, 2 + 5 + 2 + 1 + 5 + 3, 4, 4.0),
        ("ladder", 1.0, 2 + 5 + 2 + 5 + 1, 4, 1.0),
        # one all-reduce at a time: each waits for the one before it
        ("ladder", 10.0, 2 + 10 + 10 + 10 + 10, 4, 28.0),
        # two behind: nobody waits but the end, for what has queued up on the link: from 2 on it is never idle
        ("ladder-2", 5.0, 2 + 4 * 5, 4, 8.0),
        ("standard:1 ladder:1", 3.0, 2 + 3 + 5 + 2 + 1 + 5 + 3, 4, 7.0),
    ],
)
def test_schedule(pattern: str, all_reduce: float, total: float, count: int, waited: float) -> None:
    found = walk(blocks(pattern, 2.0, 5.0, 2), all_reduce, first=False)
    assert (found.total, found.all_reduces, found.waited) == (total, count, waited)
    assert found.comm == count * all_reduce and found.exposed == waited
    assert found.total == pytest.approx(14.0 + waited)


def test_schedule_with_the_embedding_and_contention() -> None:
    assert walk(blocks("ladder", 2.0, 5.0, 1), 1.0, first=True).total == 1 + 2 + 5 + 1
    slowed = walk(blocks("ladder", 2.0, 5.0, 2), 1.0, first=False, contention=0.5)
    # three sums share all of their second with a computation
    assert slowed.slowed == pytest.approx(1.5) and slowed.total == pytest.approx(2 + 5 + 2 + 5 + 1.5 + 1)
    assert walk(blocks("standard", 2.0, 5.0, 2), 1.0, first=False, contention=0.5).slowed == 0


ATTENTION, MLP = (Phase(1.0, True), Phase(1.0, False)), (Phase(4.0, True), Phase(1.0, True))


def lanes(pattern: str, layers: int, attention: tuple[Phase, ...] = ATTENTION) -> list[tuple]:  # type: ignore[type-arg]
    table = Wiring.parse(pattern, layers).sub_blocks()
    return [pair for a, m in table for pair in ((a, attention), (m, MLP))]


@pytest.mark.parametrize("pattern, all_reduce, total, waited", [
    # two layers; attention reads for 1 and then takes 1 without reading, the MLP reads for 4 and for 1
    ("standard", 0.0, 14.0, 0.0), ("standard", 3.0, 2 * (2 + 3 + 5 + 3), 12.0),
    # both attentions' reading is beside the first MLP's, and nothing else takes time
    ("ladder", 0.0, 12.0, 0.0), ("ladder-2", 0.0, 12.0, 0.0), ("none", 3.0, 14.0, 0.0),
    # the second MLP waits for the first one's all-reduce, beside which the second attention computes
    ("ladder", 2.0, 7 + 2 + 5 + 2, 3.0),
    # the first all-reduce begins when attention and MLP have ended; the second layer does not wait for it
    ("parallel-1", 4.0, 12 + 4.0, 4.0), ("parallel", 4.0, 6 + 4 + 6 + 4, 8.0),
    # attention's result is read at once, the MLP's one all-reduce later: beside it the next attention computes
    ("desync-2x-1", 4.0, 2 + (5 + 1) + 5 + 4, 4.0),
])  # fmt: skip
def test_schedule_on_two_lanes(pattern: str, all_reduce: float, total: float, waited: float) -> None:
    found = walk_two_lanes(lanes(pattern, 2), all_reduce, first=False)
    assert found.total == pytest.approx(total) and found.waited == pytest.approx(waited)


@pytest.mark.parametrize("pattern", ("standard", "desync-2x", "none", "standard:2 desync-3x:2"))
def test_two_lanes_are_one_where_every_sub_block_waits(pattern: str) -> None:
    one = walk(blocks(pattern, 2.0, 5.0, 4), 1.5, first=True, contention=0.25)
    assert walk_two_lanes(lanes(pattern, 4), 1.5, first=True, contention=0.25) == pytest.approx(one)


def test_two_lanes_beside_all_reduces() -> None:
    assert walk_two_lanes(lanes("ladder", 1), 1.0, first=True).total == 1 + 6 + 1
    # attention's all-reduce is beside the MLP: it slows it as it does on one lane
    slowed = walk_two_lanes(lanes("ladder", 1), 1.0, first=False, contention=0.5)
    assert slowed.slowed == pytest.approx(1 / 2) and slowed.total == pytest.approx(6 + 1 / 2 + 1)
    short = (Phase(1e-9, False),)
    one = walk(blocks("ladder", 1e-9, 5.0, 8), 2.0, first=False, contention=0.5)
    assert walk_two_lanes(lanes("ladder", 8, short), 2.0, False, 0.5).slowed == pytest.approx(one.slowed, rel=0.2)
    # a partial sum that is held is there before the MLP's last phase begins
    long = (Phase(9.0, False),)
    assert walk_two_lanes(lanes("parallel", 1, long), 0.0, first=False).total == 9 + 1
    # nothing is faster than reading everything, nor than the longest chain
    for pattern in ("ladder", "ladder-2", "parallel-1", "standard"):
        for all_reduce in (0.0, 0.5, 2.0, 9.0):
            total = walk_two_lanes(lanes(pattern, 5), all_reduce, first=False).total
            assert 5 * 6 <= total <= walk(blocks("standard", 2.0, 5.0, 5), all_reduce, first=False).total + 1e-9


def test_the_shipped_rows_fit_what_was_measured() -> None:
    runs = calibrate.published(RESULTS / "published" / "h100_70b_runs.csv", ENGINES["paper"])
    fitted, held_back = calibrate.halves(runs)
    assert len(runs) == len(fitted) + len(held_back) == 106 and not {r.group for r in fitted} & {
        r.group for r in held_back
    }
    found = calibrate.account(ENGINES["paper"], held_back)
    assert found["median_error"] <= 0.08 and found["p90_error"] <= 0.2
    assert calibrate.fit(ENGINES["paper"], runs[:2], 0.0) == ENGINES["paper"]  # which has no `lane` to fit
    everything = calibrate.account(ENGINES["paper"], runs)
    assert everything["right_orders"] >= 0.9 * everything["orders"] > 20
    ours = calibrate.measured(RESULTS / "one_rank_h200.jsonl", ENGINES["ladder"])
    assert {target.setting.batch for target in ours} == {1, 4, 16, 64} and len(ours) > 50
    assert max(calibrate.errors(ENGINES["ladder"], ours)) <= 0.1


def test_a_fit_finds_what_it_was_made_from() -> None:
    """Times made by a known row, fitted from another one; and the account can tell a bad row."""
    config = ModelConfig.named("llama-3-8b")
    true = ENGINES["ladder"]
    targets = []
    for wiring in ("standard", "ladder", "none"):
        for batch in (1, 4):
            s = Setting(config.rewired(wiring), 4, batch, 512, 64, CHIPS["h200"], true, LINKS["nvlink_nccl"])
            targets.append(calibrate.Target(s, prefill(s).seconds, decoding(s).seconds))
    wrong = replace(true, single=replace(true.single, mlp=4 * true.single.mlp), launch=3 * true.launch)
    before = calibrate.account(wrong, targets)
    fitted = calibrate.fit(wrong, targets, 20, ("single.mlp", "launch"))
    assert before["max_error"] > 0.05 and calibrate.account(fitted, targets)["max_error"] < 0.01
    assert fitted.single.mlp == pytest.approx(true.single.mlp, rel=0.1)


FAMILIES = [
    ModelConfig.named("llama-3-8b"),
    ModelConfig.named("tiny"),
    ModelConfig(96, 3, 12, 4, 200, vocab=1999, family="qwen2", qkv_bias=True, tied=True),
    ModelConfig(64, 2, 8, 2, 96, vocab=1500, head_dim=16, family="qwen3"),
    ModelConfig(64, 2, 8, 8, 96, vocab=97, o_bias=True, mlp_bias=True, qkv_bias=True),
]


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: f"{config.family}-{config.hidden}")
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_costs_are_those_of_the_decoder(config: ModelConfig, tp: int, dtype: str) -> None:
    """Bytes and operations by formula, against the tensors of the first rank."""
    model = Decoder(config, RankOnly(0, tp), "meta", getattr(torch, dtype))
    cache = model.new_cache(3, 48)  # whole blocks
    costs = RankCosts(config, tp, ELEMENT_BYTES[dtype])
    weights = {name: weight.nbytes for name, weight in model.named_parameters()}
    assert costs.weight_bytes == sum(weights.values())
    assert costs.cache_bytes(3, 48) == sum(table.nbytes for table in (*cache.keys, *cache.values))
    read = sum(size for name, size in weights.items() if config.tied or "embed_tokens" not in name)
    assert costs.step_bytes(3, 48) == read + costs.cache_bytes(3, 48)
    matrices = sum(weight.numel() for weight in model.layers.parameters() if weight.dim() == 2)
    scores = sum(2 * 2 * 5 * sum(range(1, 8)) * config.heads // tp * config.head_dim for _ in range(config.layers))
    # the formula takes half of the square, which is short of the diagonal's half
    assert costs.prompt_operations(5, 7) == pytest.approx(2 * 5 * 7 * matrices + scores * 7 / 8, rel=1e-12)


MIXED = ModelConfig(128, 3, 8, 2, 256, vocab=97, head_dim=32, family="qwen3_moe", tied=True)
STORED = [  # int4 in groups of 128 needs 128 inputs on a rank
    ModelConfig(1024, 2, 16, 8, 2048, vocab=1999),
    ModelConfig(2048, 2, 16, 2, 1024, vocab=97, family="qwen2", qkv_bias=True, head_dim=128, dtype="bfloat16"),
    replace(MIXED, hidden=1024, heads=32, experts=Experts(4, 2, 1024, dense_layers=(1,)), ffn=2048),
]


@pytest.mark.parametrize("config", STORED, ids=lambda config: config.family)
@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("weights", NAMED)
def test_costs_of_quantized_weights_are_those_of_the_decoder(config: ModelConfig, tp: int, weights: str) -> None:
    """Codes, scales, and all that stays as it is: the first rank's tensors."""
    stored = replace(config, weights=named_format(weights))
    model = Decoder(stored, RankOnly(0, tp), "meta")
    costs = RankCosts(stored, tp, ELEMENT_BYTES[config.dtype])
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    assert costs.weight_bytes == sum(sizes.values())
    kinds = {module.storage for module in model.modules() if isinstance(module, Quantized)}
    assert kinds == ({NAMED[weights]} - {DENSE})
    read = sum(size for name, size in sizes.items() if config.tied or "embed_tokens" not in name)
    most = costs.step_bytes(10_000, 0)  # so many tokens choose every expert
    assert most == read
    plain = RankCosts(config, tp, ELEMENT_BYTES[config.dtype])
    assert (costs.attention, costs.mlp(3), costs.prompt_operations(5, 7)) == (
        *(plain.attention, plain.mlp(3), plain.prompt_operations(5, 7)),
    )
    assert costs.cache_bytes(3, 48) == plain.cache_bytes(3, 48)


def test_bytes_per_weight() -> None:
    """By hand, of 70B on one rank of eight: every scale serves 128 inputs of an output, or all of a rank's."""
    config, found = ModelConfig.named("llama-3-70b"), {}
    for weights in NAMED:
        found[weights] = RankCosts(replace(config, weights=named_format(weights)), 8).bytes_per_weight
    assert found["bf16"] == 2 and found["fp8"] == found["int8"]
    assert found["int4"] == 0.5 + 2 / 128 and found["int4-32"] == 0.5 + 2 / 32 and found["fp8-block"] == 1 + 4 / 128
    outputs = 10 * 128 + 8192 + 2 * 3584 + 8192  # of qkv, o, gate and up, down
    elements = 8192 * (18 * 128 + 3 * 3584)
    assert found["fp8"] == pytest.approx(1 + 4 * outputs / elements, rel=1e-12)


def test_gains_grow_as_weights_shrink() -> None:
    """Where a sub-block still hides an all-reduce; where the link is the bound, standard alone gains."""
    for batch, wiring in product((1, 4), ("parallel-1", "ladder", "ladder-2")):
        one = replace(PAPER, chip="h200", link="nvlink_oneshot", batch=batch)
        rows = plan(replace(one, wiring=w, weights=f) for f in ("bf16", "fp8", "int4") for w in (wiring, "standard"))
        assert 1 < rows[0]["speedup"] < rows[2]["speedup"] < rows[4]["speedup"], (batch, wiring)
        assert [row["assumed"] for row in rows[::2]] == [None, AS_BF16, AS_BF16]
        assert {row["speedup"] for row in rows[1::2]} == {1}
    slow = replace(PAPER, chip="h200", link="pcie_shm_tp8", batch=1)
    rows = plan(replace(slow, wiring=w, weights=f) for f in ("bf16", "int4") for w in ("ladder", "standard"))
    assert rows[0]["tpot_ms"] == pytest.approx(rows[2]["tpot_ms"], rel=1e-3) and rows[0]["speedup"] > rows[2]["speedup"]


def test_prefill_of_quantized_weights_by_hand() -> None:
    """As fast as bf16, and beside it codes are read and matrices are written, at the rate of reading."""
    one = replace(PAPER, chip="h200", size="llama-3-8b", tp=1, wiring="standard")
    plain, stored = (setting(replace(one, weights=weights)) for weights in ("bf16", "int4"))
    size = 32 * (plain.costs.attention + plain.costs.mlp())
    moved = size * (2 + 0.5 + 2 / 128) / (plain.engine.prompt.reach * 4.8e12)
    assert prefill(stored).seconds == pytest.approx(prefill(plain).seconds + moved, rel=1e-9)


def test_measured_lines_of_a_format_fit_its_share_of_the_peak(tmp_path: Path) -> None:
    """Lines made with a known share; everything else stays as it is, and then nothing is assumed any more."""
    ours = ENGINES["ladder"]
    true = replace(ours, single=replace(ours.single, reaches={"fp8": 0.7}))
    lines = []
    for size, wiring in product(("llama-3-8b", "llama-3.2-1b"), ("standard", "ladder")):
        config = replace(ModelConfig.named(size).rewired(wiring), weights=named_format("fp8"))
        s = Setting(config, 4, 1, 1024, 0, CHIPS["h200"], true, LINKS["nvlink_nccl"], "nvlink_nccl")
        line = {"measure": "decode", "size": size, "wiring": wiring, "tp": 4, "batch": 1, "context": 1024}
        ms = decoding(s, lanes=1).seconds * 1e3
        lines.append(line | {"link_name": "nvlink_nccl", "chip": "NVIDIA H200", "weights": "fp8", "ms": ms})
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    targets = calibrate.measured(path, ours)
    assert {target.setting.weights for target in targets} == {"fp8"}
    fitted = calibrate.fit(ours, targets, 20)
    assert fitted.single.reaches["fp8"] == pytest.approx(0.7, abs=0.01)
    assert replace(fitted, single=replace(fitted.single, reaches={})) == ours
    bf16 = [
        replace(target, setting=replace(target.setting, config=ModelConfig.named("llama-3-8b"))) for target in targets
    ]
    assert {target.group[2] for target in (*targets, *bf16)} == {"fp8", "bf16"}  # which are not compared
    path.write_text(json.dumps(lines[0] | {"weights": "fp9"}))
    with pytest.raises(LadderError, match="unknown format of weights 'fp9'"):
        calibrate.measured(path, ours)


def test_figures_hang_together() -> None:
    row = predict(PAPER)
    assert row.keys() >= KEYS
    assert row["tokens_per_s"] == pytest.approx(4 * 512 / (row["prefill_s"] + row["decode_s"]), rel=1e-3)
    assert row["decode_s"] == pytest.approx(512 * row["tpot_ms"] / 1e3, rel=1e-3)
    assert (
        row["comm_ms"] == pytest.approx(row["all_reduces"] * row["all_reduce_us"] / 1e3, rel=1e-3)
        and row["all_reduces"] == 160
    )
    rows = {w: predict(replace(PAPER, wiring=w)) for w in ("standard", "parallel", "ladder", "none")}
    assert rows["standard"]["tpot_ms"] > rows["parallel"]["tpot_ms"] > rows["none"]["tpot_ms"]
    assert rows["none"]["comm_ms"] == rows["none"]["exposed_ms"] == 0 and rows["none"]["hidden"] is None
    assert rows["standard"]["hidden"] == 0 < rows["ladder"]["hidden"] < 1
    alone = predict(replace(PAPER, tp=1, chip="h200", batch=1, size="llama-3-8b"))
    assert alone["comm_ms"] == 0
    # the first token is prefill's; the published runs, which the paper's engine was fitted to, count it as decoded
    assert alone["decode_s"] == pytest.approx(511 * alone["tpot_ms"] / 1e3, rel=1e-3)
    assert alone["tokens_per_s"] == pytest.approx(512 / (alone["prefill_s"] + alone["decode_s"]), rel=1e-3)
    assert predict(replace(PAPER, chip="h200", new=1))["decode_s"] == 0


def test_parts_add_up() -> None:
    """On one rank a step is its parts; on more, what the sums cost is what is missing."""
    alone = predict(replace(PAPER, chip="h200", size="llama-3-8b", tp=1, wiring="standard"))
    parts = 32 * (alone["attention_us"] + alone["mlp_us"]) + alone["rest_us"]
    assert parts == pytest.approx(1e3 * alone["tpot_ms"], rel=1e-3)
    assert alone["tokens_per_s_user"] == pytest.approx(1e3 / alone["tpot_ms"], rel=1e-3)
    for engine, wiring in (("paper", "ladder"), ("ladder", "desync-2x")):
        one = replace(PAPER, chip="h200", engine=engine)
        none, rewired = predict(replace(one, wiring="none")), predict(replace(one, wiring=wiring))
        assert rewired["exposed_ms"] == pytest.approx(rewired["tpot_ms"] - none["tpot_ms"], rel=1e-2)
        hidden = max(0.0, 1 - rewired["exposed_ms"] / rewired["comm_ms"])
        assert rewired["hidden"] == pytest.approx(hidden, rel=1e-3)
    for size in ("llama-3-8b", "llama-3-70b"):  # no communication is a bound, on any link
        for alpha in (0.0, 1.0, 100.0):
            one = replace(PAPER, size=size, alpha_us=alpha)
            rows = [predict(replace(one, wiring=wiring)) for wiring in ("none", "parallel", "ladder")]
            assert rows[0]["tpot_ms"] == min(row["tpot_ms"] for row in rows)


def test_the_faster_of_one_lane_and_two() -> None:
    """Ours computes side by side what does not wait, where that is predicted to be faster; the paper's never does."""
    ours = replace(PAPER, chip="h200", engine="ladder", tp=1, size="llama-3-8b")
    for batch in (1, 16):
        ladder, standard = (predict(replace(ours, batch=batch, wiring=w)) for w in ("ladder", "standard"))
        assert (ladder["lanes"], standard["lanes"]) == (2, 1)
        assert 0.8 < ladder["tpot_ms"] / standard["tpot_ms"] < 0.97
    assert predict(replace(ours, engine="paper"))["lanes"] == 1
    slow = setting(replace(ours, tp=8, size="llama-3-70b", wiring="ladder", link="nvlink_nccl"))
    one, two = (decoding(slow, lanes=lanes).seconds for lanes in (1, 2))
    assert decoding(slow).seconds == min(one, two) == one  # the MLP waits for its own all-reduce: 24 us


def test_pipeline_by_hand() -> None:
    """Two stages: half of the batch at a time through all layers, one hop; prompts follow each other."""
    one = replace(PAPER, chip="h200", batch=8, node_link="100us,1GB/s")
    half, whole, both = predict(replace(one, batch=4)), predict(one), predict(replace(one, pp=2))
    assert both["tpot_ms"] == pytest.approx(half["tpot_ms"] + 0.1 + 4 * 8192 * 2 / 1e6, rel=1e-3)
    hop = 1e-4 + 1024 * 8192 * 2 / 1e9
    assert both["prefill_s"] == pytest.approx(whole["prefill_s"] / 2 * (1 + 1 / 8) + hop, rel=1e-3)


def test_past_one_machine() -> None:
    link = over_nodes(LINKS["nvlink_nccl"], Link(20e-6, 45e9), tp=16, nodes=2)
    assert link.alpha == pytest.approx(44e-6) and link.beta == pytest.approx(1 / (1 / 250e9 + 1 / 360e9))
    large = replace(PAPER, size="llama-3.1-405b", tp=16, wiring="standard")
    assert predict(replace(large, nodes=2))["all_reduce_us"] > predict(large)["all_reduce_us"] + 15
    named = replace(large, link="ib_2node_nccl")  # measured end to end: nodes change nothing
    assert predict(replace(named, nodes=2))["tpot_ms"] == predict(named)["tpot_ms"]
    staged = predict(replace(large, tp=8, pp=2, chip="h200", batch=16))
    whole = predict(replace(large, tp=8, chip="b200", batch=16))
    assert staged["gpus"] == 16 and staged["weights_gb"] == pytest.approx(whole["weights_gb"] / 2, rel=1e-3)
    many = predict(replace(PAPER, gpus=4096))
    assert many["replicas"] == 512 and many["tokens_per_s"] == pytest.approx(
        512 * predict(PAPER)["tokens_per_s"], rel=1e-3
    )
    assert many["tokens_per_s_gpu"] == predict(PAPER)["tokens_per_s_gpu"]


def test_sweeps_and_the_best() -> None:
    slower = [row["tpot_ms"] for row in plan(swept(replace(PAPER, wiring="standard"), "link"))]
    assert slower == sorted(slower) and len(slower) > 10
    batches = plan(swept(replace(PAPER, chip="h200"), "batch"))
    assert [row["batch"] for row in batches][:3] == [1, 2, 4]
    assert [row["tokens_per_s"] for row in batches] == sorted(row["tokens_per_s"] for row in batches)
    rows = best(replace(PAPER, chip="h200"), ("standard", "ladder"), 12.0)
    assert rows[0]["wiring"] == "ladder" and all(row["tpot_ms"] <= 12 for row in rows)
    assert rows[0]["tokens_per_s_gpu"] == max(row["tokens_per_s_gpu"] for row in rows)
    with pytest.raises(LadderError, match=r"cannot be served within 0\.1 ms"):
        best(PAPER, ("ladder",), 0.1)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("tp, batch", [(2, 1), (8, 1), (8, 64)])
def test_a_sweep_goes_through_the_link_itself(link: str, tp: int, batch: int) -> None:
    """At the link's own latency it is the named row, with all that an engine knows of that link."""
    tp = min(tp, RANKS[link])
    one = replace(PAPER, link=link, tp=tp, batch=batch, wiring="standard", chip="h100", size="llama-3-8b")
    named, swept_there = predict(one), predict(replace(one, alpha_us=LINKS[link].alpha * 1e6))
    for key in (*KEYS, "all_reduce_us"):
        assert swept_there[key] == pytest.approx(named[key], rel=1e-4), key
    sums = [row["all_reduce_us"] for row in plan(swept(one, "link"))]
    assert sums == sorted(set(sums))  # no way around the latency


def test_arms_of_bench() -> None:
    rows = {arm: predict(replace(PAPER, wiring=arm)) for arm in ARMS}
    assert rows["hybrid"] == predict(replace(PAPER, wiring="standard:40 ladder:40"))
    assert rows["standard-fused"] == predict(replace(PAPER, wiring="standard", link="nvlink_fused"))
    fused = [row["tpot_ms"] for row in plan(swept(replace(PAPER, wiring="standard-fused"), "link"))]
    assert set(fused) == {rows["standard-fused"]["tpot_ms"]}  # the link that is swept is not its own


def test_ranks_are_those_of_the_links() -> None:
    for name, link in LINKS.items():
        found = re.match(r"(?:(\d+) nodes x )?(\d+) (?:GPUs|machines)", link.what)
        assert found is not None and RANKS[name] == int(found[1] or 1) * int(found[2])
        assert across(name) == ("nodes" in link.what or "machines" in link.what)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"tp": 64}, "link nvlink_nccl was measured with 8 ranks, not 64: give --nodes if they are several machines"),
        ({"tp": 64, "nodes": 8}, None),
        ({"tp": 8, "link": "pcie_p2p_nccl"}, "link pcie_p2p_nccl was measured with 4 ranks, not 8: give --nodes"),
        ({"tp": 4, "link": "pcie_shm_tp8"}, "measured with 8 ranks, not 4: theirs is --link pcie_shm_tp4"),
        ({"tp": 16, "nodes": 2, "link": "pcie_shm_tp8"}, None),
        ({"tp": 16, "nodes": 2, "link": "ib_2node_nccl"}, None),
        ({"tp": 32, "link": "ib_2node_nccl"}, "link ib_2node_nccl was measured with 16 ranks, not 32"),
        ({"node_link": "5us,40GB/s"}, "--node-link is not used"),
        ({"node_link": "5us,40GB/s", "pp": 2, "link": "ib_2node_nccl"}, None),
        ({"link": "50us,10GB/s", "tp": 64}, None),
        ({"link": "pcie_shm_tp8", "tp": 1, "size": "llama-3-8b"}, None),
    ],
)
def test_remarks(given: dict[str, Any], said: str | None) -> None:
    """What goes beyond a link's measurements is predicted, and said to."""
    found = predict(replace(PAPER, **given))["remark"]
    assert found is None if said is None else said in found


def test_chips() -> None:
    own = Chip.parse("100GB, 2.5TB/s, 500TFLOP/s")
    assert (own.memory_gb, own.read_tb_s, own.bf16_tflop_s) == (100, 2.5, 500)
    assert Chip.parse("H200") is CHIPS["h200"] is Chip.of("NVIDIA H200") and Chip.of("a stove") is None
    assert tpot_ms("llama-3-70b", "ladder", 8, 1, 1024, LINKS["nvlink_nccl"], "a stove") is None
    one = tpot_ms("llama-3-70b", "ladder", 8, 1, 1024, LINKS["nvlink_nccl"], "NVIDIA H200")
    assert one is not None and 4 < one < 8
