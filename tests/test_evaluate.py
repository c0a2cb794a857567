"""Evaluation: measures against naive ones in float64, every form of task against scores by hand, what is refused."""

import importlib
import json
import math
import re
import sys
from collections.abc import Iterator
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM

from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.evaluate import Arm, evaluate, table
from ladder.hf.measures import Estimate, begin_of, distance, perplexity
from tests.checkpoints import END, byte_tokenizer, tiny

module = importlib.import_module("ladder.hf.evaluate")
WORDS = "The ladder waits for nobody, and nobody waits for the ladder: each rung is read while the next one travels. "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("standard"), context=64)


@pytest.fixture(scope="module")
def models(checkpoint: Path) -> dict[str, Any]:
    """The same weights under two wirings."""
    load = AutoModelForCausalLM.from_pretrained
    return {wiring: rewire(load(checkpoint).eval(), wiring) for wiring in ("standard", "ladder")}


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return list(byte_tokenizer()(WORDS)["input_ids"])


def said(model: Any, line: list[int]) -> Tensor:
    """Log-probabilities after each token of a line, in float64."""
    with torch.no_grad():
        return model(torch.tensor([line])).logits[0].double().log_softmax(-1)  # type: ignore[no-any-return]


def naive(models: list[Any], tokens: list[int], window: int, begin: int | None = None) -> list[list[list[float]]]:
    """For each window: the positions' (surprise of the first model, KL from the second, agreement)."""
    found = []
    for start in range(0, len(tokens) - 1, window):
        line = tokens[start : min(start + window, len(tokens) - 1)]
        model, source = (said(each, [line[0] if begin is None else begin, *line[1:]]) for each in models)
        rows = []
        for at in range(len(line)):
            apart = sum(float(p.exp() * (p - q)) for p, q in zip(source[at], model[at], strict=True))
            same = float(int(source[at].argmax()) == int(model[at].argmax()))
            rows.append([-float(model[at, tokens[start + at + 1]]), apart, same])
        found.append(rows)
    return found


def clustered(windows: list[list[list[float]]], column: int) -> tuple[float, float | None]:
    """Mean over tokens, and its standard error with windows as clusters."""
    sums, counts = [sum(row[column] for row in rows) for rows in windows], [len(rows) for rows in windows]
    mean, m = sum(sums) / sum(counts), len(windows)
    squares = sum((s - mean * c) ** 2 for s, c in zip(sums, counts, strict=True))
    return mean, math.sqrt(m / (m - 1) * squares) / sum(counts) if m > 1 else None


@pytest.mark.parametrize(("window", "begin"), [(1, None), (7, None), (16, END), (36, None), (64, None), (64, END)])
def test_measures_against_naive(models: dict[str, Any], tokens: list[int], window: int, begin: int | None) -> None:
    ours, source = models["ladder"], models["standard"]
    tokens = tokens[:60] if window == 64 else tokens  # shorter than the window
    windows = naive([ours, source], tokens, window, begin)
    surprise, kl, same = (clustered(windows, column) for column in range(3))
    value = math.exp(surprise[0])
    expected = [(value, None if surprise[1] is None else value * surprise[1]), kl, same]
    assert kl[0] > 0.1 and same[0] < 1  # the wirings differ
    for batch in (1, 2, 5, 100):
        found = distance(ours, source, tokens, window=window, batch=batch, begin=begin)
        alone = perplexity(ours, tokens, window=window, batch=batch, begin=begin)
        assert alone.value == pytest.approx(found.perplexity.value, rel=1e-6)
        for estimate, (mean, error) in zip(found, expected, strict=True):
            assert estimate.n == len(tokens) - 1
            assert estimate.value == pytest.approx(mean, rel=1e-6, abs=1e-9)
            assert estimate.stderr == (None if error is None else pytest.approx(error, rel=1e-5, abs=1e-9))


def test_default_window_is_the_context(models: dict[str, Any], tokens: list[int]) -> None:
    assert perplexity(models["ladder"], tokens).value == perplexity(models["ladder"], tokens, window=64).value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_no_distance_from_itself(checkpoint: Path, tokens: list[int], dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).train()
    found = distance(model, model, tokens, window=20)
    assert (found.kl.value, found.kl.stderr) == (0, 0)
    assert (found.agreement.value, found.agreement.stderr) == (1, 0)
    assert model.training  # as it came


def test_progress_and_logits_one_batch_at_a_time(models: dict[str, Any], tokens: list[int]) -> None:
    told: list[tuple[int, int]] = []
    widths: list[tuple[int, ...]] = []
    hook = models["ladder"].register_forward_pre_hook(
        lambda _, __, named: widths.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    perplexity(models["ladder"], tokens, window=25, batch=2, progress=lambda *news: told.append(news))
    hook.remove()
    assert widths == [(2, 25), (2, 25), (1, (len(tokens) - 1) % 25)]  # the short window unpadded
    assert told == [(2, 5), (4, 5), (5, 5)]


def test_begin_of_a_tokenizer() -> None:
    assert begin_of(byte_tokenizer()) is None
    assert begin_of(byte_tokenizer(extra=2, begin=True)) == 258


def test_estimates() -> None:
    items = [0.0, 1.0, 1.0, 0.0, 1.0]
    mean = Estimate.mean(items)
    assert (mean.value, mean.n) == (0.6, 5)
    assert mean.stderr == pytest.approx(math.sqrt(0.3 / 5))  # sample variance over n
    knife = Estimate.jackknife(items, lambda some: sum(some) / len(some))
    assert knife.value == mean.value and knife.stderr == pytest.approx(mean.stderr)
    other = Estimate.mean([1.0, 1.0, 1.0, 0.0, 0.0])
    difference, error, paired = mean.minus(other)
    assert (difference, paired) == (0, True) and error == pytest.approx(math.sqrt(0.5 / 5))
    loose = Estimate(0.5, 0.3, 9).minus(Estimate(0.1, 0.4, 9))
    assert loose == (0.4, 0.5, False)
    assert Estimate.mean([1.0]).stderr is None and Estimate.jackknife([1.0], max).stderr is None


CHOICES = [
    {"query": "Question: who waits?", "choices": ["nobody", "the whole network", "a rank or two"], "gold": 0},
    {"query": "Never", "choices": ["wait", "stop reading the stream"], "gold": 1, "note": "more keys do no harm"},
    {"query": "The next ", "choices": ["rung", "sum", "the very last of them"], "gold": 1},
    {"query": "2020-01-01", "choices": ["was a day", "is"], "gold": 0},
]
CONTEXTS = [
    {"contexts": ["It was the ladder", "It was a network, and it"], "continuation": "that waited.", "gold": 0},
    {"contexts": ["She", "He", "They"], "continuation": "read it", "gold": 2},
    {"contexts": ["left", "right"], "continuation": "is not wrong", "gold": 1},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return path


def likelihood(model: Any, context: str, continuation: str) -> tuple[float, bool]:
    """Of a continuation after one space, and whether greedy decoding gives it; one token per byte."""
    before, after = context.encode(), b" " + continuation.encode()
    line = byte_tokenizer()((before + after).decode())["input_ids"]
    logs = said(model, line)
    at = range(len(before) - 1, len(line) - 1)
    return sum(float(logs[i, line[i + 1]]) for i in at), all(int(logs[i].argmax()) == line[i + 1] for i in at)


def by_hand(model: Any, last: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Each measure's value per item."""
    found: dict[str, list[float]] = {key: [] for key in ("mc/acc", "mc/acc_norm", "wg/acc", "last/acc", "last/ll")}
    for row in CHOICES:
        scores = [likelihood(model, str(row["query"]).rstrip(), extra(row) + choice)[0] for choice in row["choices"]]
        long = [score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)]
        found["mc/acc"].append(float(scores.index(max(scores)) == row["gold"]))
        found["mc/acc_norm"].append(float(long.index(max(long)) == row["gold"]))
    for row in CONTEXTS:
        scores = [likelihood(model, context, row["continuation"])[0] for context in row["contexts"]]
        found["wg/acc"].append(float(scores.index(max(scores)) == row["gold"]))
    for row in last:
        score, greedy = likelihood(model, row["context"], row["continuation"])
        found["last/acc"].append(float(greedy))
        found["last/ll"].append(score)
    return found


def extra(row: dict[str, Any]) -> str:
    """A space at the end of the context goes to the continuation: of two, `likelihood` puts the first."""
    return " " if row["query"].endswith(" ") else ""


def error(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


YAML = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
  cache_dir: {cache}
output_type: multiple_choice
test_split: test
doc_to_text: query
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: mcc, aggregation: matthews_corrcoef, higher_is_better: true}}
"""


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever looks for the network fails the test, even where the failure is swallowed."""
    asked: list[Any] = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *address, **_: asked.append(address))
    monkeypatch.setattr("socket.socket.connect", lambda *address, **_: asked.append(address))
    yield
    assert not asked


@pytest.mark.usefixtures("offline")
def test_two_wirings_side_by_side(
    checkpoint: Path,
    models: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(WORDS)
    last = [
        greedy_row(models["ladder"]),
        {"context": "Never wait", "continuation": "long"},
        {"context": "Nobody", "continuation": "x"},
    ]
    rows = write(tmp_path / "mc.jsonl", CHOICES)
    folder = tmp_path / "tasks"
    folder.mkdir()
    plain = [{key: row[key] for key in ("query", "choices", "gold")} for row in CHOICES[:2]]
    data = write(tmp_path / "data.jsonl", plain)
    for name, path in (("named", folder / "a.yaml"), ("filed", tmp_path / "b.yaml")):
        path.write_text(YAML.format(name=name, data=data, cache=tmp_path / "cache"))
    told: list[tuple[int, int, str]] = []
    found = evaluate(
        [Arm(str(checkpoint)), Arm(str(checkpoint), "ladder")],
        tasks=[
            *(rows, write(tmp_path / "wg.jsonl", CONTEXTS), write(tmp_path / "last.jsonl", last)),
            *("named", str(tmp_path / "b.yaml")),
        ],
        text=text,
        source=str(checkpoint),
        batch=3,
        window=20,
        tasks_dir=folder,
        progress=lambda *news: told.append(news),
    )
    cells = {(row["wiring"], row["measure"]): row for row in found}
    hands = {wiring: by_hand(model, last) for wiring, model in models.items()}
    for measure in ("mc/acc", "mc/acc_norm", "wg/acc", "last/acc"):
        mine, first = hands["ladder"][measure], hands["standard"][measure]
        row = cells["ladder", measure]
        assert row["value"] == pytest.approx(sum(mine) / len(mine)) and row["n"] == len(mine)
        assert row["stderr"] == pytest.approx(error(mine))
        assert cells["standard", measure]["value"] == pytest.approx(sum(first) / len(first))
        changes = [a - b for a, b in zip(mine, first, strict=True)]
        assert row["difference"] == pytest.approx(sum(changes) / len(changes), abs=1e-12)
        assert row["difference_stderr"] == pytest.approx(error(changes)) and row["paired"] is True
    assert cells["ladder", "last/acc"]["value"] == pytest.approx(1 / 3)  # the greedy one
    values = {w: math.exp(-sum(hand["last/ll"]) / len(last)) for w, hand in hands.items()}
    row = cells["ladder", "last/perplexity"]
    assert row["value"] == pytest.approx(values["ladder"], rel=1e-4)
    changes = [  # the delta method
        values["ladder"] * a - values["standard"] * b
        for a, b in zip(hands["ladder"]["last/ll"], hands["standard"]["last/ll"], strict=True)
    ]
    assert row["difference"] == pytest.approx(values["ladder"] - values["standard"], rel=1e-4)
    assert row["difference_stderr"] == pytest.approx(error(changes), rel=1e-4)

    for name in ("named", "filed"):
        accuracy = hands["ladder"]["mc/acc"][:2]
        assert cells["ladder", f"{name}/acc"]["value"] == pytest.approx(sum(accuracy) / 2)
        assert f"{name}/mcc" in {row["measure"] for row in found}

    tokens = list(byte_tokenizer()(WORDS)["input_ids"])
    ours, source = models["ladder"], models["standard"]
    windows, base = naive([ours, source], tokens, 20), naive([source, source], tokens, 20)
    for measure, column in (("kl", 1), ("greedy_agreement", 2)):
        row = cells["ladder", measure]
        assert row["value"] == pytest.approx(clustered(windows, column)[0], rel=1e-5)
        assert row["difference_stderr"] == pytest.approx(clustered(windows, column)[1], rel=1e-4)  # the first has none
    changes = weighted_changes(windows, base)
    row = cells["ladder", "perplexity"]
    assert row["difference_stderr"] == pytest.approx(changes, rel=1e-4)
    assert row["difference_stderr"] != pytest.approx(
        math.hypot(row["stderr"], cells["standard", "perplexity"]["stderr"])
    )
    assert (cells["standard", "kl"]["value"], cells["standard", "greedy_agreement"]["value"]) == (0, 1)
    assert cells["standard", "kl"]["difference"] is None and cells["standard", "kl"]["paired"] is None

    assert (6, 6, f"{checkpoint.name} ladder: text") in told
    assert (10, 10, f"{checkpoint.name} standard: mc") in told
    assert capfd.readouterr() == ("", "") and not caplog.records
    json.dumps(found, allow_nan=False)
    out = StringIO()
    Console(file=out, width=200).print(table(found))
    shown = out.getvalue()
    assert re.search(r"kl .* 0 .*\d ± 0\.\d+ .*\+\d\.\d+ ± 0\.\d+", shown) and "*" not in shown.split("└")[0]


def weighted_changes(windows: list[list[list[float]]], base: list[list[list[float]]]) -> float:
    """Standard error of a difference of two perplexities, from the windows' differences."""
    total, m = sum(len(rows) for rows in windows), len(windows)
    means = [clustered(each, 0)[0] for each in (windows, base)]
    shares = []
    for pair in zip(windows, base, strict=True):
        one, two = (
            math.exp(mean) * (sum(row[0] for row in rows) - mean * len(rows)) / total
            for mean, rows in zip(means, pair, strict=True)
        )
        shares.append(one - two)
    return math.sqrt(m / (m - 1) * sum(share**2 for share in shares))


def greedy_row(model: Any) -> dict[str, Any]:
    """A context that greedy decoding goes on with a space and a letter; of random weights one in a thousand has it."""
    tokenizer = byte_tokenizer()
    contexts = ["".join(letters) for letters in product("abcdefghijklmnop", repeat=3)]
    lines = torch.tensor(tokenizer(contexts)["input_ids"])
    with torch.no_grad():
        for _ in range(2):
            lines = torch.cat([lines, model(lines).logits[:, -1:].argmax(-1)], dim=1)
    texts = [(context, tokenizer.decode(line[-2:])) for context, line in zip(contexts, lines, strict=True)]
    context, text = next((c, t) for c, t in texts if re.fullmatch(" [!-~]", t))
    return {"context": context, "continuation": text[1:]}


def test_refused_models(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with one sentence, and before any model is loaded."""
    monkeypatch.setattr(module, "_load", None)
    text, empty, short, binary = (tmp_path / name for name in ("text", "empty", "short", "binary"))
    text.write_text(WORDS)
    empty.write_text(" \n")
    short.write_text("a")
    binary.write_bytes(b"\xff\xfe\x00")
    other = tiny(tmp_path / "other", vocab=400)
    bare = tiny(tmp_path / "bare", tokenizer=False)
    narrow = tiny(tmp_path / "narrow", vocab=300)
    byte_tokenizer(extra=50).save_pretrained(narrow)
    arm = [Arm(str(checkpoint))]
    cases: list[tuple[str, list[Arm], dict[str, Any]]] = [
        ("nothing to measure", [], {"text": text}),
        ("nothing to measure", arm, {}),
        ("measured on a text", arm, {"tasks": ["x"], "source": str(checkpoint)}),
        ("named twice", [*arm, Arm(str(checkpoint), "standard")], {"text": text}),
        ("unknown wiring 'stairs'", [Arm(str(checkpoint), "stairs")], {"text": text}),
        ("covers 3 layers", [Arm(str(checkpoint), "ladder:3")], {"text": text}),
        ("no such file", arm, {"text": tmp_path / "missing"}),
        ("is empty", arm, {"text": empty}),
        ("at least 2 are needed", arm, {"text": short}),
        ("cannot be read", arm, {"text": binary}),
        ("window is 65 tokens", arm, {"text": text, "window": 65}),
        ("window is 0 tokens", arm, {"text": text, "window": 0}),
        ("batch is 0", arm, {"text": text, "batch": 0}),
        ("limit is 0", arm, {"text": text, "limit": 0}),
        ("shots is -1", arm, {"text": text, "shots": -1}),
        ("unknown dtype 'int4'", arm, {"text": text, "dtype": "int4"}),
        ("unknown device 'abacus'", arm, {"text": text, "device": "abacus"}),
        ("same vocabulary", arm, {"text": text, "source": str(other)}),
        ("neither a directory", [Arm(str(tmp_path / "nobody"))], {"text": text}),
        ("cannot be loaded", [Arm(str(bare))], {"text": text}),
        ("ids go up to 306, the model has 300", [Arm(str(narrow))], {"text": text}),
        ("no such file", arm, {"tasks": [tmp_path / "missing.jsonl"]}),
        ("no such file", arm, {"tasks": [tmp_path / "missing.yaml"]}),
        ("no such directory of tasks", arm, {"tasks": ["x"], "tasks_dir": tmp_path / "missing"}),
    ]
    if not torch.cuda.is_available():
        cases.append(("is not there: this machine has 0 CUDA devices", arm, {"text": text, "device": "cuda"}))
    for sentence, arms, options in cases:
        with pytest.raises(LadderError, match=re.escape(sentence)):
            evaluate(arms, **options)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: a row of no known form"),
        ('{"query": "q", "choices": ["a", "b"]}', "line 2: a row of no known form"),
        ('{"context": "c", "continuation": "d"}', "line 2: has context, continuation, the lines before have query"),
        ('{"query": "q", "choices": ["a"], "gold": 0}', "line 2: choices must be two or more texts"),
        ('{"query": "q", "choices": ["a", ""], "gold": 0}', "line 2: choices must be two or more texts"),
        ('{"query": "q", "choices": "ab", "gold": 0}', "line 2: choices must be two or more texts"),
        ('{"query": 3, "choices": ["a", "b"], "gold": 0}', "line 2: query must be a text"),
        ('{"query": "q", "choices": ["a", "b"], "gold": 2}', "line 2: gold must be a number from 0 to 1"),
        ('{"query": "q", "choices": ["a", "b"], "gold": true}', "line 2: gold must be a number from 0 to 1"),
        ('{"query": "q", "choices": ["a", "b"], "gold": "a"}', "line 2: gold must be a number from 0 to 1"),
    ],
)
def test_refused_rows(checkpoint: Path, tmp_path: Path, row: str, sentence: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"query": "q", "choices": ["a", "b"], "gold": 1}\n' + row + "\n")
    with pytest.raises(LadderError, match=re.escape(sentence)):
        evaluate([Arm(str(checkpoint))], tasks=[path])


def test_refused_tasks(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks._index import TaskIndex

    # of lm-eval's thousands of files a few: reading all takes half a minute
    monkeypatch.setattr(TaskIndex, "_iter_yaml_files", staticmethod(lambda root: sorted(root.glob("hellaswag/*.yaml"))))
    monkeypatch.setattr(module, "_load", None)
    arm = [Arm(str(checkpoint))]
    with pytest.raises(LadderError, match="unknown task 'helaswag': similar ones are hellaswag"):
        evaluate(arm, tasks=["helaswag"])
    rows = write(tmp_path / "mc.jsonl", CHOICES)
    with pytest.raises(LadderError, match="two tasks are called mc"):
        evaluate(arm, tasks=[rows, rows])
    broken = tmp_path / "broken.yaml"
    broken.write_text("dataset_path: json\n")
    with pytest.raises(LadderError, match=r"broken\.yaml cannot be loaded"):
        evaluate(arm, tasks=[broken])


def test_without_lm_eval(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    with pytest.raises(LadderError, match=re.escape("pip install 'ladder-residual[eval]'")):
        evaluate([Arm(str(checkpoint))], tasks=[write(tmp_path / "mc.jsonl", CHOICES)])


def test_limit_shots_and_a_tokenizer_without_an_end(models: dict[str, Any], tmp_path: Path) -> None:
    directory = tiny(tmp_path / "model", context=64)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(directory)
    rows = [{"context": text, "continuation": "b"} for text in ("a", "c", "e")]
    task = write(tmp_path / "last.jsonl", rows)
    (found, *_) = evaluate([Arm(str(directory))], tasks=[task], limit=2)
    scores = [likelihood(models["standard"], row["context"], "b")[0] for row in rows[:2]]
    assert found["measure"] == "last/perplexity" and found["n"] == 2
    assert found["value"] == pytest.approx(math.exp(-sum(scores) / 2), rel=1e-4)
    pair = write(tmp_path / "pair.jsonl", rows[:2])  # each is the other's only example
    (found, *_) = evaluate([Arm(str(directory))], tasks=[pair], shots=1)
    scores = [likelihood(models["standard"], f"{two} b\n\n{one}", "b")[0] for one, two in (("a", "c"), ("c", "a"))]
    assert found["value"] == pytest.approx(math.exp(-sum(scores) / 2), rel=1e-4)


def test_wirings_that_checkpoints_name(models: dict[str, Any], tokens: list[int], tmp_path: Path) -> None:
    """Ours, and the paper's `ladder_layers` in a config that transformers itself takes for a plain one."""
    text = tmp_path / "text"
    text.write_text(WORDS)
    ours, papers = tiny(tmp_path / "ours", "ladder", context=64), tiny(tmp_path / "papers", context=64)
    config = json.loads((papers / "config.json").read_text())
    (papers / "config.json").write_text(json.dumps({**config, "ladder_layers": 4}))
    rows = evaluate([Arm(str(ours)), Arm(str(papers)), Arm(str(papers), "standard")], text=text)
    assert [row["wiring"] for row in rows] == ["ladder", "ladder", "standard"]
    expected = [perplexity(models[row["wiring"]], tokens).value for row in rows]
    assert [row["value"] for row in rows] == pytest.approx(expected, rel=1e-6)
    assert rows[1]["difference_stderr"] == 0 and rows[2]["difference_stderr"] > 0


def test_other_tokens_are_not_paired(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(WORDS)
    plain, begun = tiny(tmp_path / "plain", context=64), tiny(tmp_path / "begun", context=64)
    byte_tokenizer(extra=1, begin=True).save_pretrained(begun)
    _, row = evaluate([Arm(str(plain)), Arm(str(begun))], text=text)
    assert row["paired"] is False and row["n"] == len(WORDS)
    out = StringIO()
    Console(file=out, width=200).print(table([_, row]))
    assert re.search(r"perplexity .* \* ", out.getvalue())
