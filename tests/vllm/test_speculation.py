"""Speculative decoding by vLLM's proposers changes no token of a wired model."""

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import engine
from tests.vllm.references import checkpoint, prompts

NGRAM: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize("proposer", ("ngram", "draft"))
def test_tokens_stay(proposer: str, tmp_path: Path) -> None:
    """The draft is a wired model, too: the same one, so that its proposals are taken, and fewer steps are needed."""
    directory = checkpoint(tmp_path / "model", "llama", "ladder")
    texts = [prompt[:40] * 2 for prompt in prompts()]  # which repeat themselves
    with engine(directory) as plain:
        expected = [answer.tokens for answer in plain.generate(texts)]
    speculative = NGRAM if proposer == "ngram" else {"method": "draft_model", "model": str(directory)}
    with engine(directory, speculative_config={**speculative, "num_speculative_tokens": 3}) as found:
        assert [answer.tokens for answer in found.generate(texts)] == expected
    assert proposer == "ngram" or found.steps < plain.steps
