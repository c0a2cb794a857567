"""Fit an engine's row to measured runs: on half of the configurations, tested on the other half.

python -m ladder.perf.calibrate RUNS.csv|RUNS.jsonl [--engine paper|ladder] [--seconds 60]

RUNS is a table of published runs (columns p2p, model, wiring, tp, batch, prefill_s, decode_s; 1024 + 512 new), or the
lines of `ladder bench` or `ladder.bench.one_rank`, of any format of weights: for each format the share of the peak is
fitted, and everything else where there are lines of bf16. Prints the errors of both halves before and after, in how
many groups (same size, ranks, batch and link) the wirings come out in the measured order, and the row.
"""

import argparse
import csv
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from math import log
from pathlib import Path
from statistics import median
from typing import Any

from ladder.comm.link import LINKS, Link
from ladder.config import ModelConfig
from ladder.config.quantization import named_format
from ladder.errors import LadderError
from ladder.perf.chips import CHIPS, Chip
from ladder.perf.engines import ENGINES, Engine
from ladder.perf.measurements import read_lines
from ladder.perf.predict import Setting, decoding, prefill

FITTED: tuple[str, ...] = ("single.attention", "single.mlp", "single.reach", "few.attention", "few.mlp", "few.reach")
FITTED += (
    "few.efficiency",
    "prompt.attention",
    "prompt.efficiency",
    "cache",
    "step",
    "launch",
    "all_reduce_overhead",
    "smaller",
    "lane",
)
FITTED += ("scale", "contention", "contention_growth", "most_contention")
BROKEN = 0.8  # a run below this share of its configuration's best is not one of the machine it ran on
TIE = 0.01  # wirings closer than this are not in any order
WIRINGS = {"upper": "none", "desync2": "desync-2x"}  # the names in the published runs


@dataclass(frozen=True)
class Target:
    """One configuration with what was measured; seconds. The setting's engine does not count."""

    setting: Setting
    prefill: float | None
    step: float
    lanes: int = 1

    @property
    def group(self) -> tuple[Any, ...]:
        """What all wirings of one comparison have in common."""
        s = self.setting
        link = (s.link_name, s.link.alpha, s.link.beta)
        return s.config.hidden, s.config.layers, s.weights, s.tp, s.batch, *link, self.lanes

    @property
    def total(self) -> float:
        return (self.prefill or 0.0) + self.setting.new * self.step

    def predicted(self, engine: Engine) -> tuple[float, float, float]:
        """Prefill, a step, and the whole run."""
        s = replace(self.setting, engine=engine)
        before = prefill(s).seconds if self.prefill is not None else 0.0
        step = decoding(s, lanes=self.lanes).seconds
        return before, step, before + s.new * step


def published(path: Path, engine: Engine) -> list[Target]:
    """The runs of a table, the repetitions of each configuration by their median."""
    runs: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                key = tuple(row[name] for name in ("p2p", "model", "wiring", "tp", "batch"))
                runs[key].append((float(row["prefill_s"]), float(row["decode_s"])))
            except (KeyError, TypeError, ValueError):
                raise LadderError(
                    f"{path} is no table of runs: it needs p2p, model, ..., prefill_s, decode_s"
                ) from None
    found = []
    for (p2p, model, wiring, tp, batch), times in sorted(runs.items()):
        config = ModelConfig.named(model).rewired(WIRINGS.get(wiring, wiring))
        link = "nvlink_nccl" if p2p == "on" else f"pcie_shm_tp{tp}"
        s = Setting(config, int(tp), int(batch), 1024, 512, CHIPS["h100"], engine, LINKS[link], link)
        best = min(map(sum, times))
        sound = [run for run in times if BROKEN * sum(run) <= best]
        found.append(Target(s, median(run[0] for run in sound), median(run[1] for run in sound) / 512))
    return found


def measured(path: Path, engine: Engine) -> list[Target]:
    """Decoding steps of JSON lines; those of other kinds are passed over. Of the ways to compute on two lanes, the
    fastest.
    """
    found, beside = [], dict[str, Target]()
    for _, row in read_lines(path).objects:
        ms = row.get("tpot_ms_p50", row.get("ms") if row.get("measure") == "decode" else None)
        chip = Chip.of(row.get("chip") or "")
        if ms is None or chip is None or row.get("concurrent_all_reduces", 1) != 1:
            continue
        config = replace(ModelConfig.named(row["size"]), weights=named_format(str(row["weights"])))
        if row.get("layers", config.layers) != config.layers:
            config = config.first(row["layers"])
        name = row.get("link_name", row.get("link"))
        without_communication = not config.rewired(row["wiring"]).wiring.all_reduces()
        if name == "zero" or (
            row.get("link_kind") == "real" and not without_communication
        ):  # no time of a link is known of those
            continue
        link = LINKS.get(name or "")
        if link is None and row.get("link_alpha_us") is not None:
            link, name = Link(row["link_alpha_us"] * 1e-6, (row["link_beta_gb_s"] or float("inf")) * 1e9), None
        if without_communication or link is not None:
            link = link or Link(0.0, float("inf"))
            s = Setting(
                config.rewired(row["wiring"]), row["tp"], row["batch"], row["context"], 0, chip, engine, link, name
            )
            target = Target(s, None, ms * 1e-3, row.get("lanes", 1))
            if target.lanes == 1:
                found.append(target)
            else:
                before = beside.setdefault(str((target.group, s.config.wiring)), target)
                beside[str((target.group, s.config.wiring))] = min(before, target, key=lambda one: one.step)
    return [*found, *beside.values()]


def halves(targets: Iterable[Target]) -> tuple[list[Target], list[Target]]:
    """Every other group of configurations, with all of its wirings."""
    targets = list(targets)
    groups = sorted({str(target.group) for target in targets})
    chosen = set(groups[::2])
    fit = [target for target in targets if str(target.group) in chosen]
    return fit, [target for target in targets if str(target.group) not in chosen]


def errors(engine: Engine, targets: Sequence[Target]) -> list[float]:
    """|predicted / measured - 1| of the whole run, or of the step where only that was measured."""
    found = []
    for target in targets:
        _, step, total = target.predicted(engine)
        found.append(abs(total / target.total - 1) if target.setting.new else abs(step / target.step - 1))
    return found


def orders(engine: Engine, targets: Sequence[Target], names: Sequence[str]) -> tuple[int, int]:
    """In how many groups the wirings `names` come out as measured, ties aside, and of how many."""
    right = count = 0
    for times in _groups(engine, targets, names):
        if len(times) == len(names):
            count += 1
            pairs = combinations(times.values(), 2)
            right += all((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs if abs(log(a[0] / b[0])) > TIE)
    return right, count


def _groups(engine: Engine, targets: Sequence[Target], names: Sequence[str]) -> list[dict[str, tuple[float, float]]]:
    """By group: each wiring's measured and predicted time."""
    found: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for target in targets:
        wiring = str(target.setting.config.wiring)
        if wiring in names:
            _, step, total = target.predicted(engine)
            found[str(target.group)][wiring] = (target.total, total) if target.setting.new else (target.step, step)
    return list(found.values())


def loss(engine: Engine, targets: Sequence[Target]) -> float:
    """Relative errors of the parts and of the whole, and what is missing to the measured order."""
    whole = parts = missing = 0.0
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for target in targets:
        before, step, total = target.predicted(engine)
        parts += 0.6 * min(0.4, abs(log(step / target.step)))
        measured, found = (target.total, total) if target.setting.new else (target.step, step)
        if target.prefill is not None:
            parts += 0.25 * min(0.4, abs(log(before / target.prefill)))
        off = log(found / measured)
        whole += min(0.4, abs(off)) + 2 * off * off
        if str(target.setting.config.wiring) in ORDERED:
            groups[str(target.group)].append((log(measured), log(found)))
    for times in groups.values():
        for a, b in combinations(sorted(times), 2):
            missing += max(0.0, min(TIE, b[0] - a[0]) - (b[1] - a[1]))
    return (whole + parts + 12 * missing) / len(targets)


ORDERED = ("standard", "parallel", "ladder")


def get(engine: Engine, name: str) -> float:
    room, *rest = name.split(".")
    value = getattr(engine, room)
    if room == "large":
        value, rest = value[rest[0]], rest[1:]
    elif rest[:1] == ["reaches"]:
        return float(value.reaches.get(rest[1], value.reach))  # not measured yet: as of bf16
    return float((getattr(value, rest[0]) if rest else value) or 0.0)  # None: the engine does not have it


def put(engine: Engine, name: str, value: float) -> Engine:
    room, *rest = name.split(".")
    inner: Any = value
    if room == "large":
        link = asdict(engine.large[rest[0]]) | {rest[1]: value}
        inner = {**engine.large, rest[0]: Link(**link)}
    elif rest[:1] == ["reaches"]:
        stage = getattr(engine, room)
        inner = replace(stage, reaches={**stage.reaches, rest[1]: value})
    elif rest:
        inner = replace(getattr(engine, room), **{rest[0]: value})
    return replace(engine, **{room: inner})


def fit(engine: Engine, targets: Sequence[Target], seconds: float, names: Sequence[str] = FITTED) -> Engine:
    """One parameter after the other is tried larger and smaller, by steps that grow with success."""
    best, until = loss(engine, targets), time.monotonic() + seconds
    used = {target.setting.link_name for target in targets}
    names = [*names, *(f"large.{link}.{field}" for link in engine.large if link in used for field in ("alpha", "beta"))]
    formats = sorted({("single" if t.setting.batch == 1 else "few", t.setting.weights) for t in targets})
    names = names if any(weights == "bf16" for _, weights in formats) else []
    names += [f"{stage}.reaches.{weights}" for stage, weights in formats if weights != "bf16"]
    steps = {name: 0.25 for name in names if get(engine, name)}  # what is zero stays so
    while max(steps.values()) > 0.005 and time.monotonic() < until:
        for name in steps:
            for factor in (1 + steps[name], 1 / (1 + steps[name])):
                most = 0.97 if name.endswith(("reach", "efficiency")) or ".reaches." in name else float("inf")
                tried = put(engine, name, min(most, get(engine, name) * factor))
                if (found := loss(tried, targets)) < best - 1e-6:
                    best, engine, steps[name] = found, tried, min(0.5, 1.5 * steps[name])
                    break
            else:
                steps[name] = max(0.004, 0.6 * steps[name])
    return engine


def account(engine: Engine, targets: Sequence[Target]) -> dict[str, Any]:
    """Median and 90th percentile of the errors, and the order of the wirings."""
    found = sorted(errors(engine, targets))
    right, count = orders(engine, targets, ORDERED)
    ninety = found[min(len(found) - 1, int(0.9 * len(found)))]
    return {
        "configurations": len(found),
        "median_error": round(median(found), 4),
        "p90_error": round(ninety, 4),
        "max_error": round(found[-1], 4),
        "right_orders": right,
        "orders": count,
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m ladder.perf.calibrate")
    parser.add_argument("runs", type=Path)
    parser.add_argument("--engine", choices=sorted(ENGINES))
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args(arguments)
    table = given.runs.suffix == ".csv"
    engine = ENGINES[given.engine or ("paper" if table else "ladder")]
    targets = (published if table else measured)(given.runs, engine)
    if not targets:
        raise LadderError(f"{given.runs} has no runs of a known chip")
    fitting, testing = halves(targets)
    fitted = fit(engine, fitting, given.seconds)
    for name, one in (("as it is", engine), ("fitted on the first half", fitted)):
        for half, some in (("first half", fitting), ("second half", testing), ("all", targets)):
            if some:
                _print({"engine": engine.name, "row": name, "on": half, **account(one, some)})
    for lanes in sorted({target.lanes for target in targets}):
        some = [target for target in targets if target.lanes == lanes]
        _print({"engine": engine.name, "row": "as it is", "on": f"lanes: {lanes}", **account(engine, some)})
    _print({"engine": engine.name, "row": asdict(fitted)})


def _print(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (LadderError, OSError) as error:
        sys.exit(f"calibrate: {error}")
