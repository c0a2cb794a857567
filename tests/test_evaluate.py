"""Evaluation side by side: every form of task against scores by hand, differences and their errors."""

import importlib
import json
import math
import re
from collections.abc import Iterator
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from ladder.hf import rewire
from ladder.hf.evaluate import Arm, evaluate, table
from ladder.hf.measures import perplexity
from tests.checkpoints import byte_tokenizer, tiny
from tests.naive import NATS, WORDS, clustered, naive, said

module = importlib.import_module("ladder.hf.evaluate")


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
    assert row["value"] == pytest.approx(values["ladder"], rel=NATS)
    changes = [  # the delta method
        values["ladder"] * a - values["standard"] * b
        for a, b in zip(hands["ladder"]["last/ll"], hands["standard"]["last/ll"], strict=True)
    ]
    assert row["difference"] == pytest.approx(values["ladder"] - values["standard"], rel=NATS)
    assert row["difference_stderr"] == pytest.approx(error(changes), rel=NATS)

    for name in ("named", "filed"):
        accuracy = hands["ladder"]["mc/acc"][:2]
        assert cells["ladder", f"{name}/acc"]["value"] == pytest.approx(sum(accuracy) / 2)
        assert f"{name}/mcc" in {row["measure"] for row in found}

    tokens = list(byte_tokenizer()(WORDS)["input_ids"])
    ours, source = models["ladder"], models["standard"]
    windows, base = naive([ours, source], tokens, 20), naive([source, source], tokens, 20)
    for measure, column in (("kl", 1), ("greedy_agreement", 2)):
        row = cells["ladder", measure]
        assert row["value"] == pytest.approx(clustered(windows, column)[0], rel=NATS)
        assert row["difference_stderr"] == pytest.approx(clustered(windows, column)[1], rel=NATS)  # the first has none
    changes = weighted_changes(windows, base)
    row = cells["ladder", "perplexity"]
    assert row["difference_stderr"] == pytest.approx(changes, rel=NATS)
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
    console = Console(file=out, width=200)
    console.print(table(found, console))
    shown = out.getvalue()
    assert re.search(r"kl .* 0 .*\d ± 0\.\d+ .*\+\d\.\d+ ± 0\.\d+", shown) and "*" not in shown.split("└")[0]
    # where that does not fit every figure is there all the same, a line for each arm
    figures = set(re.findall(r"\+?\d\S* ± \d\S*", shown))
    out.truncate(out.seek(0))
    narrow = Console(file=out, width=88)
    narrow.print(table(found, narrow))
    assert figures and set(re.findall(r"\+?\d\S* ± \d\S*", out.getvalue())) == figures and "…" not in out.getvalue()
    assert len(re.findall(r"(?m)^│ kl ", out.getvalue())) == 1 and re.search(r"│ ladder .* \+\d", out.getvalue())


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
    assert found["value"] == pytest.approx(math.exp(-sum(scores) / 2), rel=NATS)
    pair = write(tmp_path / "pair.jsonl", rows[:2])  # each is the other's only example
    (found, *_) = evaluate([Arm(str(directory))], tasks=[pair], shots=1)
    scores = [likelihood(models["standard"], f"{two} b\n\n{one}", "b")[0] for one, two in (("a", "c"), ("c", "a"))]
    assert found["value"] == pytest.approx(math.exp(-sum(scores) / 2), rel=NATS)


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
    console = Console(file=out, width=200)
    console.print(table([_, row], console))
    assert re.search(r"perplexity .* \* ", out.getvalue())
