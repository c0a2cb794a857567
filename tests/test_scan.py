"""Which layers bear another wiring: against naive figures, by brute force, and through the command line."""

import copy
import gzip
import importlib
import json
import lzma
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ladder.adapt.propose import Machine
from ladder.adapt.scan import Scan, extended, rows_of, scan, sizes, windows_of
from ladder.adapt.solve import solve
from ladder.adapt.texts import tokenize
from ladder.bench.machine import machine
from ladder.checkpoint import Random, load, save
from ladder.config import ModelConfig
from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.measures import distance, perplexity
from ladder.model import Decoder
from ladder.wiring import Wiring
from tests.checkpoints import byte_tokenizer, tiny
from tests.hosts import host, oracle
from tests.naive import WORDS

importlib.import_module("ladder.cli.scan")
Run = Callable[..., tuple[int, str, str]]
LAYERS = 4


def planted(loud: int) -> Any:
    """In double precision; all layers but one say little, so that it hurts most where that one reads too little."""
    found = host("llama").double()
    with torch.no_grad():
        for index, layer in enumerate(found.model.layers):
            for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
                output.weight.mul_(3.0 if index == loud else 0.3)
    return found


@pytest.fixture(scope="module")
def model() -> Any:
    return planted(2)


@pytest.fixture(scope="module")
def windows() -> Tensor:
    return torch.randint(2, 97, (3, 13), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def found(model: Any, windows: Tensor) -> Scan:
    return scan(model, windows, points=0, batch=2)


def naive(model: Any, windows: Tensor, layers: tuple[int, ...], row: str = "ladder") -> tuple[float, ...]:
    """KL, its standard error, perplexity, agreement: every position on its own, from the oracle's logits."""
    wiring = [row if at in layers else "standard" for at in range(LAYERS)]
    apart: list[list[float]] = []
    surprise: list[float] = []
    same: list[bool] = []
    for line in windows:
        with torch.no_grad():
            source = oracle(model, ["standard"] * LAYERS, input_ids=line[None, :-1])[0].double().log_softmax(-1)
            wired = oracle(model, wiring, input_ids=line[None, :-1])[0].double().log_softmax(-1)
        pairs = [zip(*both, strict=True) for both in zip(source.tolist(), wired.tolist(), strict=True)]
        apart.append([sum(math.exp(p) * (p - q) for p, q in both) for both in pairs])
        surprise += [-float(wired[at, line[at + 1]]) for at in range(len(line) - 1)]
        same += (source.argmax(-1) == wired.argmax(-1)).tolist()
    means = [sum(window) / len(window) for window in apart]
    mean = sum(means) / len(means)
    error = math.sqrt(sum((each - mean) ** 2 for each in means) / (len(means) - 1) / len(means))
    return mean, error, math.exp(sum(surprise) / len(surprise)), sum(same) / len(same)


def test_every_figure_against_a_naive_one(model: Any, windows: Tensor, found: Scan) -> None:
    assert [damage.layers for damage in found.alone] == [(0,), (1,), (2,), (3,)]
    assert [len(damage.layers) for damage in found.grown] == [1, 2, 3, 4]
    assert [damage.layers for damage in found.last] == [(3,), (2, 3), (1, 2, 3), (0, 1, 2, 3)]
    assert found.tokens == 3 * 12
    for damage in (found.original, *found.alone, *found.grown, *found.last):
        kl, error, value, agreement = naive(model, windows, damage.layers)
        assert damage.kl == pytest.approx(kl, rel=1e-9, abs=1e-12)
        assert damage.kl_stderr == pytest.approx(error, rel=1e-9, abs=1e-12)
        assert damage.perplexity == pytest.approx(value, rel=1e-9)
        pattern = tuple("ladder" if at in damage.layers else "standard" for at in range(LAYERS))
        assert Wiring.parse(damage.wiring, LAYERS).layers == pattern
        assert damage.agreement == pytest.approx(agreement)
    assert min(damage.kl for damage in found.alone) > 1e-4  # no layer is free
    assert len({damage.agreement for damage in found.alone}) > 2


@pytest.mark.parametrize("loud", range(LAYERS))
def test_the_layer_that_must_hurt_most_comes_last(windows: Tensor, loud: int) -> None:
    found = scan(planted(loud), windows, points=0)
    costs = [damage.kl for damage in found.alone]
    assert max(costs) == costs[loud] and found.order[-1] == loud
    assert list(found.order) == sorted(range(LAYERS), key=costs.__getitem__)
    for damage in found.grown:
        assert damage.layers == tuple(sorted(found.order[: len(damage.layers)]))


def test_greedy_tries_all_that_remain(model: Any, windows: Tensor) -> None:
    greedy = scan(model, windows, row="ladder-2", points=1, greedy=True)
    assert [len(damage.layers) for damage in greedy.grown] == [1, 2, 3, 4]
    cost = {
        some: naive(model, windows, some, "ladder-2")[0]
        for size in range(1, 5)
        for some in combinations(range(LAYERS), size)
    }
    chosen: tuple[int, ...] = ()
    for damage in greedy.grown:
        trials = [tuple(sorted((*chosen, layer))) for layer in range(LAYERS) if layer not in chosen]
        chosen = min(trials, key=cost.__getitem__)
        assert damage.layers == chosen and damage.kl == pytest.approx(cost[chosen], rel=1e-9)


def test_as_ladder_eval_measures_it(windows: Tensor) -> None:
    """The same text in the same windows, and all layers are `ladder`."""
    tokens, model, wired = windows.flatten()[:31].tolist(), host("llama"), rewire(host("llama"), "ladder")
    for begin in (None, 1):
        found = scan(model, windows_of(tokens, 10, 35, begin), points=1)
        expected = distance(wired, model, tokens, window=10, begin=begin)
        for damage in (found.grown[-1], found.last[-1]):
            assert damage.layers == (0, 1, 2, 3) and damage.wiring == "ladder"
            assert damage.kl == pytest.approx(expected.kl.value, rel=1e-6)
            assert damage.kl_stderr == pytest.approx(expected.kl.stderr, rel=1e-6)
            assert damage.perplexity == pytest.approx(expected.perplexity.value, rel=1e-6)
            assert damage.perplexity_stderr == pytest.approx(expected.perplexity.stderr, rel=1e-6)
            assert damage.agreement == expected.agreement.value
        assert found.original.perplexity == pytest.approx(
            perplexity(model, tokens, window=10, begin=begin).value, rel=1e-6
        )
        assert (found.original.kl, found.original.agreement, found.tokens) == (0, 1, 30)


def test_what_a_fit_leaves(model: Any, windows: Tensor) -> None:
    """Each set on a copy of its own, fitted as `ladder fit` does it; the model stays what it was."""
    rows = torch.randint(2, 97, (60, 12), generator=torch.Generator().manual_seed(4))
    before, bare = looks(model), scan(model, windows, points=0, batch=30)
    told: list[tuple[int, int, str]] = []
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    found = scan(model, windows, points=1, batch=30, fit=rows, progress=lambda *news: told.append(news))
    found = extended(model, windows, found, 3, 30, None, rows)
    assert [len(damage.layers) for damage in found.grown] == [1, 2, 3, 4]
    assert looks(model) == before and all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert (found.fitted, bare.fitted, found.original) == (720, 0, bare.original)
    with torch.no_grad():
        source = model(windows[:, :-1]).logits.log_softmax(-1)
        for damage in (*found.alone, *found.grown, *found.last):
            fitted = solve(copy.deepcopy(model), damage.wiring, rows, batch=30)(windows[:, :-1]).logits.log_softmax(-1)
            assert damage.kl == pytest.approx(float((source.exp() * (source - fitted)).sum(-1).mean()), rel=1e-9)
            assert damage.agreement == pytest.approx(float((source.argmax(-1) == fitted.argmax(-1)).double().mean()))
    assert all(after.kl < 0.9 * merely.kl for after, merely in zip(found.last, bare.last, strict=True))
    assert told[1] == (3, 15, "fitting layer 1 of 4") and (15, 15, "layers alone") in told
    with pytest.raises(LadderError, match="only a model that was trained as standard can be fitted"):
        scan(rewire(host("llama"), "standard:3 ladder:1"), windows, fit=rows)


def test_rows_to_fit_on() -> None:
    text = list(range(100))
    windows = windows_of(text, 5, 12)
    assert rows_of(text, windows, 25, 2).tolist() == [list(range(at, at + 5)) for at in (11, 16, 21, 26)]
    assert rows_of(text, windows, 10**6, 2)[:, 0].tolist() == list(range(11, 91, 5))
    assert rows_of(text, windows, 10, 2, begin=1).tolist() == [[1, 12, 13, 14, 15], [1, 17, 18, 19, 20]]
    for most, words in ((9, text), (50, text[:20])):
        with pytest.raises(LadderError, match="a fit takes 10 tokens at least, a batch of windows, behind the 11"):
            rows_of(words, windows, most, 2)


def looks(model: Any) -> list[Any]:
    """All that a scan may not leave changed, but for the tensors' values."""
    modules = [(type(module), module.training, {**vars(module)}) for module in model.modules()]
    return [
        modules,
        model.config,
        dict(vars(model.config)),
        model.name_or_path,
        list(model.base_model._forward_hooks.values()),
    ]


@pytest.mark.parametrize("name", ["llama", "falcon-sequential"])
@pytest.mark.parametrize("wiring", [None, "standard:2 ladder-2:2"])
def test_the_model_is_left_as_it_was(name: str, wiring: str | None, windows: Tensor) -> None:
    model = host(name).train()
    model.base_model.train(False)
    if wiring is not None:
        rewire(model, wiring)
    before, weights = looks(model), {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        said = model(windows).logits

    def interrupt(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    scan(model, windows, points=1)
    assert looks(model) == before
    with pytest.raises(KeyboardInterrupt):
        scan(model, windows, points=1, progress=interrupt)
    assert looks(model) == before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(windows).logits, said)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_original_that_is_wired_already(model: Any, windows: Tensor) -> None:
    """Its layers that have the row are not tried, and the damage counts from what it is."""
    wired = rewire(host("llama").double(), "standard:1 ladder:1 standard:2")
    found = scan(wired, windows, points=0)
    assert [damage.layers for damage in found.alone] == [(0,), (2,), (3,)]
    assert [damage.layers for damage in found.last] == [(3,), (2, 3), (0, 2, 3)]
    assert found.original.wiring == "standard:1 ladder:1 standard:2" and found.grown[-1].wiring == "ladder"
    other = rewire(host("llama").double(), "ladder")
    line = windows[:1]
    expected = distance(other, wired, line[0], window=12).kl.value
    assert scan(wired, line, points=1).grown[-1].kl == pytest.approx(expected, rel=1e-6)


def test_progress_counts_windows_and_each_round_computes_the_original_once(model: Any, windows: Tensor) -> None:
    told: list[tuple[int, int, str]] = []
    passes: list[int] = []
    hook = model.register_forward_pre_hook(lambda *_: passes.append(1))
    scan(model, windows, points=1, batch=2, progress=lambda *news: told.append(news))
    hook.remove()
    # 4 layers alone and the original; then 2 and 4 layers and the last 2 (1 is known already), and the original again
    assert len(passes) == 2 * (5 + 4)
    assert [news for news in told if news[0] == news[1]] == [(15, 15, "layers alone"), (9, 9, "growing sets")]


def test_sizes_and_windows() -> None:
    assert sizes(32, 8) == [1, 4, 8, 12, 16, 20, 24, 28, 32]
    assert sizes(7, 3) == [1, 3, 4, 5, 7] and sizes(4, 8) == [1, 2, 3, 4] and sizes(1, 8) == [1]
    assert sizes(5, 0) == [1, 2, 3, 4, 5] and sizes(9, 1) == [1, 5, 9]
    text = list(range(50, 61))
    assert windows_of(text, 5, 100).tolist() == [text[0:6], text[5:11]]
    assert windows_of(text, 5, 9).tolist() == [text[0:6]]
    assert windows_of(text, 5, 10, begin=1).tolist() == [[1, *text[1:6]], [1, *text[6:11]]]
    for most, words, sentence in ((4, text, "4 tokens are less than a window of 5"), (9, text[:5], "has 5 tokens")):
        with pytest.raises(LadderError, match=sentence):
            windows_of(words, 5, most)


def test_one_more_size(model: Any, windows: Tensor, found: Scan) -> None:
    few = scan(model, windows, points=1)
    assert [len(damage.layers) for damage in few.grown] == [1, 2, 4]
    more = extended(model, windows, few, 3)
    assert (more.grown, more.last) == (found.grown, found.last)
    assert extended(None, windows, more, 3) is more


def test_refused_scans(model: Any, windows: Tensor) -> None:
    cases: list[tuple[str, Any, Tensor, dict[str, Any]]] = [
        ("unknown wiring 'stairs'", model, windows, {"row": "stairs"}),
        ("damage of desync-2x depends on the number of ranks", model, windows, {"row": "desync-2x"}),
        ("damage of none depends", model, windows, {"row": "none"}),
        ("under standard already", model, windows, {"row": "ladder-0"}),
        ("points is -1", model, windows, {"points": -1}),
        ("batch is 0", model, windows, {"batch": 0}),
        ("windows must be [n, length]", model, windows[0], {}),
        ("windows must be [n, length]", model, windows[:, :1], {}),
        ("tokens go up to 108", model, windows * 0 + 108, {}),
        ("window is 80 tokens", model, windows[:, :1].repeat(1, 81), {}),
        ("a transformers model is needed", torch.nn.Linear(1, 1), windows, {}),
        ("its staleness is 0.5", rewire(host("llama"), "ladder", staleness=0.5), windows, {"row": "standard"}),
    ]
    for sentence, given, rows, options in cases:
        with pytest.raises(LadderError, match=re.escape(sentence)):
            scan(given, rows, **options)
    broken = host("llama")
    with torch.no_grad():
        broken.model.norm.weight.fill_(math.nan)
    with pytest.raises(LadderError, match="output is not finite"):
        scan(broken, windows)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint `m` with a tokenizer, and `text`."""
    folder = tmp_path_factory.mktemp("scan")
    tiny(folder / "m", context=64)
    (folder / "text").write_text(2 * WORDS)
    return folder


def test_json_lines(run: Run, folder: Path) -> None:
    arguments = ["--data", folder / "text", "--window", 16, "--tokens", 50, "--points", 1, "--json"]
    wishes = ["--budget", 1e-6, "--speed", 1.1, "--tp", 4, "--chip", "h200", "--link", "50us,10GB/s", "--requests", 2]
    status, out, err = run("scan", folder / "m", *arguments, *wishes)
    assert (status, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    # of sizes 1, 2 and 4 none is the smallest that is fast enough: 3 was measured besides
    assert [line["kind"] for line in lines] == ["alone"] * 4 + ["grown"] * 4 + ["last"] * 4 + ["proposal"]
    here = machine(torch.device("cpu"))
    keys = {"kind", "layers", "wiring", "kl", "kl_stderr", "perplexity", "perplexity_stderr", "agreement"}
    for line in lines:
        wish = {"budget", "over_budget", "speed", "predicted_speed"} if line["kind"] == "proposal" else set()
        assert set(line) == keys | {"model", "tokens", "fit_tokens", "original_perplexity"} | wish | here.keys()
        assert (line["model"], line["tokens"]) == (str(folder / "m"), 48) and here.items() <= line.items()
    model = AutoModelForCausalLM.from_pretrained(folder / "m")
    tokens = byte_tokenizer()(2 * WORDS)["input_ids"]
    found = scan(model, windows_of(tokens, 16, 50), points=0)
    for line, damage in zip(lines, (*found.alone, *found.grown, *found.last), strict=False):
        assert line["layers"] == list(damage.layers) and line["wiring"] == damage.wiring
        assert line["kl"] == pytest.approx(damage.kl, rel=1e-5)
        assert line["original_perplexity"] == pytest.approx(found.original.perplexity, rel=1e-5)
    proposal = lines[-1]
    predicted = Machine("h200", 4, "50us,10GB/s", 2).predictor(replace(ModelConfig.named("tiny"), context=64))
    smallest = next(d for d in found.grown if predicted(Wiring.parse(d.wiring, 4)) >= 1.1)
    assert len(proposal["layers"]) == len(smallest.layers) == 3
    assert proposal["predicted_speed"] == pytest.approx(predicted(Wiring.parse(proposal["wiring"], 4)))
    assert proposal["predicted_speed"] >= 1.1
    assert proposal["over_budget"] == pytest.approx(proposal["kl"] - 1e-6)


def test_fitted_sets(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "long").write_text(20 * WORDS)
    arguments = ["--data", tmp_path / "long", "--window", 16, "--tokens", 64, "--points", 1, "--batch", 16]
    found = {}
    for fit in ([], ["--fit", 1300]):
        status, out, err = run("scan", folder / "m", *arguments, *fit, "--json")
        assert (status, err) == (0, "")
        found[len(fit)] = [json.loads(line) for line in out.splitlines()]
    assert {line["fit_tokens"] for line in found[2]} == {1280} and {line["fit_tokens"] for line in found[0]} == {0}
    assert found[2][-1]["kl"] < 0.9 * found[0][-1]["kl"] and found[2][-1]["wiring"] == "ladder"
    status, out, err = run("scan", folder / "m", *arguments, "--fit", 1300, "--budget", found[2][-1]["kl"] * 1.01)
    assert (status, err) == (0, "") and "fitted on 1280 tokens, not trained" in out and '--wiring "ladder"' in out


def test_a_budget_measures_the_sizes_between(run: Run, folder: Path, tmp_path: Path) -> None:
    """The largest set of all is proposed, whether or not its size was among the points."""
    config = replace(ModelConfig.named("tiny"), layers=12, windows=(), wiring=Wiring(()), context=64)
    save(load(Decoder(config), Random(seed=5, deviation=0.1)), tmp_path / "m")
    byte_tokenizer().save_pretrained(tmp_path / "m")
    scanned = ["scan", tmp_path / "m", "--data", folder / "text", "--window", 16, "--tokens", 32]

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
            assert [len(line["layers"]) for line in found[kind]] == sorted({*sizes(12, points), *measured})
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
    scanned = ["scan", folder / "m", "--window", 12, "--points", 1, "--json", "--field", "body", "--data"]
    plain, found = (run(*scanned, tmp_path / file) for file in ("plain", name))
    assert found == plain and found[0] == 0
    assert json.loads(found[1].splitlines()[0])["tokens"] == (len("\n\n\n".join(texts)) - 1) // 12 * 12
    assert run(*scanned, tmp_path / name, "--tokens", 12) == run(*scanned, tmp_path / "plain", "--tokens", 12)


def test_tables_a_picture_and_a_pattern_to_paste(run: Run, folder: Path, tmp_path: Path) -> None:
    arguments = ["scan", folder / "m", "--data", folder / "text", "--window", 16, "--tokens", 32, "--points", 1]
    status, out, err = run(*arguments, "--budget", 1e9, "--wiring", "parallel", "--plot", tmp_path / "scan.png")
    assert (status, err) == (0, "")
    assert out.startswith("m, standard: perplexity ") and "one layer" in out and "growing sets" in out
    assert '--wiring "parallel"\n' in out and "proposed: 4 layers" in out
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
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    speed = ["--speed", 1.1, "--tp", 2]
    cases: list[tuple[str, Any, list[Any]]] = [
        ("neither a directory nor the name", folder / "nobody", []),
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
        ("the text has 10 tokens, a window of 64 needs 65", None, ["--data", tmp_path / "short"]),
        ("window is 65 tokens", None, ["--window", 65]),
        ("50 tokens are less than a window of 64", None, ["--tokens", 50]),
        ("tokens is 0", None, ["--tokens", 0]),
        ("batch is 0", None, ["--batch", 0]),
        ("points is -1", None, ["--points", -1]),
        ("fit is 0", None, ["--fit", 0]),
        ("a fit takes 512 tokens at least, a batch of windows, behind the", None, ["--fit", 511]),
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
        ("there is no folder", None, ["--plot", tmp_path / "nowhere" / "scan.png"]),
        ("let it end with .png", None, ["--plot", tmp_path / "scan"]),
    ]
    for sentence, model, arguments in cases:
        data = [] if "--data" in arguments else ["--data", folder / "text"]
        status, out, err = run("scan", model or folder / "m", *data, *arguments)
        assert (status, out) == (2, ""), sentence
        assert sentence in err and err.startswith("ladder: ") and err.count("\n") == 1, err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run("scan", folder / "m", "--data", folder / "text", "--plot", tmp_path / "scan.png")
    assert (status, err) == (2, "ladder: pictures need matplotlib: pip install 'ladder-residual[plot]'\n")
