"""ladder report: what it reads and refuses, the numbers in its figures, and files that stand on their own."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ladder.charts import library
from ladder.charts.library import program
from ladder.charts.looks import LOOKS, looks
from ladder.comm.link import LINKS, Link
from ladder.errors import LadderError, install
from ladder.report import figures as report_figures
from ladder.report.figures import SPEEDUP, TOKENS, frontier, latency, throughput
from ladder.report.lines.read import load
from ladder.report.options import ReportOptions
from ladder.report.page import page as make_page
from ladder.report.pictures import pictures
from ladder.report.published import beside
from ladder.report.weight_figures import by_weights
from ladder.report.write import report

EVIL = "</script><img src=x onerror=alert(1)>$\\frac{&\u2028"


def row(arm: str, batch: int, ms: float, link: str | None = "nvlink_nccl", **more: Any) -> dict[str, Any]:
    """A line as `ladder bench` writes it, with most of its keys."""
    timing = LINKS.get(link or "")
    line = {"size": "llama-3-70b", "arm": arm, "wiring": "standard" if arm == "standard-fused" else arm, "tp": 8}
    line |= {"batch": batch, "prompt": 1024, "new": 512, "context": 1280, "link": link, "link_kind": "emulated"}
    line |= {"link_alpha_us": timing.alpha * 1e6 if timing else None, "mode": "one-rank", "chip": "NVIDIA H200"}
    line |= {"link_beta_gb_s": timing.beta / 1e9 if timing else None, "dtype": "bfloat16", "layers": 80}
    line |= {"of_layers": 80, "ttft_ms": 10 * ms, "tpot_ms_p50": ms, "tpot_ms_q1": ms - 0.1, "tpot_ms_q3": ms + 0.2}
    line |= {"tokens_per_s": batch * 512e3 / (10 * ms + 511 * ms), "commit": "abc1234", "time": "2025-11-15T10:00:00Z"}
    return line | more


def step(wiring: str = "ladder", **more: Any) -> dict[str, Any]:
    spans = [{"name": "attention 0", "begin": 0.1, "end": 0.2}, {"name": "MLP 0", "begin": 0.3, "end": 0.5}]
    wire = [{"name": "sum 0", "begin": 0.0, "end": 0.1}, {"name": "sum 1", "begin": 0.2, "end": 0.3}]
    waits = [{"name": "sum 0", "begin": 0, "end": 0.1}, {"name": "MLP 0", "begin": 0.2, "end": 0.3}]
    return {"wiring": wiring, "rank": 0, "compute": spans, "wire": wire, "waits": waits, **more}


def sample() -> list[dict[str, Any]]:
    links = ("nvlink_nccl", "pcie_shm_tp8")
    rows = [row(arm, batch, ms * (1 + batch / 10), link) for link in links for batch in (1, 4)
            for arm, ms in (("standard", 10.0), ("parallel", 8.0), ("ladder", 5.0))]  # fmt: skip
    return [*rows, row("none", 1, 4.0), row("standard-fused", 1, 6.0, "nvlink_fused")]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def data(page: Path) -> dict[str, Any]:
    """The numbers inside the page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    read: dict[str, Any] = json.loads(found[1])
    return read


def test_report_stands_on_its_own(tmp_path: Path) -> None:
    from matplotlib.image import imread

    rows = write(tmp_path / "rows.jsonl", [*sample(), {"measure": "peak", "read_tb_s": 4.5}])
    steps = write(tmp_path / "steps.jsonl", [step("standard"), step()])
    page, *pictures = report([rows, steps], tmp_path / "new" / "out")
    assert page.name == "report.html" and page.parent == tmp_path / "new" / "out"
    assert {picture.name for picture in pictures} == {
        "throughput-llama-3-70b-tp8-nvlink_nccl.png",
        "throughput-llama-3-70b-tp8-pcie_shm_tp8.png",
        "frontier-llama-3-70b-nvlink_nccl.png",
        "frontier-llama-3-70b-pcie_shm.png",
        "latency-llama-3-70b-tp8-batch1.png",
        "latency-llama-3-70b-tp8-batch4.png",
        "timeline.png",
    }
    for picture in pictures:
        pixels = imread(picture)
        assert pixels.shape[0] > 300 and pixels.shape[1] >= 800
        coloured = (pixels[:, :, :3].max(2) - pixels[:, :, :3].min(2)) > 0.3
        assert coloured.mean() > 0.001, f"{picture.name} shows nothing"
    text = page.read_text().replace(program(), "")  # the library names addresses, but asks for none: see the browser's
    assert not re.search(r"https?://|\bsrc\s*=|@import|url\((?!#)|<link(?![^>]*\"data:,\")", text)
    assert "default-src 'none'" in text
    read = data(page)
    assert read["notes"] == ["rows.jsonl: not drawn are 1 line of 'peak'."]
    for panel in (panel for panels in read["figures"].values() for panel in panels):
        for fact in ("NVIDIA H200", "one-rank", "emulated link", "abc1234", "2025-11-15"):
            assert fact in panel["facts"]


def test_numbers(tmp_path: Path) -> None:
    rows = load([write(tmp_path / "rows.jsonl", sample())]).rows
    nvlink, pcie = throughput(rows)
    assert nvlink.keys["link"] == "nvlink_nccl (24 µs)" and nvlink.keys["TP"] == "8"
    bars = {(mark.arm, mark.x): mark for mark in nvlink.marks[SPEEDUP]}
    assert bars["ladder", 4].y == pytest.approx(2) and bars["standard", 4].y == 1
    fused = [mark.y for mark in pcie.marks[SPEEDUP] if mark.arm == "standard-fused"]
    assert fused == [pytest.approx(10 * 1.1 / 6)]  # which brings its link along to every panel
    total = next(mark for mark in nvlink.marks[TOKENS] if mark.arm == "ladder" and mark.x == 1)
    assert total.low is not None and total.high is not None and total.low < total.y < total.high
    assert total.low == pytest.approx(512e3 / (55 + 511 * 5.7))  # the slower quartile, after the same prompt
    front, _ = frontier(rows)
    best = [(mark.x, mark.y) for mark in front.marks[""] if mark.arm == "ladder" and mark.front]
    assert best == sorted(best) and len(best) == 2 and best[0][1] > best[1][1]


def test_lanes_are_a_column_where_lines_have_them(tmp_path: Path) -> None:
    old, new = row("standard", 1, 10.0), row("ladder", 1, 5.0, lanes=2)
    for lines, cells in (([old], None), ([old, new], [None, 2])):
        table = data(report([write(tmp_path / "rows.jsonl", lines)], tmp_path / "out")[0])["rows"]
        titles = [column["title"] for column in table["columns"]]
        assert ([each[titles.index("lanes")] for each in table["cells"]] if "lanes" in titles else None) == cells


def test_an_arm_with_a_link_of_its_own_stays_in_its_cell(tmp_path: Path) -> None:
    fused = [row("standard-fused", 1, ms, "nvlink_fused", cell_link=link)
             for ms, link in ((2.0, "nvlink_nccl"), (3.0, "pcie_shm_tp8"))]  # fmt: skip
    rows = load([write(tmp_path / "rows.jsonl", [*sample(), *fused])]).rows
    speedups = [mark.y for panel in throughput(rows) for mark in panel.marks[SPEEDUP] if mark.arm == "standard-fused"]
    assert speedups == [pytest.approx(5.5), pytest.approx(11 / 3)]
    assert {panel.keys["link"] for panel in frontier(rows)} == {"nvlink_nccl (24 µs)", "pcie_shm (62 µs)"}


def test_newest_row_counts_and_settings_stay_apart(tmp_path: Path) -> None:
    lines = [*sample(), row("ladder", 1, 2.2), row("ladder", 1, 3.0, chip="CPU"), row("standard", 1, 9.0, chip="CPU")]
    rows = load([write(tmp_path / "rows.jsonl", lines)]).rows
    panels = throughput(rows)
    assert len(panels) == 3 and len({panel.keys["measured"] for panel in panels}) == 2
    assert [mark.y for mark in panels[0].marks[SPEEDUP] if (mark.arm, mark.x) == ("ladder", 1)] == [pytest.approx(5)]
    assert [mark.y for mark in panels[2].marks[SPEEDUP] if mark.arm == "ladder"] == [pytest.approx(3)]


def test_the_models_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def model(size: str, wiring: str, tp: int, batch: int, context: int, link: Link, chip: str, *rest: Any) -> Any:
        if chip != "NVIDIA H200":
            return None
        return 4.0 if wiring == "none" else 5.0 + (160e3 * link.alpha if wiring == "standard" else 0)

    monkeypatch.setattr(report_figures, "tpot_ms", model)
    first = latency(load([write(tmp_path / "rows.jsonl", sample())]).rows)[0]
    assert [mark.x for mark in first.marks[""] if mark.arm == "ladder"] == pytest.approx([24, 62])
    assert all(y == pytest.approx(1 + 160e3 * x * 1e-6 / 5) for x, y in first.curves["ladder"])
    assert first.curves["none"][0][1] == pytest.approx((5 + 0.16 * 16) / 4) and "performance model" in first.remark
    assert dict(next(mark for mark in first.marks[""] if mark.arm == "ladder").tips)["the model's"] == "5.00"
    other = [row("standard", 1, 9.0, chip="abacus"), row("ladder", 1, 5.0, chip="abacus")]
    unknown = latency(load([write(tmp_path / "other.jsonl", other)]).rows)[0]
    assert not unknown.curves and "does not know abacus" in unknown.remark


def test_the_real_model_answers(tmp_path: Path) -> None:
    panel = latency(load([write(tmp_path / "rows.jsonl", sample())]).rows)[0]
    assert len(panel.curves["ladder"]) == report_figures.CURVE


def test_speedups_by_weight_format(tmp_path: Path) -> None:
    """Each over standard with the same weights; in the order of the table, measured and predicted side by side."""
    times = {"int4": (4.0, 2.0), "bf16": (8.0, 6.0), "fp8": (5.0, 3.0)}
    few = {"layers": 4, "of_layers": 80}  # which are predicted soon
    lines = [row(arm, 1, ms, weights=weights, **few) for weights, pair in times.items()
             for arm, ms in zip(("standard", "ladder"), pair, strict=True)]  # fmt: skip
    lines += [row("ladder", 4, 3.0, **few), row("ladder", 4, 3.0, weights="fp8", **few)]  # without standard
    lines += [row("standard", 16, 9.0, **few), row("ladder", 16, 8.0, **few)]  # of one format
    rows = load([write(tmp_path / "rows.jsonl", lines)]).rows
    (panel,) = by_weights(rows)
    assert panel.ticks == ["bf16", "fp8", "int4"] and panel.keys["batch"] == "1" and "weights" not in panel.facts
    assert [(mark.x, mark.y) for mark in panel.marks[""]] == [(0, 8 / 6), (1, 5 / 3), (2, 2.0)]
    assert [place for place, _ in panel.curves["ladder"]] == [0, 1, 2] and "predicted" in panel.remark
    first = [mark for each in throughput(rows) for mark in each.marks[SPEEDUP] if mark.arm == "ladder"]
    assert len(first) == 4  # formats are not compared with each other
    out, names = tmp_path / "out", looks(row.arm for row in rows)
    out.mkdir()
    (picture,) = pictures({"weights": [panel]}, [], names, out)
    assert picture.name == "weights-llama-3-70b-tp8-batch1-nvlink_nccl.png" and picture.stat().st_size > 10_000
    page = out / "report.html"
    drawn = {"throughput": throughput(rows), "weights": [panel]}
    page.write_text(make_page(load([tmp_path / "rows.jsonl"]), drawn, names), encoding="utf-8")
    assert {each["keys"]["weights"] for each in data(page)["figures"]["throughput"]} == {"bf16", "fp8", "int4"}
    table = data(page)["weights"]
    (cells,) = table["cells"]
    shown = dict(zip((column["title"] for column in table["columns"]), cells, strict=True))
    assert (shown["arm"], shown["int4, measured"]) == ("ladder", 2.0)
    assert shown["fp8, predicted"] == panel.curves["ladder"][1][1] > 1
    titles = [column["title"] for column in data(page)["rows"]["columns"]]
    assert [each[titles.index("weights")] for each in data(page)["rows"]["cells"]][:2] == ["int4", "int4"]
    arms = ("standard", "ladder")
    strange = [row(arm, 1, 2.0, weights=weights, **few) for weights in ("bf16", EVIL) for arm in arms]
    (panel,) = by_weights(load([write(tmp_path / "strange.jsonl", strange)]).rows)
    assert len(panel.curves["ladder"]) == 1  # nothing is predicted of a format that is not known
    (alone,) = beside_of(tmp_path, [row("standard", 4, 9.0, weights="fp8"), row("ladder", 4, 3.0, weights="fp8")])
    assert alone is None  # the published figures are of 16 bits


def beside_of(folder: Path, lines: list[Any]) -> set[float | None]:
    return {line.ours for line in beside(load([write(folder / "beside.jsonl", lines)]).rows)}


def test_beside_the_published(tmp_path: Path) -> None:
    lines = beside(load([write(tmp_path / "rows.jsonl", sample())]).rows)
    assert len(lines) == 2 * 7 + 2 * 3 * 3
    ours = {(line.size, line.link, line.arm, line.what): line for line in lines}
    speedup = ours["70B", "peer-to-peer on", "ladder", "tokens/s, times standard"]
    assert (speedup.published, speedup.ours, speedup.unit) == (1.29, pytest.approx(2), "x")
    saved = ours["70B", "peer-to-peer off", "none", "decode time saved"]
    assert saved.published == 52.71 and saved.ours == pytest.approx(100 * (1 - 4 / 11))
    blank = ours["405B", "peer-to-peer on", "ladder", "tokens/s, times standard"]
    assert blank.ours is None and blank.measured == "" and blank.tp == 16
    bare = [line | {"ttft_ms": None} for line in sample()]
    known = [line.measured for line in beside(load([write(tmp_path / "bare.jsonl", bare)]).rows) if line.ours]
    assert known and all(text.startswith("decoding only: ") for text in known)  # the paper counts the prompt too
    assert not speedup.measured.startswith("decoding only")


@pytest.mark.filterwarnings("error")
def test_everything_from_the_lines_is_harmless(tmp_path: Path) -> None:
    evil = {"size": EVIL, "link": EVIL, "chip": EVIL, "commit": "/*DATA*/\ud800", "mode": "\x00", "link_alpha_us": 5}
    lines = [row("standard", 1, 9.0, **evil), row(EVIL, 1, 5.0, **evil), row("x" * 500, 1, 5.0, **evil)]
    path = write(tmp_path / "rows.jsonl", [*lines, step(EVIL), {"measure": EVIL}])
    page, *pictures = report([path], tmp_path / "out")
    text = page.read_text(encoding="utf-8").replace(program(), "")
    assert "<img" not in text and text.count("</script>") == 3 and "onerror=alert(1)>" not in text
    read = data(page)
    assert read["figures"]["throughput"][0]["keys"]["size"] == EVIL.replace("\u2028", "\ufffd")
    assert len(pictures) == 3 and all(re.fullmatch(r"[a-z0-9._-]+\.png", picture.name) for picture in pictures)
    assert all(len(picture.name) < 120 and picture.parent == tmp_path / "out" for picture in pictures)


def test_few_keys_are_enough(tmp_path: Path) -> None:
    lines = [{"size": "mine", "wiring": arm, "tp": 1, "batch": 1, "tpot_ms_p50": 5} for arm in ("standard", "none")]
    page, *pictures = report([write(tmp_path / "rows.jsonl", lines)], tmp_path / "out")
    read = data(page)
    assert len(pictures) == 1 and not read["figures"]["latency"] and not read["figures"]["frontier"]
    assert "chip unknown" in read["figures"]["throughput"][0]["facts"]


def test_an_interrupted_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", sample())
    path.write_text(path.read_text() + '{"size": "llama')
    lines = load([path])
    assert len(lines.rows) == len(sample()) and lines.not_drawn == ["rows.jsonl: not drawn are 1 torn last line."]


NAN = json.dumps(row("ladder", 1, 5.0)).replace("5.0", "NaN")


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["size,tp", "a,8"], "is no file of JSON lines: line 1 is 'size,tp'"),
        ([row("ladder", 1, 5.0), "[1]"], "line 2 is"),
        ([], "has nothing to draw: give"),
        ([{"measure": "peak"}, {"a": 1}], "has nothing to draw \\(it has 1 line of 'peak', 1 line with a\\)"),
        ([NAN], "has nothing to draw"),
        ([step(compute=[])], "has nothing to draw"),
        ([step(compute=[{"name": "dream 0", "begin": 0, "end": 1}])], "has nothing to draw"),
        ([step(wire=[{"name": "sum 0", "begin": 1, "end": 0}])], "has nothing to draw"),
        ([row("ladder", 1, 5.0, tp="eight")], "line 1: tp must be a whole number of at least 0, not 'eight'"),
        ([row("ladder", 0, 5.0)], "batch must be more than 0, not 0"),
        ([row("ladder", 1, 5.0, tokens_per_s=-3)], "tokens_per_s must be a number"),
        ([row("ladder", 1, 5.0, ttft_ms=10**400)], "ttft_ms must be a number"),
        ([row("ladder", 1, 5.0, size=None)], "the key 'size' is missing"),
        ([row("ladder", 1, 5.0, chip=7)], "chip must be a text, not 7"),
    ],
)
def test_refusals(tmp_path: Path, lines: list[Any], reason: str) -> None:
    with pytest.raises(LadderError, match=reason) as refusal:
        report([write(tmp_path / "rows.jsonl", lines)], tmp_path / "out")
    assert "\n" not in str(refusal.value) and not (tmp_path / "out").exists()


def test_refusals_of_places(tmp_path: Path) -> None:
    with pytest.raises(LadderError, match="no such file"):
        report([tmp_path / "nowhere.jsonl"], tmp_path / "out")
    with pytest.raises(LadderError, match="cannot be read"):
        report([tmp_path], tmp_path / "out")
    rows = write(tmp_path / "rows.jsonl", sample())
    with pytest.raises(LadderError, match="is a file: name a folder"):
        report([rows], rows)
    with pytest.raises(LadderError, match="no file of measurements"):
        ReportOptions(())
    assert ReportOptions((rows,)).out == Path("report")


def test_looks_are_the_same_everywhere() -> None:
    assert looks(["none", "ladder", "mine", "standard"])["ladder"] == looks(["ladder"])["ladder"] == LOOKS["ladder"]
    assert list(looks(iter(["none", "ladder", "mine", "standard"]))) == ["standard", "ladder", "mine", "none"]
    many = looks([*LOOKS, *(f"wiring-{n}" for n in range(9))])
    assert len({(look.colour, look.fill, look.marker) for look in many.values()}) == len(many)


@pytest.mark.parametrize("module", ["ladder.report", "ladder.report.options"])
def test_no_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


# --- what else is drawn ---------------------------------------------------------------------------------------------


def one_rank(wiring: str, ms: float, link: str | None = None, **more: Any) -> dict[str, Any]:
    """A line of `ladder.bench.one_rank`."""
    line = {"measure": "decode", "mode": "one-rank", "size": "llama-3-70b", "tp": 8, "batch": 1, "context": 1024}
    line |= {"layers": 80, "of_layers": 80, "wiring": wiring, "link_name": link, "link": "emulated" if link else "none"}
    return {**line, "ms": ms, "ms_q1": ms - 0.1, "ms_q3": ms + 0.1, "chip": "NVIDIA H200", "commit": "abc", **more}


def test_one_rank_lines_are_drawn(tmp_path: Path) -> None:
    lines = [one_rank("standard", 8.0, "nvlink_nccl"), one_rank("ladder", 5.0, "nvlink_nccl")]
    launched = [one_rank("ladder", ms, "nvlink_nccl", lanes=2, programmatic_launch=early) for ms, early in
                ((4.0, True), (6.0, False))]  # fmt: skip
    lines += [*launched, one_rank("none", 4.5), one_rank("ladder", 1.0, "nvlink_nccl", concurrent_all_reduces=4)]
    found = load([write(tmp_path / "rows.jsonl", [*lines, {"measure": "parts", "tp": 8}])])
    assert [(row.arm, row.tpot_ms_p50) for row in found.rows] == [
        ("standard", 8.0), ("ladder", 5.0), ("ladder, two lanes", 4.0), ("none", 4.5),
    ]  # fmt: skip
    assert found.not_drawn == ["rows.jsonl: not drawn are 1 line of 'decode', 1 line of 'parts'."]
    panel = next(panel for panel in throughput(found.rows) if panel.keys["link"].startswith("nvlink_nccl"))
    speedups = {mark.arm: mark.y for mark in panel.marks[SPEEDUP]}
    assert speedups == {"standard": 1, "ladder": 1.6, "ladder, two lanes": 2, "none": pytest.approx(8 / 4.5)}
    both = looks(row.arm for row in found.rows)
    assert both["ladder, two lanes"].colour == both["ladder"].colour and both["ladder, two lanes"] != both["ladder"]


def test_logs_of_trainings_are_drawn(tmp_path: Path) -> None:
    logs = []
    for name, end in (("first", 2.0), ("second", 1.5)):
        (tmp_path / name).mkdir()
        lines = [{"step": n, "tokens": 100 * n, "loss": end + 1 / n, "tokens_per_s": 50.0} for n in (1, 2, 3)]
        logs.append(write(tmp_path / name / "log.jsonl", [*lines, {"step": 3, "tokens": 300, "eval_loss": end}]))
    page, *pictures = report(logs, tmp_path / "out")
    (panel,) = data(page)["figures"]["training"]
    assert panel["arms"] == ["first", "second"] and panel["keys"] == {"against": "tokens"}
    assert list(panel["charts"]) == ["loss", "validation loss", "tokens/s"]
    losses = [line["y"] for line in panel["charts"]["loss"]["datasets"]["lines"] if line["arm"] == "second"]
    assert losses == [2.5, 2.0, pytest.approx(1.5 + 1 / 3)]
    assert [one["y"] for one in panel["charts"]["validation loss"]["datasets"]["points"]] == [2.0, 1.5]
    assert [picture.name for picture in pictures] == ["training-tokens.png"]
    with pytest.raises(LadderError, match="line 1: loss must be a number"):
        report([write(tmp_path / "bad.jsonl", [{"step": 1, "loss": "much"}])], tmp_path / "out")


def test_the_headline_names_the_bound(tmp_path: Path) -> None:
    lines = [row("standard", 1, 10.0), row("ladder", 1, 8.0), row("none", 1, 4.0)]
    (_, sentence) = data(report([write(tmp_path / "rows.jsonl", lines)], tmp_path / "out")[0])["summary"]
    assert sentence.startswith("Ladder gives 1.25") and "without communication standard would give 2.50" in sentence


def test_a_newcomers_own_bench(tmp_path: Path) -> None:
    """One link, a CPU: a latency chart of bars instead of one column, no published figures, no GPU."""
    few = {"size": "quick", "tp": 2, "chip": "Some CPU", "mode": "ranks", "layers": 8, "of_layers": 8}
    lines = [row(arm, batch, ms * batch, **few) for arm, ms in (("standard", 9.0), ("ladder", 6.0)) for batch in (1, 2)]
    page = report([write(tmp_path / "rows.jsonl", lines)], tmp_path / "out")[0]
    read = data(page)
    (latency_panel, _) = read["figures"]["latency"]
    marks = [layer["mark"]["type"] for layer in latency_panel["charts"][""]["layer"]]
    assert "bar" in marks and "line" not in marks
    assert read["published"]["rows"] == []
    assert "GPU" not in json.dumps({key: read[key] for key in ("figures", "rows", "summary")})


def test_without_the_library_the_page_has_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    program.cache_clear()
    written = report([write(tmp_path / "rows.jsonl", sample())], tmp_path / "out")
    program.cache_clear()
    assert [path.name for path in written] == ["report.html"] and len(data(written[0])["rows"]["cells"]) == len(
        sample()
    )
    assert install("plot") in caplog.text and written[0].stat().st_size < 300_000
