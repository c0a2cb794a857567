"""The standard wiring against transformers: logits on ragged batches, and greedy tokens, for every family."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ladder import LLM, SamplingParams
from ladder.checkpoint import SINGLE, Directory, load, save
from ladder.comm.base import Comm
from ladder.comm.emulated import World
from ladder.model import Decoder
from tests import oracle
from tests.families import FAMILIES, make
from tests.threads import threaded

TOLERANCE = 1e-4  # absolute, in float32

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
            assert (answer[: len(line)] - expected).abs().max() <= TOLERANCE

    with LLM(tmp_path) as llm:
        results = llm.generate(lines, SamplingParams(max_new_tokens=64))
    for line, result in zip(lines, results, strict=True):
        assert len(result.token_ids) == 64
        for model in (theirs, ours):  # neither has a cache here
            assert_greedy(model, line, result.token_ids)


def assert_greedy(model: torch.nn.Module, line: list[int], found: list[int]) -> None:
    """Each token is the most likely one after those before it, or as likely: where two are nearly equal, rounding,
    which differs between machines, may choose.
    """
    with torch.inference_mode():
        answer = model(torch.tensor([line + found[:-1]]))
    logits = (answer if isinstance(answer, Tensor) else answer.logits)[0, len(line) - 1 :]
    best, chosen = logits.max(dim=-1).values, logits[torch.arange(len(found)), torch.tensor(found)]
    assert (best - chosen).max() <= 2 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle(family: str, tmp_path: Path) -> None:
    """What every wiring is compared with is itself transformers' function, where the wiring is the standard one."""
    theirs = make(family, tmp_path)
    line = torch.tensor([prompts(theirs.config.vocab_size)[2]])
    config, weights = Directory(tmp_path).config, load_file(tmp_path / SINGLE)
    with torch.inference_mode():
        expected = theirs(line).logits
        truth = oracle.logits(config, weights, line, ("standard",) * config.layers, ranks=1)
    assert (truth - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "smollm2"])
def test_sharded_logits(family: str, tmp_path: Path) -> None:
    """Every kind of parameter is shared out by the loader as the layers expect; experts both ways. 8 ranks replicate
    the 4 kv heads, where a family has so few.
    """
    theirs = make(family, tmp_path)
    line = prompts(theirs.config.vocab_size)[-1]
    with torch.inference_mode():
        expected = theirs(torch.tensor([line])).logits[0]
    source = Directory(tmp_path)
    whole = (
        [] if source.config.experts is None else [size for size in (2, 4) if source.config.experts.count % size == 0]
    )

    for size, expert_parallel in [(2, False), (4, False), (8, False), *((size, True) for size in whole)]:

        def logits(comm: Comm, expert_parallel: bool = expert_parallel) -> Tensor:
            model = load(Decoder(source.config, comm, expert_parallel=expert_parallel), source)
            with torch.inference_mode():
                return comm.all_gather(model(torch.tensor([line])))[0, :, : source.config.vocab]

        with World(size) as world:
            for answer in world.run(logits):
                assert (answer - expected).abs().max() <= TOLERANCE, (size, expert_parallel)


def test_smollm2_on_three_ranks(tmp_path: Path) -> None:
    theirs = make("smollm2", tmp_path)
    line = prompts(theirs.config.vocab_size)[1]
    with LLM(tmp_path) as one, threaded(tmp_path, tp=3) as three:
        assert one.generate([line]) == three.generate([line])


@pytest.mark.parametrize("family", FAMILIES)
def test_our_directories_load_in_transformers(family: str, tmp_path: Path) -> None:
    """What `save` writes for the standard wiring is a plain checkpoint."""
    theirs = make(family, tmp_path / "theirs")
    source = Directory(tmp_path / "theirs")
    save(load(Decoder(source.config), source), tmp_path / "ours")
    attention = theirs.config._attn_implementation  # which no config.json keeps
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation=attention).eval()
    line = torch.tensor([prompts(theirs.config.vocab_size)[-1]])
    with torch.inference_mode():
        assert torch.equal(again(line).logits, theirs(line).logits)
