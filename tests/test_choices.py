"""How the experiments score tasks, against EleutherAI's harness, and make the weights that docs/quality.md tells of."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.adaptation import between, load
from experiments.choices import scores
from ladder.engine.options import EMBEDDED
from ladder.hf.evaluate import Arm, evaluate
from tests.hosts import host

ENDS = ["down to the sea.", "into the green of it", "upon the table, and said nothing", "of"]
ROWS = {
    "choices": [
        {"query": f"The {who} went", "choices": ENDS[at:] + ENDS[:at], "gold": at % 3}
        for at, who in enumerate(("old man", "ship", "queen", "child"))
    ],
    "contexts": [
        {"contexts": [f"The {who} was", f"A {who} that had been"], "continuation": "very tired.", "gold": at % 2}
        for at, who in enumerate(("dog", "captain", "stone", "night"))
    ],
    "words": [
        {"context": context, "continuation": word}
        for context, word in (("He did not know what to", "do"), ("Once upon a", "time"), ("She opened the", "zebra"))
    ],
}


@pytest.mark.parametrize("kind", ROWS)
def test_scores_are_the_harness_s(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[kind]))
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype="float32").eval()
    found = scores(model, AutoTokenizer.from_pretrained(EMBEDDED), file)
    wanted = {
        row["measure"].split("/")[1]: row["value"]
        for row in evaluate([Arm(str(EMBEDDED))], tasks=[file], dtype="float32")
    }
    assert found == pytest.approx(wanted, rel=1e-4)


def test_weights_between_two_models(tmp_path: Path) -> None:
    """A share of the way from the first, tied weights once."""
    model = host("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "one")
    for weight in model.parameters():
        weight.data.neg_().add_(0.1)
    model.save_pretrained(tmp_path / "two")
    one, two = (load(tmp_path / name).state_dict() for name in ("one", "two"))
    found = between(tmp_path / "one", tmp_path / "two", 0.25).state_dict()
    assert found.keys() == one.keys()
    for name, weight in found.items():
        wanted = 0.75 * one[name].float().cpu() + 0.25 * two[name].float().cpu()
        torch.testing.assert_close(weight.float().cpu(), wanted, rtol=2**-7, atol=1e-6)
