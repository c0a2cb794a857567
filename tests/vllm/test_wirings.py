"""Every wiring on vLLM, at TP 1 and 2: tokens and log-probabilities of the native decoder, tokens of the oracle. One
engine for each family and degree, rewired as the native decoder can be.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ladder import LLM
from ladder import SamplingParams as Sampling
from ladder.wiring import EXAMPLES
from tests.vllm.engines import Engine, engine
from tests.vllm.references import CLOSE, apart, checkpoint, from_oracle, native, prompts

HYBRIDS = ("standard:2 ladder:2", "desync-3x:1 ladder:1 parallel-1:2")
EVERY = (*EXAMPLES, *HYBRIDS)
SOME = ("standard", "ladder", "parallel-1", "desync-2x")
CASES = [(family, tp, EVERY) for family in ("llama", "qwen2", "qwen3", "mixtral") for tp in (1, 2)]
CASES += [(family, 2, SOME) for family in ("mistral", "qwen3_moe", "gemma2", "gemma3_text")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-tp{case[1]}")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Path, int, tuple[str, ...]]]:
    family, tp, wirings = request.param
    directory = checkpoint(tmp_path_factory.mktemp("model") / family, family, "ladder")
    with engine(directory, tp, enable_prefix_caching=True) as found:
        yield found, directory, tp, wirings


Served = tuple[Engine, Path, int, tuple[str, ...]]


def test_every_wiring(served: Served) -> None:
    """Prompts of 5 to 300 tokens, read in pieces of at most 128, some of them beside tokens that are decoded; then all
    again, with their beginnings in the cache.
    """
    found, directory, tp, wirings = served
    texts, wrong = prompts(), {}
    for wiring in wirings:
        found.rewire(wiring)
        first = found.generate(texts)
        again = found.generate(texts)
        assert max(answer.cached for answer in first[:4]) == 0
        assert again[3].cached >= 256 and again[4].cached >= 128
        difference = max(apart(answers, texts, partial(native, directory, wiring, tp)) for answers in (first, again))
        if difference > CLOSE or apart(first[:3], texts[:3], partial(from_oracle, directory, wiring, tp)) > CLOSE:
            wrong[wiring] = difference
    assert not wrong


def test_the_native_engine_says_the_same(served: Served) -> None:
    found, directory, *_ = served
    found.rewire("ladder")
    texts = prompts()
    with LLM(directory, dtype="float32") as llm:
        expected = [result.token_ids for result in llm.generate(texts, Sampling(max_new_tokens=16, ignore_eos=True))]
    assert [answer.tokens for answer in found.generate(texts)] == [list(ids) for ids in expected]


def test_another_wiring_is_noticed(served: Served) -> None:
    """The control: what is compared would tell a standard model from a ladder model."""
    found, directory, tp, _ = served
    found.rewire("standard")
    assert apart(found.generate(prompts()), prompts(), partial(native, directory, "ladder", tp)) > CLOSE


def test_a_wait_left_out_is_noticed(served: Served) -> None:
    found, directory, tp, _ = served
    if tp == 1:
        pytest.skip("one rank has nothing to wait for")
    found.rewire("ladder")
    found.call("forget_waits")
    try:
        assert apart(found.generate(prompts()), prompts(), partial(native, directory, "ladder", tp)) > CLOSE
    finally:
        found.call("remember_waits")
