"""`ladder scan`: its lines, tables and pictures, the texts that it reads, and what it refuses."""

import gzip
import importlib
import json
import lzma
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ladder.bench.machine import machine
from ladder.checkpoint import Random, load, save
from ladder.config import ModelConfig
from ladder.data.texts import tokenize
from ladder.errors import install
from ladder.model import Decoder
from ladder.scan.scan import scan, scan_sequences, sizes
from ladder.scan.target import TargetMachine
from ladder.wiring import Wiring
from tests.checkpoints import byte_tokenizer, tiny
from tests.naive import WORDS

importlib.import_module("ladder.cli.scan")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint `m` with a tokenizer, and `text`."""
    folder = tmp_path_factory.mktemp("scan")
    tiny(folder / "m", context=64)
    (folder / "text").write_text(2 * WORDS)
    return folder


def test_json_lines(run: Run, folder: Path) -> None:
    arguments = ["--data", folder / "text", "--seq-len", 16, "--tokens", 50, "--points", 1, "--json"]
    wishes = ["--budget", 1e-6, "--speed", 1.1, "--tp", 4, "--chip", "h200", "--link", "50us,10GB/s", "--requests", 2]
    status, out, err = run("scan", folder / "m", *arguments, *wishes)
    assert (status, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    # of sizes 1, 2 and 4 none is the smallest that is fast enough: 3 was measured besides, and is told when it is known
    kinds = ["alone"] * 4 + ["grown"] * 3 + ["last"] * 3 + ["grown", "last"] + ["proposal"]
    assert [line["kind"] for line in lines] == kinds
    here = machine(torch.device("cpu"))
    keys = {"kind", "layers", "wiring", "kl", "kl_stderr", "perplexity", "perplexity_stderr", "agreement"}
    for line in lines:
        wish = {"budget", "over_budget", "speed", "predicted_speed"} if line["kind"] == "proposal" else set()
        assert set(line) == keys | {"model", "tokens", "fit_tokens", "original_perplexity"} | wish | here.keys()
        assert (line["model"], line["tokens"]) == (str(folder / "m"), 48) and here.items() <= line.items()
    model = AutoModelForCausalLM.from_pretrained(folder / "m")
    tokens = byte_tokenizer()(2 * WORDS)["input_ids"]
    found = scan(model, scan_sequences(tokens, 16, 50), points=0)
    sampled = [curve[at] for curve in (found.grown, found.last) for at in (0, 1, 3)]
    told = [*found.alone, *sampled, found.grown[2], found.last[2]]
    for line, damage in zip(lines, told, strict=False):
        assert line["layers"] == list(damage.layers) and line["wiring"] == damage.wiring
        assert line["kl"] == pytest.approx(damage.kl, rel=1e-5)
        assert line["original_perplexity"] == pytest.approx(found.original.perplexity, rel=1e-5)
    proposal = lines[-1]
    predicted = TargetMachine("h200", 4, "50us,10GB/s", 2).predictor(replace(ModelConfig.named("tiny"), context=64))
    smallest = next(d for d in found.grown if predicted(Wiring.parse(d.wiring, 4)) >= 1.1)
    assert len(proposal["layers"]) == len(smallest.layers) == 3
    assert proposal["predicted_speed"] == pytest.approx(predicted(Wiring.parse(proposal["wiring"], 4)))
    assert proposal["predicted_speed"] >= 1.1
    assert proposal["over_budget"] == pytest.approx(proposal["kl"] - 1e-6)


def test_fitted_sets(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "long").write_text(20 * WORDS)
    arguments = ["--data", tmp_path / "long", "--seq-len", 16, "--tokens", 64, "--points", 1, "--batch", 16]
    found = {}
    for fit in ([], ["--fit", 1300]):
        status, out, err = run("scan", folder / "m", *arguments, *fit, "--json")
        assert (status, err) == (0, "")
        found[len(fit)] = [json.loads(line) for line in out.splitlines()]
    assert {line["fit_tokens"] for line in found[2]} == {1280} and {line["fit_tokens"] for line in found[0]} == {0}
    assert found[2][-1]["kl"] < 0.9 * found[0][-1]["kl"] and found[2][-1]["wiring"] == "ladder"
    status, out, err = run("scan", folder / "m", *arguments, "--fit", 1300, "--budget", found[2][-1]["kl"] * 1.01)
    assert (status, err) == (0, "") and "fitted on 1280 tokens, not trained" in out and '--wiring "ladder"' in out


def test_a_fitted_set_is_told_before_the_next_is_fitted(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that whoever stops a long scan has what was measured until then."""
    done: list[Any] = []

    def solve(model: Any, wiring: Wiring, rows: Any, **more: Any) -> Any:
        done.append(wiring)
        if len(done) == 3:
            raise KeyboardInterrupt
        return model

    monkeypatch.setattr("ladder.scan.probe.solve", solve)
    arguments = ["--data", folder / "text", "--seq-len", 16, "--tokens", 32, "--batch", 1, "--fit", 64, "--json"]
    status, out, _ = run("scan", folder / "m", *arguments)
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 130 and [(line["kind"], line["layers"]) for line in lines] == [("alone", [0]), ("alone", [1])]


def test_a_budget_measures_the_sizes_between(run: Run, folder: Path, tmp_path: Path) -> None:
    """The largest set of all is proposed, whether or not its size was among the points."""
    config = replace(ModelConfig.named("tiny"), layers=12, windows=(), wiring=Wiring(()), context=64)
    save(load(Decoder(config), Random(seed=5, deviation=0.1)), tmp_path / "m")
    byte_tokenizer().save_pretrained(tmp_path / "m")
    scanned = ["scan", tmp_path / "m", "--data", folder / "text", "--seq-len", 16, "--tokens", 32]

    def lines(*arguments: Any) -> dict[str, list[dict[str, Any]]]:
        status, out, err = run(*scanned, *arguments, "--json")
        assert (status, err) == (0, "")
        found = [json.loads(line) for line in out.splitlines()]
        return {kind: [line for line in found if line["kind"] == kind] for kind in ("grown", "last", "proposal")}

    every = lines("--points", 0)
    curve = [line["kl"] for line in every["grown"]]
    assert curve == sorted(curve)
    for points, size, measured in ((8, 10, {10}), (8, 9, {10}), (1, 8, {7, 8, 9}), (1, 12, set())):
        budget = ["--budget", curve[size - 1] * 1.001]
        assert measured.isdisjoint(sizes(12, points))
        found = lines("--points", points, *budget)
        assert len(found["proposal"][0]["layers"]) == size
        assert found["proposal"] == lines("--points", 0, *budget)["proposal"]
        for kind in ("grown", "last"):
            assert {len(line["layers"]) for line in found[kind]} == {*sizes(12, points), *measured}
            assert len(found[kind]) == len({*sizes(12, points), *measured})
    _, out, _ = run(*scanned, "--budget", curve[9] * 1.001)
    assert "proposed: 10 layers" in out and re.search(r"^ +10 +\d", out.split("growing sets")[1], re.MULTILINE)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt.xz", "a.txt.gz"])
def test_texts_as_ladder_data_reads_them(run: Run, folder: Path, tmp_path: Path, name: str) -> None:
    """Packed, or documents of JSON lines: the figures are those of the plain text."""
    texts = [WORDS, "A second document.\n\nOf two parts."]
    (tmp_path / "plain").write_text("\n\n\n".join(texts))
    raw = "".join(json.dumps({"body": text}) + "\n" for text in texts) if "jsonl" in name else "\n\n\n".join(texts)
    packers: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.compress, ".gz": gzip.compress, ".jsonl": bytes}
    (tmp_path / name).write_bytes(packers[Path(name).suffix](raw.encode()))
    scanned = ["scan", folder / "m", "--seq-len", 12, "--points", 1, "--json", "--field", "body", "--data"]
    plain, found = (run(*scanned, tmp_path / file) for file in ("plain", name))
    assert found == plain and found[0] == 0
    assert json.loads(found[1].splitlines()[0])["tokens"] == (len("\n\n\n".join(texts)) - 1) // 12 * 12
    assert run(*scanned, tmp_path / name, "--tokens", 12) == run(*scanned, tmp_path / "plain", "--tokens", 12)


def test_tables_a_picture_and_a_pattern_to_paste(run: Run, folder: Path, tmp_path: Path) -> None:
    arguments = ["scan", folder / "m", "--data", folder / "text", "--seq-len", 16, "--tokens", 32, "--points", 1]
    status, out, err = run(*arguments, "--budget", 1e9, "--wiring", "parallel", "--plot", tmp_path / "scan.png")
    assert (status, err) == (0, "")
    assert out.startswith("m, standard: perplexity ") and "one layer" in out and "growing sets" in out
    assert '--wiring "parallel"\n' in out and "proposed: 4 layers" in out and "--fit 131072" in out
    picture = (tmp_path / "scan.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    status, out, err = run(*arguments, "--budget", 0)  # what was measured is shown all the same
    assert status == 2 and "growing sets" in out
    assert err.startswith("ladder: no set stays within a budget of 0 nats per token: the least is ")


def test_refused(run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with one sentence and exit status 2, before any weight is read."""
    (tmp_path / "short").write_text("ten tokens")
    (tmp_path / "empty").write_text(" ")
    (tmp_path / "a.xz").write_text(WORDS)
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": WORDS}))
    shards = tokenize([folder / "text"], tmp_path / "shards", byte_tokenizer()).folder
    bare = tiny(tmp_path / "bare", tokenizer=False)
    narrow = tiny(tmp_path / "narrow", vocab=300)
    byte_tokenizer(extra=50).save_pretrained(narrow)
    desync = tiny(tmp_path / "desync", wiring="desync-2x")
    wired = tiny(tmp_path / "wired", wiring="standard:3 ladder:1")
    for place in ("closed", "a.png"):
        (tmp_path / place).mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path / "closed")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    speed = ["--speed", 1.1, "--tp", 2]
    cases: list[tuple[str, Any, list[Any]]] = [
        ("there is no such directory, and one of the hub", folder / "nobody", []),
        ("cannot be loaded", bare, []),
        ("ids go up to 306, the model has 300", narrow, []),
        ("the model has layers under desync-2x", desync, []),
        ("no such file", None, ["--data", tmp_path / "missing"]),
        ("is empty", None, ["--data", tmp_path / "empty"]),
        ("is a folder: a scan wants a file of text", None, ["--data", tmp_path]),
        ("is a folder: a scan wants a file of text", None, ["--data", shards]),
        ("no such file", None, ["--data", tmp_path / "missing.xz"]),
        ("a.xz cannot be read: Input format not supported", None, ["--data", tmp_path / "a.xz"]),
        ("its keys are 'body'; choose one with --field", None, ["--data", tmp_path / "a.jsonl"]),
        ("the text has 10 tokens, a sequence of 64 needs 65", None, ["--data", tmp_path / "short"]),
        ("--seq-len 65 is more than the model's context of 64", None, ["--seq-len", 65]),
        ("50 tokens are less than a sequence of 64", None, ["--tokens", 50]),
        ("tokens must be at least 1, not 0", None, ["--tokens", 0]),
        ("batch must be at least 1, not 0", None, ["--batch", 0]),
        ("points must be at least 0, not -1", None, ["--points", -1]),
        ("fit must be at least 1, not 0", None, ["--fit", 0]),
        ("a fit takes 512 tokens at least, a batch of sequences, behind the", None, ["--fit", 511]),
        ("--fit is for a model that was trained as standard", wired, ["--fit", 512]),
        ("unknown wiring 'stairs'", None, ["--wiring", "stairs"]),
        ("unknown wiring 'ladder:4'", None, ["--wiring", "ladder:4"]),
        ("depends on the number of ranks", None, ["--wiring", "desync-2x"]),
        ("under standard already", None, ["--wiring", "standard"]),
        ("the budget is -1 nats", None, ["--budget", -1]),
        ("the speed is 1 times", None, ["--speed", 1]),
        ("all layers are predicted to give 1.", None, ["--speed", 50, *speed[2:]]),
        ("3 ranks cannot share", None, [*speed[:2], "--tp", 3]),
        ("unknown chip", None, [*speed, "--chip", "abacus"]),
        ("unknown link", None, [*speed, "--link", "string"]),
        ("requests must be from 1", None, [*speed, "--requests", 0]),
        ("unknown dtype 'int4'", None, ["--dtype", "int4"]),
        ("unknown device 'abacus'", None, ["--device", "abacus"]),
        ("cannot be made", None, ["--plot", tmp_path / "short" / "scan.png"]),
        ("scan must end in .png, .svg or .pdf", None, ["--plot", tmp_path / "scan"]),
        ("nothing can be made in", None, ["--plot", tmp_path / "closed" / "a.png"]),
        ("a.png is a directory: name a file", None, ["--plot", tmp_path / "a.png"]),
    ]
    for sentence, model, arguments in cases:
        data = [] if "--data" in arguments else ["--data", folder / "text"]
        status, out, err = run("scan", model or folder / "m", *data, *arguments)
        assert (status, out) == (2, ""), sentence
        assert sentence in err and err.startswith("ladder: ") and err.count("\n") == 1, err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run("scan", folder / "m", "--data", folder / "text", "--plot", tmp_path / "scan.png")
    assert (status, err) == (2, f"ladder: pictures need matplotlib: {install('plot')}\n")
