"""`ladder plan`: what it proposes, prints and refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ladder.cli import main
from ladder.config import ModelConfig
from ladder.errors import LadderError
from ladder.perf.plan import AS_BF16, Deployment, predict
from ladder.scan.target import TargetMachine
from ladder.wiring import Wiring

RESULTS = Path(__file__).parent.parent / "results"
PAPER = Deployment("llama-3-70b", "h100", 8, "nvlink_nccl", 4, 1024, 512, "ladder")
KEYS = {"prefill_s", "decode_s", "tokens_per_s", "tpot_ms", "comm_ms", "exposed_ms"}


def test_what_is_proposed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the wirings by default, those that are models whose quality is known; of those asked for, all."""
    given = ["plan", "--chip", "h200", "--target-ms", "10", "--tp", "8", "--batch", "1"]
    for more, expected in (([], "ladder"), (["--wiring", "parallel-1", "--wiring", "ladder"], "parallel-1")):
        monkeypatch.setattr("sys.argv", ["ladder", *given, *more, "--json"])
        with pytest.raises(SystemExit):
            main()
        assert json.loads(capsys.readouterr().out)["wiring"] == expected


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--tp 7", "7 ranks cannot share 64 heads.*; the nearest is 8"),
        ("--tp 1", "needs 141.6 GB on each h100 .*, which has 76.0 GB to use: try --tp 2 or --chip b200"),
        ("--tp 1 --chip h100", "try --tp 2 or --chip b200 or --weights fp8"),
        ("--weights fp9", "unknown format of weights 'fp9': known are bf16, fp8, .*; the nearest is 'fp8'"),
        ("--weights bf16,", "unknown format of weights ''"),
        ("--weights fp8 --weights int44", "the nearest is 'int4'"),
        ("--weights int4 --tp 64", "64 ranks would cut the groups of 128 of a matrix's 28672 inputs"),
        ("--weights fp8-block --tp 8 --size qwen3-30b-a3b", "cut the groups of 128 of a matrix's 768 inputs"),
        (
            "--weights int4 --tp 1 --size smollm2-135m",
            "576 inputs .* in groups of 128 inputs: groups of 32 or 64 can be",
        ),
        ("--weights int4 --tp 8 --size qwen3-30b-a3b --target-ms 9", "8 ranks would cut the groups of 128"),
        ("--tp 0", "tp must be from 1"),
        ("--tp x", "--tp 'x' must be whole numbers, with commas between: 1,4,16"),
        ("--link nvlink_ncl", "unknown link 'nvlink_ncl': .*; the nearest is 'nvlink_nccl'"),
        ("--chip h10", "unknown chip 'h10': .*; the nearest is 'h100'"),
        ("--chip 0GB,1TB/s,1TFLOP/s", "unknown chip"),
        ("--size llama-70b", "unknown size 'llama-70b': .*; the nearest is 'llama-3-70b'"),
        ("--wiring lader", "unknown wiring 'lader': .*; the nearest is 'ladder'"),
        ("--wiring hybird", "unknown wiring 'hybird': .*; the nearest is 'hybrid'"),
        ("--wiring laddr:80", "unknown wiring 'laddr': .*; the nearest is 'ladder'"),
        ("--wiring standard-fused --link moon", "unknown link 'moon'"),
        ("--engine papers", "unknown engine 'papers': known are auto, paper, ladder; the nearest is 'paper'"),
        ("--nodes 3", "8 ranks cannot be spread evenly over 3 nodes; the nearest is --nodes 2"),
        ("--nodes 100", "the nearest is --nodes 8"),
        ("--pp 81", "80 layers cannot be cut into 81 stages; the nearest is --pp 80"),
        ("--tp 8 --link pcie_shm_tp2", "link pcie_shm_tp2 joins 2 ranks, not 8: give --link pcie_shm_tp8"),
        ("--tp 16 --link pcie_shm_tp8", "link pcie_shm_tp8 joins 8 ranks, not 16: give --tp 8"),
        ("--tp 16 --link ib_2node_nccl --node-link 5us,40GB/s", "machine to machine: leave out --node-link 5us,40GB/s"),
        ("--tp 32 --nodes 4 --link ib_2node_nccl", "joins 2 machines, not 4: give --nodes 2, or .*--link nvlink_nccl"),
        ("--gpus 100", "the nearest is 96"),
        ("--prompt 9000", "shorten them by 1320"),
        ("--batch 4000", "a smaller --batch"),
        ("--target-ms 0", "must be more than 0"),
        ("--target-ms 10 --link nonsense", "unknown link 'nonsense'"),
        ("--target-ms 10 --chip h20", "unknown chip 'h20': .*; the nearest is 'h200'"),
        ("--target-ms 10 --wiring lader", "unknown wiring 'lader'"),
        ("--target-ms 10 --tp 7", "the nearest is 8"),
        ("--target-ms 10 --sweep link", "leave out --sweep"),
        ("--tp ²", "must be whole numbers"),
        ("--gpus 0", "gpus must be from 1"),
        ("--gpus -8", "gpus must be from 1"),
        ("--node-link foo", "unknown link 'foo'"),
        ("--sweep moon", "unknown sweep 'moon': known are link, batch$"),
        ("--sweep lnk", "unknown sweep 'lnk': known are link, batch; the nearest is 'link'"),
        ("--chip mi300x", "unknown chip 'mi300x': .*, rtx-4090$"),
        ("--size qwen2.5-7b", "unknown size 'qwen2.5-7b': .*, quick$"),
        ("--size LLAMA-3-70B", "the nearest is 'llama-3-70b'$"),
        ("--size tiny --model .", "--size and --model . name two models: give one of them"),
        ("--model nowhere", "no model 'nowhere': there is no such directory"),
    ],
)
def test_refuses(flags: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["ladder", "plan", *flags.split()])
    with pytest.raises(SystemExit) as status:
        main()
    out, err = capsys.readouterr()
    assert status.value.code == 2 and not out and err.count("\n") == 1
    with pytest.raises(LadderError, match=message):
        raise LadderError(err)


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*flags: str) -> str:
        monkeypatch.setattr("sys.argv", ["ladder", "plan", *flags])
        with pytest.raises(SystemExit) as status:
            main()
        out, _ = capsys.readouterr()
        assert status.value.code in (0, None)
        return str(out)

    one = ["--size", "llama-3-70b", "--chip", "h100", "--tp", "8", "--link", "nvlink_nccl", "--batch", "4"]
    one += ["--prompt", "1024", "--new", "512"]
    row = json.loads(run(*one, "--wiring", "ladder", "--json"))
    assert row == json.loads(json.dumps(predict(PAPER)))
    rows = json.loads(run(*one, "--batch", "1,16", "--tp", "4", "--wiring", "ladder", "--wiring", "standard", "--json"))
    assert [(r["tp"], r["batch"]) for r in rows[::2]] == [(8, 4), (8, 1), (8, 16), (4, 4), (4, 1), (4, 16)]
    shown = run("--chip", "h200")
    assert (
        all(word in shown for word in ("standard", "parallel", "ladder", "engine ladder", "ms per", "per user"))
        and "…" not in shown
    )
    shown = run("--tp", "8,64", "--wiring", "ladder")
    assert shown.count("remark: link nvlink_nccl was measured with 8 ranks, not 64") == 1
    few = ["--size", "tiny", "--tp", "2", "--prompt", "8", "--new", "8", "--wiring", "standard", "--wiring", "ladder"]
    formats = run(*few, "--weights", "bf16,fp8", "--weights", "int4-32")
    assert "as fast as standard with the same weights" in formats
    assert formats.count(f"remark: fp8, int4-32: {AS_BF16}") == 1 and "bytes per weight" in formats
    shown = formats.splitlines()
    head, _, *lines = shown[next(at for at, line in enumerate(shown) if line.split()[:1] == ["weights"]) :]
    assert head.split() == ["weights", "standard", "ladder"]
    assert [line.split()[0] for line in lines[:3]] == ["bf16", "fp8", "int4-32"] and lines[0].split()[3].endswith("x")
    assert " times " in run(*few, "--weights", "fp8")
    assert " times " not in run(*few[:-4], "--wiring", "ladder", "--weights", "bf16,fp8")
    rows = json.loads(run(*few, "--weights", "int4-32,fp8", "--json"))
    assert [(r["weights"], r["wiring"]) for r in rows[:3]] == [
        *(("int4-32", "standard"), ("int4-32", "ladder"), ("fp8", "standard")),
    ]
    narrow = json.loads(run("--chip", "h200", "--target-ms", "40", "--link", "pcie_shm_tp2", "--json"))
    assert narrow["tp"] <= 2  # no more than the link joins
    found = json.loads(run("--chip", "h200", "--target-ms", "12", "--tp", "4,8", "--batch", "16", "--json"))
    assert isinstance(found, dict) and found["tp"] in (4, 8) and found["batch"] == 16 and found["tpot_ms"] <= 12


def plan_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *flags: str) -> str:
    monkeypatch.setattr("sys.argv", ["ladder", "plan", *flags])
    with pytest.raises(SystemExit) as status:
        main()
    out, err = capsys.readouterr()
    assert status.value.code in (0, None) and not err
    return str(out)


@pytest.mark.parametrize("flags", [
    "",
    "--batch 1,4,16,64 --tp 2,4,8 --chip h200",
    "--chip h200 --target-ms 10",
    "--chip rtx-4090 --size llama-3-8b --tp 2,4,8 --batch 1,16",
    "--sweep link --wiring standard --wiring ladder",
    "--weights bf16,fp8,int4 --chip h200",
])  # fmt: skip
def test_tables_fit_eighty_columns(
    flags: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = plan_of(capsys, monkeypatch, *flags.split())
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    assert " times " in shown or "as fast as standard" in shown


def test_wide_tables_go_on_below(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the given columns again, and every figure of a wide terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    flags = ("--chip", "h200", "--details", "--wiring", "standard", "--wiring", "ladder")
    narrow = plan_of(capsys, monkeypatch, *flags)
    assert max(map(len, narrow.splitlines())) <= 80 and narrow.count("further columns:") == 1
    monkeypatch.setenv("COLUMNS", "200")
    wide = plan_of(capsys, monkeypatch, *flags)

    def figures(shown: str) -> list[str]:
        return [word for line in shown.splitlines() if line.split()[:1] == ["ladder"] for word in line.split()[1:]]

    assert figures(narrow) == figures(wide) and len(figures(wide)) == 12 and "further" not in wide


def test_many_predictions_are_a_grid(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each setting, with a column for each wiring: its figures are those of the JSON lines."""
    flags = ("--chip", "h200", "--tp", "2,4,8", "--batch", "1,4,16,64")
    shown = plan_of(capsys, monkeypatch, *flags).splitlines()
    head = next(number for number, line in enumerate(shown) if "standard  " in line and "ladder" in line)
    lines = [line.split() for line in shown[head + 2 : head + 14]]
    rows = {
        (str(row["tp"]), str(row["batch"])): row
        for row in json.loads(plan_of(capsys, monkeypatch, *flags, "--json"))
        if row["wiring"] == "ladder"
    }
    at = shown[head].split().index("ladder")
    assert [tuple(line[:2]) for line in lines] == list(rows)
    for line in lines:
        row = rows[line[0], line[1]]
        cell = line[3 + 2 * (at - 3) :][:2]  # a number under standard, two under each of the others
        assert cell == [f"{row['tpot_ms']:.3g}", f"{row['speedup']:.2f}x"]
    monkeypatch.setenv("COLUMNS", "200")
    details = plan_of(capsys, monkeypatch, *flags, "--details")
    assert "MLP us" in details and details.count("parallel-1") == 12


@pytest.mark.parametrize("chip, tp, link", [
    ("h100", 8, "nvlink_nccl"), ("b200", 2, "nvlink_nccl"), ("l40s", 4, "pcie_p2p_nccl"), ("l40s", 8, "pcie_shm_tp8"),
    ("rtx-4090", 2, "pcie_shm_tp2"), ("rtx-4090", 8, "pcie_shm_tp8"),
])  # fmt: skip
def test_a_chip_has_the_link_that_it_is_sold_with(chip: str, tp: int, link: str) -> None:
    own, named = (predict(replace(PAPER, size="llama-3-8b", chip=chip, tp=tp, link=each)) for each in ("auto", link))
    assert own == named and own["link"] == link and own["remark"] is None
    machine = {"chip": chip, "tp": tp}
    config = ModelConfig.named("llama-3-8b")
    wiring = Wiring(("ladder",) * config.layers)
    assert TargetMachine(**machine).predictor(config)(wiring) == TargetMachine(**machine, link=link).predictor(config)(
        wiring
    )


def test_the_link_of_an_unknown_chip_is_said_to_be_assumed() -> None:
    given = replace(PAPER, size="llama-3-8b", chip="48GB,1TB/s,200TFLOP/s", link="auto")
    assert "nvlink_nccl is assumed, name yours with --link" in predict(given)["remark"]
    assert predict(replace(given, tp=1, chip="80GB,1TB/s,200TFLOP/s"))["remark"] is None


def test_a_model_directory_is_planned_as_the_size_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(ModelConfig.named("llama-3-8b").to_hf()))
    found, wanted = (
        json.loads(plan_of(capsys, monkeypatch, *flags, "--chip", "h200", "--json"))
        for flags in (("--model", str(tmp_path / "mine")), ("--size", "llama-3-8b"))
    )
    assert [{**row, "size": "mine"} for row in wanted] == found
