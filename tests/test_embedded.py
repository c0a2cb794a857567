"""The model inside the package: small, wired, with a tokenizer of its own, and it has learned English."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ladder import LLM, SamplingParams
from ladder.config import ModelConfig
from ladder.engine.options import EMBEDDED
from ladder.engine.text import load_tokenizer
from ladder.errors import LadderError
from ladder.hf.measures import perplexity

TEXT = (
    "When the rain had stopped, the two children went down to the river to look for the boat which their father had "
    "left there in the evening. The water was high, and the bridge was gone. They stood for a long time without "
    "a word, and then the elder said that they must go home and tell their mother what had happened."
)


def test_what_is_shipped() -> None:
    config = ModelConfig.from_directory(EMBEDDED)
    assert sum(file.stat().st_size for file in EMBEDDED.iterdir()) <= 25e6
    assert config.heads == 8 and set(config.wiring.layers) == {"ladder"} and config.degrees() == [1, 2, 4, 8]
    assert "CC BY-SA" in (EMBEDDED / "README.md").read_text(encoding="utf-8")  # where its text came from


@pytest.mark.parametrize("model", ["ladder", "llama", "qwen2", None])
@pytest.mark.parametrize("kind", ["TokenizersBackend", "PreTrainedTokenizerFast"])
def test_tokenizers_are_those_that_transformers_would_choose(kind: str, model: str | None, tmp_path: Path) -> None:
    """Where the class is known without asking AutoTokenizer; of Qwen2 it knows better than the checkpoint."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, tmp_path)
    said = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**said, "tokenizer_class": kind}))
    if model is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    found, wanted = load_tokenizer(tmp_path, 1 << 20), AutoTokenizer.from_pretrained(tmp_path)
    assert found is not None and type(found) is type(wanted) and found.get_vocab() == wanted.get_vocab()
    for text in ("It was a dark and stormy night;\n\n the rain", "<|end|> naïve \u6f22  x\t 1234"):
        assert found(text)["input_ids"] == wanted(text)["input_ids"]
        assert found.decode(found(text)["input_ids"]) == wanted.decode(wanted(text)["input_ids"])


@pytest.mark.parametrize("said", ["", "[1]", "{"])
def test_a_broken_tokenizer_is_told(said: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(said)
    with pytest.raises(LadderError, match=r"the tokenizer in .* cannot be read"):
        load_tokenizer(tmp_path, 4096)


def test_it_has_learned_english() -> None:
    """Words in their order are far likelier than the same words in another, and none are out of the vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    words = TEXT.split()
    random.Random(1).shuffle(words)
    ordered, shuffled = (perplexity(model, tokenizer(text)["input_ids"]).value for text in (TEXT, " ".join(words)))
    assert ordered < 40 < 5 * ordered < shuffled
    assert ordered == pytest.approx(perplexity(model, tokenizer(TEXT)["input_ids"], window=1024).value)


def test_it_is_what_generates_where_nothing_else_is_named() -> None:
    params = SamplingParams(40, 0.8, top_p=0.9, seed=4)
    with LLM(dtype="float32") as llm:
        found = llm.generate(["It was a dark and stormy night"], params)[0]
    assert found.text is not None and len(set(found.text.split())) > 12
