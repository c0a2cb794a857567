"""How the experiments score tasks, which docs/quality.md tells, against EleutherAI's harness."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.choices import scores
from ladder.engine.options import EMBEDDED
from ladder.hf.evaluate import Arm, evaluate

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
