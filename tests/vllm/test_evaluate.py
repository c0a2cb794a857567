"""`ladder eval --engine vllm`: lm-eval's tasks on vLLM give what they give in transformers."""

import json
from pathlib import Path

import pytest

import ladder.hf  # noqa: F401  (which reads wired models)
from ladder.checkpoint import Random, load, save
from ladder.errors import LadderError
from ladder.hf.evaluate import Arm, evaluate
from ladder.model import Decoder
from ladder.vllm.evaluate import on_vllm
from tests.checkpoints import byte_tokenizer
from tests.vllm.references import config

ROWS = [
    {"query": f"The {word} of the", "choices": [" house", " river", " end"], "gold": number % 3}
    for number, word in enumerate(("colour", "shape", "size", "sound", "weight", "age"))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "mine"
    save(load(Decoder(config("llama").rewired("ladder")), Random(seed=5, deviation=0.15)), directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def test_tasks_agree(model: Path, tmp_path: Path) -> None:
    task = tmp_path / "mine.jsonl"
    task.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    arms = [Arm(str(model)), Arm(str(model), "parallel-1")]
    expected = evaluate(arms, tasks=[task], dtype="float32")
    found = evaluate(arms, tasks=[task], dtype="float32", engine=on_vllm(1, "float32"))
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert {key: one[key] for key in ("model", "wiring", "measure", "value", "n")} == {
            key: other[key] for key in ("model", "wiring", "measure", "value", "n")
        }


def test_texts_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(LadderError, match="in transformers only"):
        evaluate([Arm(str(model))], text=tmp_path / "text", engine=on_vllm(1, "float32"))
