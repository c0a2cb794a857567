"""Every figure in the prose of README.md and docs/ is tied to what was measured, in experiments/tables/prose.jsonl.

A line there has a page and a figure of it (and `times`, where it stands there more than once), and either
    file, where, key   the only such line of results/FILE.jsonl and its value; `scale`: times that; `more`: above one
    over, minus        in relation to another such value, whose file, where and key are given where they differ
    link               how long an all-reduce of no bytes takes on that link
    follows            from several lines, as FOLLOW says
    said               no measurement of ours, or one that is not computed again here: why
So a figure that is changed, added or left out fails until somebody says what it is.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from statistics import mean, median
from typing import Any

import pytest

from experiments.tables.figures import fixed, gain, least, lines, one, published_ms, those
from experiments.tables.models import apart
from experiments.tables.pages import MARK
from experiments.tables.speed import ROWS, step
from ladder.comm.link import LINKS
from ladder.config import ModelConfig
from ladder.perf.calibrate import Target
from ladder.perf.chips import CHIPS
from ladder.perf.engines import ENGINES
from ladder.perf.predict import Setting
from tests.blocks import PAGES, ROOT, without_code

TIES = [json.loads(line) for line in (ROOT / "experiments/tables/prose.jsonl").read_text().splitlines()]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# decimal figures, and whole ones in percent, times, us and ms
FIGURE = re.compile(r"(?<![\w.,-])[+-]?(\d[\d,]*(?:\.\d+)?)(%|x\b| (?:us|ms)\b)?(?![\w%]|[.,]\d)")
NOT_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)|!\[[^\]]*|(?:arXiv|vLLM|torch|PyTorch|Python|Apache|CC BY-SA) ?-?[\d.]+\d")


def prose(text: str) -> str:
    """Without code, tables, formulas, links and versions."""
    plain = [line for line in without_code(MARK.sub("", text)).splitlines() if not line.startswith(("|", "    "))]
    return NOT_PROSE.sub(" ", "\n".join(plain))


def found_in(text: str) -> Counter[str]:
    found = FIGURE.finditer(prose(text))
    return Counter(each[1] + (each[2] or "") for each in found if "." in each[1] or each[2])


# --- what follows from several lines --------------------------------------------------------------------------------

LADDERS = (("standard", "50M"), ("ladder", "50M"), ("ladder", "50M-long"))


def at_latency(link: str) -> float:
    """The loss of ladder at standard's latency, on the line through its 10 and its 13 layers."""
    ms = {key: one("bench_small_h200", wiring=key[0], size=key[1], cell_link=link)["tpot_ms_p50"] for key in LADDERS}
    losses = {key: one("scratch_h200", wiring=key[0], size=key[1], seed=1)["valid_loss"] for key in LADDERS[1:]}
    standard, short, long = LADDERS
    share = (ms[standard] - ms[short]) / (ms[long] - ms[short])
    return float(losses[short] + share * (losses[long] - losses[short]))


def quantized_gain(weights: str) -> float:
    """Over bf16: standard, batch 1, 8B."""
    where = {"measure": "decode", "size": "llama-3-8b", "batch": 1, "wiring": "standard", "link_name": None}
    return least("two_lanes_h200", "ms", **where) / least(
        "one_rank_weights_h200", "ms", **where, run=3, weights=weights
    )


def ahead(arm: str, than: str) -> float:
    """By how many nats after 457 steps."""
    found = [those(f"scratch/{name}", step=457) for name in (than, arm)]
    standard, own = (next(float(line["eval_loss"]) for line in some if "eval_loss" in line) for some in found)
    return standard - own


def training_loss(optimizer: str) -> float:
    """Over steps 550 to 640, of all layers."""
    found = those("optimizers_h200", run="all-fit-12M-0.001-16", optimizer=optimizer)
    return mean(float(line["loss"]) for line in found if 550 <= line["step"] <= 640)


def an_all_reduce(batch: int) -> float:
    """Microseconds by which each all-reduce over no link lengthens standard's step."""
    where = {"measure": "decode", "size": "llama-3-70b", "wiring": "standard", "batch": batch}
    with_, without = (least("one_rank_h200", "ms", **where, link_name=name) for name in ("zero", None))
    return 1000 * (with_ - without) / 160


def rise_left(wiring: str) -> float:
    """What calibration leaves of int4's rise in perplexity, in percent."""
    where = {"wiring": wiring, "one_go": False}
    dense = one("quality/quantization", **where, format="dense")["perplexity"]
    near, calibrated = (
        one("quality/quantization", **where, format="int4-128", way=way)["perplexity"] - dense
        for way in ("nearest", "calibrated")
    )
    return float(100 * calibrated / near)


def of_published(batch: int) -> float:
    """Our step without communication, in percent of the published one."""
    where = {"measure": "decode", "size": "llama-3-70b", "batch": batch, "wiring": "none", "link_name": None}
    return 100 * least("one_rank_h200", "ms", **where) / published_ms("upper", "on", batch, leave_out=2.0)


def peaks() -> float:
    """The highest measured peak of the runs from scratch over the lowest, in percent above it."""
    found = [float(line["peak_tflop_s"]) for line in lines("scratch_h200") if "peak_tflop_s" in line]
    return 100 * (max(found) / min(found) - 1)


def desync() -> list[float]:
    """How far above standard it is from the first fifth of the training on, in percent."""
    own, standard = (
        {line["step"]: line["eval_loss"] for line in lines(f"scratch/{name}") if "eval_loss" in line}
        for name in ("desync-2x", "standard")
    )
    return sorted(100 * (own[at] / standard[at] - 1) for at in own if at >= max(own) / 5 - 2)


@cache
def plan_errors() -> dict[str, list[float]]:
    """Of the plan for one lane, against every line of bench_h200: of a token and of prompts, in percent."""
    errors: dict[str, list[float]] = {"token": [], "prompt": []}
    for line in lines("bench_h200"):
        found = predicted(line["size"], line["wiring"], line["tp"], line["batch"], line["link"], line["new"])
        errors["prompt"].append(100 * abs(1e3 * found[0] / line["ttft_ms"] - 1))
        errors["token"].append(100 * abs(1e3 * found[1] / line["tpot_ms_p50"] - 1))
    return errors


def predicted(
    size: str, wiring: str, tp: int, batch: int, link: str, new: int, lanes: int = 1
) -> tuple[float, float, float]:
    config, engine = ModelConfig.named(size).rewired(wiring), ENGINES["ladder"]
    setting = Setting(config, tp, batch, 1024, new, CHIPS["h200"], engine, LINKS[link], link)
    return Target(setting, 1.0, 1.0, lanes).predicted(engine)


def too_slow(batch: int, lanes: int) -> float:
    """By how much the plan is too slow for ladder, 8B on one GPU, in percent; below 0: too fast."""
    where = {"measure": "decode", "size": "llama-3-8b", "wiring": "ladder", "batch": batch, "lanes": lanes}
    ms = 1e3 * predicted("llama-3-8b", "ladder", 1, batch, "nvlink_nccl", 0, lanes)[1]
    return 100 * (ms / least("two_lanes_h200", "ms", **where, link_name=None) - 1)


def embedded_speed() -> float:
    """Millions of tokens per second."""
    whole = next(line for line in lines("embedded_h200") if "train_runtime" in line)
    return float(whole["tokens"] / whole["train_runtime"] / 1e6)


PROMPT = 1024 * 8192 * 2  # bytes of an all-reduce of a prompt of 1024 tokens, Llama-3-70B in bf16
FOLLOW: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "0.7%"): lambda: apart("ladder", 10, 1).lstrip("+"),
    ("README.md", "0.5%"): lambda: apart("ladder", 10, 2).lstrip("+"),
    ("docs/choose.md", "1.44"): lambda: fixed(step(ROWS[6], "standard") / step(ROWS[6], "ladder"), 2),
    ("docs/choose.md", "2.80"): lambda: fixed(step(ROWS[6], "standard") / step(ROWS[6], "parallel-1"), 2),
    ("docs/performance.md", "91 us"): lambda: f"{fixed(1e6 * LINKS['nvlink_nccl'].seconds(PROMPT), 0)} us",
    ("docs/performance.md", "16.8"): lambda: fixed(PROMPT / 1e6, 1),
    ("docs/performance.md", "2.6 us"): lambda: f"{fixed(an_all_reduce(1), 1)} us",
    ("docs/performance.md", "5.0 us"): lambda: f"{fixed(an_all_reduce(16), 1)} us",
    ("docs/quality.md", "16.8"): lambda: fixed(sum(line["tokens"] for line in lines("own_text_h200")) / 1e6, 1),
    ("docs/quality.md", "4%"): lambda: f"{fixed(100 - 100 * training_loss('muon') / training_loss('adamw'), 0)}%",
    ("docs/quality.md", "0.260"): lambda: fixed(training_loss("muon"), 3),
    ("docs/quality.md", "0.271"): lambda: fixed(training_loss("adamw"), 3),
    ("docs/quality.md", "21%"): lambda: f"{fixed(rise_left('standard:15 ladder:15'), 0)}%",
    ("docs/quality.md", "29%"): lambda: f"{fixed(rise_left('standard'), 0)}%",
    ("docs/quality.md", "2.3"): lambda: fixed(embedded_speed(), 1),
    ("docs/quality.md", "3.328"): lambda: fixed(at_latency("nvlink_nccl"), 3),
    ("docs/quality.md", "3.341"): lambda: fixed(at_latency("pcie_shm_tp8"), 3),
    ("docs/quality.md", "0.16"): lambda: fixed(ahead("ladder", "standard"), 2),
    ("docs/quality.md", "0.13"): lambda: fixed(ahead("ladder-2nd", "standard-2"), 2),
    ("docs/quality.md", "0.04"): lambda: fixed(ahead("lag-2", "standard"), 2),
    ("docs/quality.md", "8%"): lambda: f"{fixed(peaks(), 0)}%",
    ("docs/reproduce.md", "54%"): lambda: f"{fixed(of_published(1), 0)}%",
    ("docs/reproduce.md", "39%"): lambda: f"{fixed(of_published(64), 0)}%",
    ("docs/reproduce.md", "1.43"): lambda: fixed(CHIPS["h200"].read_tb_s / CHIPS["h100"].read_tb_s, 2),
    ("docs/reproduce.md", "32%"): lambda: gain(
        published_ms("standard", "on", 1), published_ms("ladder", "on", 1)
    ).lstrip("+"),
    ("docs/quality.md", "1.3%"): lambda: f"{fixed(desync()[0], 1)}%",
    ("docs/quality.md", "1.4%"): lambda: f"{fixed(desync()[-1], 1)}%",
    ("docs/reproduce.md", "7.5%"): lambda: f"{fixed(max(plan_errors()['token']), 1)}%",
    ("docs/reproduce.md", "1.7%"): lambda: f"{fixed(median(plan_errors()['token']), 1)}%",
    ("docs/reproduce.md", "23%"): lambda: f"{fixed(max(plan_errors()['prompt']), 0)}%",
    ("docs/reproduce.md", "7.4%"): lambda: f"{fixed(median(plan_errors()['prompt']), 1)}%",
    ("docs/reproduce.md", "9%"): lambda: f"{fixed(too_slow(1, 2), 0)}%",
    ("docs/reproduce.md", "11%"): lambda: f"{fixed(-too_slow(16, 1), 0)}%",
    ("docs/reproduce.md", "49%"): lambda: f"{fixed(100 * ENGINES['paper'].most_contention, 0)}%",
    ("docs/use/quantize.md", "1.5"): lambda: fixed(quantized_gain("fp8"), 1),
    ("docs/use/quantize.md", "2.0"): lambda: fixed(quantized_gain("int4"), 1),
}


# --- each figure ----------------------------------------------------------------------------------------------------


def value(tie: dict[str, Any]) -> float:
    """Of the only such line, or of lines that have the same there."""
    (found,) = {line[tie["key"]] for line in those(tie["file"], **tie["where"])}
    return float(found)


def text_of(tie: dict[str, Any]) -> str:
    """The figure, as its lines have it."""
    figure = str(tie["figure"])
    if "link" in tie:
        return f"{fixed(1e6 * LINKS[tie['link']].alpha, 0)} us"
    if "follows" in tie:
        return FOLLOW[tie["page"], figure]()
    number = value(tie)
    percent, unit = figure.endswith("%"), figure.lstrip("0123456789.,")
    if "over" in tie:
        number = number / value(tie | tie["over"]) - (1 if percent else 0)
    elif "minus" in tie:
        number -= value(tie | tie["minus"])
    elif "more" in tie:
        number -= 1
    number = abs(number) * tie.get("scale", 100 if percent else 1)
    digits = len(figure.removesuffix(unit).partition(".")[2])
    return fixed(number, digits) + unit


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_of_prose_is_tied(name: str) -> None:
    """As often as it stands there."""
    ties: Counter[str] = Counter()
    for tie in TIES:
        if tie["page"] == name:
            ties[tie["figure"]] += tie.get("times", 1)
    assert found_in((ROOT / name).read_text()) == ties


@pytest.mark.parametrize(
    "tie", [tie for tie in TIES if "said" not in tie], ids=lambda tie: f"{tie['page']} {tie['figure']}"
)
def test_figures_are_as_their_lines_have_them(tie: dict[str, Any]) -> None:
    assert text_of(tie) == tie["figure"]


def test_what_is_only_said_has_a_reason() -> None:
    said = [tie for tie in TIES if "said" in tie]
    assert all(tie["said"].strip() for tie in said) and len(said) < len(TIES) / 4
    assert {tie["page"] for tie in TIES} <= set(NAMES)
    assert {(tie["page"], tie["figure"]) for tie in TIES if "follows" in tie} == set(FOLLOW)


def test_a_figure_that_is_changed_is_noticed() -> None:
    """Each of them, on every page: its last digit."""
    for name in NAMES:
        text = (ROOT / name).read_text()
        before = found_in(text)
        for figure in before:
            digit = next(at for at in reversed(range(len(figure))) if figure[at].isdigit())
            changed = figure[:digit] + str((int(figure[digit]) + 1) % 10) + figure[digit + 1 :]
            assert found_in(re.sub(rf"(?<![\w.,-])([+-]?){re.escape(figure)}", rf"\g<1>{changed}", text)) != before


def test_what_is_a_figure() -> None:
    text = "It takes 3.25 ms, 7.5% more, +8% and 1.25x at 62 us.\n| 9.9 |\n    1.1\n`2.2` of 3; torch 2.13, desync-2x"
    assert found_in(text) == Counter(["3.25 ms", "7.5%", "8%", "1.25x", "62 us"])
    where = {"size": "50M", "wiring": "standard", "cell_link": "nvlink_nccl"}
    tie = {"figure": "0.667 ms", "file": "bench_small_h200", "where": where, "key": "tpot_ms_p50"}
    assert text_of(tie) == "0.666 ms"
