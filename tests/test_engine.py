"""Continuous batching: whoever comes and goes, on however many ranks, a request's tokens are those it gets alone."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ladder import LLM, SamplingParams
from ladder.checkpoint import SINGLE
from ladder.config import ModelConfig
from ladder.engine.requests import Chunk
from ladder.errors import LadderError
from ladder.layers.cache import RESERVED, KVCache
from tests.checkpoints import tiny
from tests.threads import threaded

# the same at every degree
SHARED = ("standard", "ladder", "parallel", "parallel-1", "ladder-2", "ladder-1-2", "standard:2 ladder:2")
OWN = ("desync-2x", "desync-2x-1", "none")  # another function at every degree
SMALL: dict[str, Any] = {"max_num_seqs": 3, "prefill_chunk": 8}  # so that requests wait, and prompts are read in pieces


@dataclass(frozen=True)
class Guest:
    """A request that comes before poll `comes`, and goes when it has so many tokens, if not by itself."""

    comes: int
    prompt: tuple[int, ...]
    params: SamplingParams
    goes: int | None = None


GREEDY = st.builds(SamplingParams, st.integers(1, 12))
SAMPLED = st.builds(
    SamplingParams, st.integers(1, 12), st.sampled_from([0.5, 1.0]), st.sampled_from([0, 1, 20]),
    st.sampled_from([0.7, 1.0]), st.integers(0, 2**63 - 1),
)  # fmt: skip
GUESTS = st.builds(
    Guest, st.integers(0, 20), st.lists(st.integers(0, 319), min_size=1, max_size=30).map(tuple), GREEDY | SAMPLED,
    st.none() | st.integers(0, 6),
)  # fmt: skip


def visit(llm: LLM, guests: list[Guest]) -> list[list[int]]:
    """The tokens of each, as they come and go. Checks that chunks come in order and stop where they should."""
    ids: dict[int, int] = {}
    tokens: list[list[int]] = [[] for _ in guests]
    ended: set[int] = set()
    polls = 0
    while len(ids) < len(guests) or ended < set(ids):
        for number, guest in enumerate(guests):
            if guest.comes <= polls and number not in ids.values():
                id = llm.submit(guest.prompt, guest.params)
                assert id not in ids
                ids[id] = number
            if guest.goes == 0 and number in ids.values():
                leave(llm, ids, number, ended)
        polls += 1
        for chunk in llm.poll():
            number = ids[chunk.index]
            assert chunk.index not in ended
            tokens[number] += chunk.token_ids
            if chunk.finish_reason is not None:
                assert chunk.finish_reason == "length" and len(tokens[number]) == guests[number].params.max_new_tokens
                ended.add(chunk.index)
            elif len(tokens[number]) == guests[number].goes:
                leave(llm, ids, number, ended)
    assert llm.poll() == []
    llm.generate([[1]], SamplingParams(1))  # the ranks have heard of the last who went
    assert llm.free_slots == llm.setup.options.max_num_seqs
    return tokens


def leave(llm: LLM, ids: dict[int, int], number: int, ended: set[int]) -> None:
    id = next(id for id, other in ids.items() if other == number)
    llm.cancel(id)
    ended.add(id)


def alone(llm: LLM, guest: Guest) -> list[int]:
    tokens = llm.generate([guest.prompt], guest.params)[0].token_ids
    return tokens if guest.goes is None else tokens[: guest.goes]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"), eos=())


@pytest.fixture(scope="module")
def emulated(model: Path) -> Iterator[LLM]:
    with threaded(model, wiring="ladder", tp=2, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def solo(model: Path) -> Iterator[LLM]:
    with LLM(model, wiring="ladder", **SMALL) as llm:
        yield llm


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(guests=st.lists(GUESTS, min_size=1, max_size=16))
def test_company_does_not_matter(emulated: LLM, solo: LLM, guests: list[Guest]) -> None:
    assert visit(emulated, guests) == [alone(solo, guest) for guest in guests]


def party(chance: random.Random, count: int) -> list[Guest]:
    """Greedy guests of all sizes."""
    return [
        Guest(
            chance.randrange(12),
            tuple(chance.randrange(320) for _ in range(chance.choice((1, 2, 5, 13, 40)))),
            SamplingParams(chance.randint(1, 9)),
            chance.choice((None, None, None, 3)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("tp, wiring", [*((2, wiring) for wiring in SHARED), (4, "ladder")])
def test_processes_say_what_one_process_says(model: Path, wiring: str, tp: int) -> None:
    chance = random.Random(f"{wiring} {tp}")
    parties = [party(chance, count) for count in (1, chance.randint(2, 7), 10)]
    with LLM(model, wiring=wiring) as llm:
        expected = [[alone(llm, guest) for guest in guests] for guests in parties]
    with LLM(model, wiring=wiring, tp=tp, max_num_seqs=6, prefill_chunk=16) as llm:
        assert [visit(llm, guests) for guests in parties] == expected


@pytest.mark.parametrize("wiring", OWN)
def test_processes_say_what_emulated_ranks_say(model: Path, wiring: str) -> None:
    guests = party(random.Random(wiring), 6)
    with threaded(model, wiring=wiring, tp=2) as llm:
        expected = [alone(llm, guest) for guest in guests]
    with LLM(model, wiring=wiring) as llm:
        assert expected != [alone(llm, guest) for guest in guests]
    with LLM(model, wiring=wiring, tp=2, **SMALL) as llm:
        assert visit(llm, guests) == expected


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[LLM]:
    """Two processes, and little patience."""
    with LLM(model, wiring="ladder", tp=2, max_num_seqs=3, prefill_chunk=8, timeout=4.0) as llm:
        yield llm
        assert llm.free_slots == 3  # whatever the tests left behind


def test_params_of_its_own_for_each(pair: LLM, solo: LLM) -> None:
    prompts = [[1], [2, 3], [4] * 20, [5]]
    params = [SamplingParams(3), SamplingParams(7, 1.0, seed=1), SamplingParams(5, 0.9, 30, 0.9, 2), SamplingParams(1)]
    results = pair.generate(prompts, params)
    assert results == [solo.generate([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    assert [len(result.token_ids) for result in results] == [3, 7, 5, 1]
    drawn = {tuple(pair.generate([[9]], SamplingParams(8, 1.0))[0].token_ids) for _ in range(4)}
    assert len(drawn) == 4  # without a seed


def test_streams_are_complete_and_in_order(pair: LLM, solo: LLM) -> None:
    prompts, params = [[n] * n for n in range(1, 8)], SamplingParams(6)
    chunks = list(pair.stream(prompts, params))
    for index, expected in enumerate(solo.generate(prompts, params)):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert [token for chunk in own for token in chunk.token_ids] == expected.token_ids
        assert "".join(chunk.text or "" for chunk in own) == expected.text
        assert [chunk.finish_reason for chunk in own] == [None] * 5 + ["length"]
    assert chunks[0].index == 0 and {chunk.index for chunk in chunks[:9]} == {0, 1, 2}  # who came first is first


def test_a_stream_closed_early_is_cancelled(pair: LLM, solo: LLM) -> None:
    stream = pair.stream([[1], [2], [3], [4]], SamplingParams(400))
    for _, _ in zip(range(5), stream, strict=False):
        pass
    stream.close()  # type: ignore[attr-defined]
    assert pair.poll() == []
    begin = time.monotonic()
    assert pair.generate([[7]], SamplingParams(4)) == solo.generate([[7]], SamplingParams(4))
    assert pair.free_slots == 3
    assert time.monotonic() - begin < 10  # the 400 were not waited for


def test_a_stop_text_frees_the_slot(pair: LLM, solo: LLM) -> None:
    """The ranks, who know no text, are told."""
    text = solo.generate([[5, 17]], SamplingParams(20))[0].text or ""
    params = SamplingParams(400, stop=(text[2:4],))
    assert pair.generate([[5, 17]], params) == solo.generate([[5, 17]], params)
    assert pair.free_slots == 3 and solo.free_slots == solo.setup.options.max_num_seqs


def test_cancelling(pair: LLM, solo: LLM) -> None:
    """One that waits, one that runs, one that has finished, one that has been cancelled, one that never was."""
    ids = [pair.submit([number], SamplingParams(9)) for number in range(5)]
    pair.cancel(ids[4])  # three slots: it waits
    chunks = pair.poll()
    pair.cancel(ids[0])
    chunks += rest(pair)
    for id in (*ids, ids[0], 10**9):
        pair.cancel(id)
    assert pair.poll() == []
    assert {chunk.index for chunk in chunks} - {ids[0]} == {ids[1], ids[2], ids[3]}
    expected = solo.generate([[1], [2], [3]], SamplingParams(9))
    assert [tokens_of(chunks, id) for id in ids[1:4]] == [result.token_ids for result in expected]
    again = pair.submit([1], SamplingParams(9))  # and who comes after all this is served as ever
    assert again not in ids and tokens_of(rest(pair), again) == expected[0].token_ids


@pytest.mark.parametrize("name", ["pair", "solo"])
def test_who_has_left_is_not_heard_of(name: str, request: pytest.FixtureRequest) -> None:
    """Chunks that wait for somebody who left are gone; asking for free slots loses nobody's."""
    llm: LLM = request.getfixturevalue(name)
    slots, params = llm.setup.options.max_num_seqs, SamplingParams(9)
    expected = llm.generate([[2]], params)[0].token_ids
    left, ended, stays = (
        llm.submit([1], SamplingParams(400)),
        llm.submit([1], SamplingParams(1)),
        llm.submit([2], params),
    )
    assert llm.free_slots == slots - 3 or llm.free_slots == slots - 2  # the second may have had its one token
    llm.generate([[3]], SamplingParams(3))
    llm.cancel(left)
    llm.cancel(ended)
    assert llm.free_slots >= slots - 1
    chunks = rest(llm)
    assert {chunk.index for chunk in chunks} == {stays} and tokens_of(chunks, stays) == expected
    assert llm.free_slots == slots


def rest(llm: LLM) -> list[Chunk]:
    """All chunks until nothing is under way."""
    chunks: list[Chunk] = []
    while more := llm.poll():
        chunks += more
    return chunks


def tokens_of(chunks: list[Chunk], id: int) -> list[int]:
    return [token for chunk in chunks if chunk.index == id for token in chunk.token_ids]


def test_a_long_prompt_stalls_nobody(pair: LLM, solo: LLM) -> None:
    """Between its pieces, 8 tokens each, the other request goes on."""
    quick = pair.submit([5, 17], SamplingParams(60))
    chunks = pair.poll()
    prompt = list(range(150))
    long = pair.submit(prompt, SamplingParams(4))
    chunks += rest(pair)
    order = [chunk.index for chunk in chunks]
    # it may have been submitted a few steps before it was heard, and is read in 19 steps
    assert order[: order.index(long)].count(quick) >= 19
    assert order.index(long) < len(order) - 10  # it did not wait for the other either
    results = solo.generate([[5, 17], prompt], [SamplingParams(60), SamplingParams(4)])
    assert [tokens_of(chunks, id) for id in (quick, long)] == [result.token_ids for result in results]


def test_a_slow_reader_is_no_failure(pair: LLM, solo: LLM) -> None:
    """The time-out of 4 s is for ranks that do not answer, not for a caller who does not ask."""
    tokens: list[int] = []
    for number, chunk in enumerate(pair.stream([[3, 4]], SamplingParams(30))):
        tokens += chunk.token_ids
        if number == 20:
            time.sleep(5.0)
    assert tokens == solo.generate([[3, 4]], SamplingParams(30))[0].token_ids
    time.sleep(5.0)  # and nothing to do at all
    assert pair.generate([[3]], SamplingParams(2)) == solo.generate([[3]], SamplingParams(2))


@pytest.mark.parametrize("tp", [1, 2])
def test_one_broken_request_breaks_no_other(tmp_path: Path, tp: int) -> None:
    """A token whose embedding is not finite."""
    tiny(tmp_path)
    with LLM(tmp_path) as llm:
        expected = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(6))
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.embed_tokens.weight"][200] = torch.nan
    save_file(tensors, tmp_path / SINGLE)
    with LLM(tmp_path, tp=tp) as llm:
        good, broken, other = llm.generate([[1, 2, 3], [200, 7], [4, 5]], SamplingParams(6))
        assert [good, other] == expected
        assert (broken.token_ids, broken.finish_reason) == ([], "error") and llm.free_slots == 16


def test_an_interrupted_step_is_not_gone_on_with(model: Path) -> None:
    """Alone, the caller's own process computes."""
    with LLM(model) as llm:
        llm.submit([1, 2, 3], SamplingParams(9))
        with (
            patch("ladder.engine.passes.Passes.compute", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            llm.poll()
        with pytest.raises(LadderError, match="interrupted"):
            llm.poll()


@pytest.mark.parametrize("options, message", [
    ({"max_new_tokens": 2.5}, "max_new_tokens must be int, not 2.5"),
    ({"temperature": "1"}, "temperature must be float, not '1'"),
    ({"top_k": True}, "top_k must be int, not True"),
    ({"stop": None}, "stop must be"),
    ({"stop": ["a", 5]}, "stop must be"),
    ({"seed": 1.5}, "seed must be int or None, not 1.5"),
])  # fmt: skip
def test_sampling_params_of_the_wrong_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LadderError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize("options, message", [
    ({"max_num_seqs": 2.5}, "max_num_seqs must be int, not 2.5"),
    ({"max_num_seqs": 10**8}, "max_num_seqs must be at most 1000000"),
    ({"batch": 2}, "batch was renamed: use max_num_seqs"),
    ({"chunk": 2}, "chunk was renamed: use prefill_chunk"),
    ({"wire": "gloo"}, "wire was renamed: use comm_backend"),
    ({"link": "1us,1GB/s"}, "link was renamed: use emulate_link"),
    ({"emulate_link": 5}, "emulate_link must be str or None, not 5"),
    ({"device": None}, "device must be str, not None"),
    ({"timeout": float("inf")}, "timeout must be at most"),
])  # fmt: skip
def test_options_of_the_wrong_type(model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LadderError, match=message):
        LLM(model, **options)


def test_prompts_of_the_wrong_type(solo: LLM) -> None:
    for prompts, params in (([None], None), ([b"abc"], None), (["a"], {}), (["a"], [])):
        with pytest.raises(LadderError):
            solo.generate(prompts, params)  # type: ignore[arg-type]
    assert len(solo.generate(iter([[1], range(3)]), SamplingParams(1))) == 2  # type: ignore[arg-type]


def test_two_at_a_time(pair: LLM, solo: LLM, model: Path) -> None:
    with LLM(model, tp=2) as other, LLM(model) as plain:
        streams = pair.stream([[6]], SamplingParams(8)), other.stream([[6]], SamplingParams(8))
        chunks = list(zip(*streams, strict=True))
        for number, single in enumerate((solo, plain)):
            found = [token for both in chunks for token in both[number].token_ids]
            assert found == single.generate([[6]], SamplingParams(8))[0].token_ids
    assert pair.generate([[6]], SamplingParams(8)) == solo.generate([[6]], SamplingParams(8))


def test_a_small_cache(model: Path) -> None:
    """Requests wait for blocks; one that could never have enough is refused by name, and nothing else ends."""
    block = KVCache.block_bytes(ModelConfig.from_directory(model), 1, torch.float32)
    params = SamplingParams(20, temperature=0.7, seed=3)
    prompts = [[number + 1, 5, 9] for number in range(6)]
    with LLM(model, dtype="float32") as roomy:
        expected = roomy.generate(prompts, params)
    with LLM(model, dtype="float32", memory=(RESERVED + 4.5) * block / 1e9) as llm:
        with pytest.raises(LadderError, match=r"50 tokens and up to 20 new ones does not fit .* room for 64: lower"):
            llm.generate([[1] * 50], params)
        assert llm.generate(prompts, params) == expected
    with pytest.raises(LadderError, match=r"no memory for a KV cache: a block of 16 tokens takes .*: raise --memory"):
        LLM(model, dtype="float32", memory=block / 1e9)
