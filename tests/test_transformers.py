"""The standard wiring against transformers: logits on ragged batches, and greedy tokens, for every family."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ladder import LLM, SamplingParams
from ladder.checkpoint import Directory, load
from ladder.comm.base import Comm
from ladder.comm.emulated import World
from ladder.model import Decoder
from tests.families import FAMILIES, make
from tests.threads import threaded

LENGTHS = (1, 5, 17, 40)  # the longest is several sliding windows long


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in LENGTHS]


def padded(lines: list[list[int]]) -> Tensor:
    width = max(map(len, lines))
    return torch.tensor([line + [0] * (width - len(line)) for line in lines])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens(family: str, tmp_path: Path) -> None:
    theirs = make(family, tmp_path)
    lines = prompts(theirs.config.vocab_size)
    source = Directory(tmp_path)
    ours = load(Decoder(source.config), source)
    with torch.inference_mode():
        logits = ours(padded(lines))
        for line, answer in zip(lines, logits, strict=True):
            expected = theirs(torch.tensor([line])).logits[0]
            assert expected.abs().max() > 1  # otherwise an absolute bound would say nothing
            assert (answer[: len(line)] - expected).abs().max() <= 1e-4

    expected_tokens = []
    for line in lines:
        full = theirs.generate(
            torch.tensor([line]),
            max_new_tokens=64,
            do_sample=False,
            pad_token_id=0,
            attention_mask=torch.ones(1, len(line)),
        )
        expected_tokens.append(full[0, len(line) :].tolist())
    with LLM(tmp_path) as llm:
        results = llm.generate(lines, SamplingParams(max_new_tokens=64))
    assert [result.token_ids for result in results] == expected_tokens
    assert uncached(ours, lines[1], 64) == expected_tokens[1]


def uncached(model: Decoder, line: list[int], count: int) -> list[int]:
    """Greedy tokens, the whole text computed anew for each."""
    tokens = list(line)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(line) :]


@pytest.mark.parametrize("family", ["llama-3.2", "llama-bias", "mistral", "qwen2", "qwen3"])
def test_sharded_logits(family: str, tmp_path: Path) -> None:
    """Every kind of parameter is shared out by the loader as the layers expect; 8 ranks replicate the 4 kv heads."""
    theirs = make(family, tmp_path)
    line = prompts(theirs.config.vocab_size)[-1]
    with torch.inference_mode():
        expected = theirs(torch.tensor([line])).logits[0]
    source = Directory(tmp_path)

    def logits(comm: Comm) -> Tensor:
        model = load(Decoder(source.config, comm), source)
        with torch.inference_mode():
            return comm.all_gather(model(torch.tensor([line])))[0, :, : source.config.vocab]

    for size in (2, 4, 8):
        with World(size) as world:
            for answer in world.run(logits):
                assert (answer - expected).abs().max() <= 1e-4


def test_smollm2_on_three_ranks(tmp_path: Path) -> None:
    theirs = make("smollm2", tmp_path)
    line = prompts(theirs.config.vocab_size)[1]
    with LLM(tmp_path) as one, threaded(tmp_path, tp=3) as three:
        assert one.generate([line]) == three.generate([line])


def test_our_directories_load_in_transformers(tmp_path: Path) -> None:
    """What `save` writes for the standard wiring is a plain checkpoint."""
    from transformers import AutoModelForCausalLM

    from ladder.checkpoint import save

    for family in FAMILIES:
        theirs = make(family, tmp_path / family)
        source = Directory(tmp_path / family)
        save(load(Decoder(source.config), source), tmp_path / "out" / family)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / family).eval()
        line = torch.tensor([prompts(theirs.config.vocab_size)[-1]])
        with torch.inference_mode():
            assert torch.equal(again(line).logits, theirs(line).logits), family
