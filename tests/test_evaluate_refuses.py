"""What `evaluate` refuses: each with one sentence, and before any model is loaded."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.errors import LadderError, install
from ladder.hf.evaluate import Arm, evaluate
from ladder.hf.load import reason
from tests.checkpoints import byte_tokenizer, tiny
from tests.naive import WORDS
from tests.test_evaluate import CHOICES, write

module = importlib.import_module("ladder.hf.evaluate")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("standard"), context=64)


def test_refused_models(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with one sentence, and before any model is loaded."""
    monkeypatch.setattr(module, "_load", None)
    text, empty, short, binary, packed = (tmp_path / name for name in ("text", "empty", "short", "binary", "a.xz"))
    packed.write_text(WORDS)
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
        ("there is no such directory", [Arm(str(tmp_path / "nobody"))], {"text": text}),
        ("no model 'nobody': there is no such directory, and one of the hub", [Arm("nobody")], {"text": text}),
        ("cannot be read", arm, {"text": packed}),
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
    with pytest.raises(LadderError, match=re.escape(install("eval"))):
        evaluate([Arm(str(checkpoint))], tasks=[write(tmp_path / "mc.jsonl", CHOICES)])


def test_a_reason_is_no_half_sentence() -> None:
    assert (
        reason(ValueError("no tokenizer from one of:\n  (1) a file\n  (2) a list"))
        == "no tokenizer from one of: (1) a file (2) a list"
    )
    assert (reason(ValueError("first\nsecond")), reason(ValueError())) == ("first", "ValueError")
