"""Files of measurements: the committed results, whose names are older, read by all that reads such files."""

import json
from pathlib import Path

import pytest

from ladder.bench.sweep.sweep import read
from ladder.errors import LadderError
from ladder.perf import calibrate
from ladder.perf.engines import ENGINES
from ladder.perf.measurements import KEYS, VALUES, current, read_lines
from ladder.report.lines.read import load

RESULTS = Path(__file__).parent.parent / "results"
FILES = sorted(RESULTS.rglob("*.jsonl"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_committed_results_are_read_under_todays_names(path: Path) -> None:
    raw = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = read_lines(path)
    assert len(found.objects) == len(raw) > 0 and not found.torn
    for (_, row), old in zip(found.objects, raw, strict=True):
        added = {"weights"} if {"wiring", "tp"} <= row.keys() and "weights" not in old else set()
        assert len(row) == len(old) + len(added) and not set(row) & set(KEYS)
        assert all(row[key] == "bf16" for key in added)
        assert not any((key, value) in VALUES for key, value in row.items() if isinstance(value, str))
        assert all(row[KEYS.get(key, key)] == value for key, value in old.items() if (key, str(value)) not in VALUES)


def test_old_names_are_there_to_be_translated() -> None:
    """Else the test above could not fail."""
    lines = [json.loads(line) for path in FILES for line in path.read_text(encoding="utf-8").splitlines()]
    assert set(KEYS) <= {key for line in lines for key in line}
    assert set(VALUES) <= {(key, value) for line in lines for key, value in line.items() if isinstance(value, str)}


def test_every_reader_takes_old_results() -> None:
    bench = read(RESULTS / "bench_h200.jsonl")
    assert len(bench) == len((RESULTS / "bench_h200.jsonl").read_text().splitlines())
    assert all(row["all_reduces"] >= 0 and row["comm_ms"] >= 0 and row["link_kind"] == "emulated" for row in bench)
    report = load([RESULTS / "bench_h200.jsonl", RESULTS / "one_rank_steps.jsonl"])
    assert [(row.all_reduces, row.comm_ms) for row in report.rows] == [
        (row["all_reduces"], row["comm_ms"]) for row in bench
    ]
    assert {row.link_kind for row in report.rows} == {"emulated"}
    (lanes,) = report.lanes
    assert [len(step.comm) for step in lanes.steps] == [161, 161, 161]
    for name in ("one_rank_h200.jsonl", "bench_h200.jsonl"):
        assert len(calibrate.measured(RESULTS / name, ENGINES["ladder"])) > 50
    runs = [row for _, row in read_lines(RESULTS / "one_rank_h200.jsonl").objects]
    two = [row for row in runs if row.get("concurrent_all_reduces") == 2]
    assert two and all(row["wiring"] == "ladder-1-2" for row in two)


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert current({"sums": 3, "link": "nvlink_nccl", "link_kind": "real"}) == {
        **{"all_reduces": 3, "link": "nvlink_nccl", "link_kind": "real"}
    }
    run = {"wiring": "ladder", "tp": 8}
    assert current(run)["weights"] == "bf16" and current({**run, "weights": "fp8"})["weights"] == "fp8"
    path.write_text('{"sum_us": NaN}\n\n{"wire": [1]}\n{"a": ')
    assert read_lines(path) == ([(1, {"all_reduce_us": None}), (3, {"comm": [1]})], True)
    path.write_text("[1]\n")
    with pytest.raises(LadderError, match=r"line 1 is '\[1\]', not an object"):
        read_lines(path)
