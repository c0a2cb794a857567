"""Quantized wired checkpoints of `ladder quantize`, by vLLM's own quantized layers."""

from pathlib import Path

import pytest

from ladder.quantize.options import QuantizeOptions
from ladder.quantize.write import quantize
from tests.vllm.engines import engine
from tests.vllm.references import checkpoint, native, prompts

AGREEMENT = 0.9  # of greedy tokens over the same text: kernels round activations in ways of their own


@pytest.mark.parametrize("format, group", [("int4", 32)])
def test_tokens_agree(format: str, group: int, tmp_path: Path) -> None:
    plain = checkpoint(tmp_path / "plain", "llama", "ladder", ffn=128)
    directory = tmp_path / format
    quantize(QuantizeOptions(model=plain, out=directory, format=format, group=group), lambda *_: None)
    with engine(directory, 2, dtype="bfloat16") as found:
        answers = found.generate(prompts())
    same = []
    for answer, prompt in zip(answers, prompts(), strict=True):
        table = native(directory, "ladder", 2, [*prompt, *answer.tokens])[len(prompt) - 1 : -1]
        same += [token == best for token, best in zip(answer.tokens, table.argmax(-1).tolist(), strict=True)]
    assert sum(same) >= AGREEMENT * len(same)
