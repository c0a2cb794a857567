"""Two thousand requests of all kinds through two processes: nothing lost, nothing twice. And no memory is kept."""

import gc
import random
import tracemalloc
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import printable

import torch

from ladder import LLM, SamplingParams
from ladder.engine.requests import Chunk
from tests.checkpoints import tiny
from tests.test_faults import rank_pids
from tests.threads import threaded

REQUESTS = 1000
SMALL = 160e-6  # GB of a cache for little more than one sequence of full length
SLOTS = 96
AHEAD = 160  # requests under way or waiting at once
SAMPLE = 50
KEPT = 100
FEW = 120  # requests

Prompt = str | tuple[int, ...]


@dataclass
class Guest:
    """A request, its wish to leave after so many tokens, and what it has got."""

    prompt: Prompt
    params: SamplingParams
    goes: int | None
    new: list[int] = field(default_factory=list)
    text: str = ""
    end: str | None = None


def draw(chance: random.Random) -> Guest:
    length = chance.choice((1, 1, 2, 3, 5, 8, 30))
    ids = tuple(chance.randrange(256) for _ in range(length))
    prompt: Prompt = "".join(chr(97 + id % 26) for id in ids) if chance.random() < 0.3 else ids
    params = SamplingParams(chance.randint(1, 9))
    if chance.random() < 0.5:
        filters = chance.choice((0, 5, 50)), chance.choice((0.8, 1.0))
        params = SamplingParams(params.max_new_tokens, chance.choice((0.3, 1.0)), *filters, chance.randrange(2**63))
    if chance.random() < 0.4:
        params = replace(params, stop=tuple(chance.sample(printable, 20)))
    return Guest(prompt, params, chance.randrange(6) if chance.random() < 0.15 else None)


def take(guest: Guest, chunk: Chunk) -> None:
    assert guest.end is None, "a chunk after the last"
    assert len(chunk.token_ids) == 1
    guest.new += chunk.token_ids
    guest.text += chunk.text or ""
    guest.end = chunk.finish_reason


def serve(llm: LLM, guests: list[Guest]) -> None:
    """All of them, as many at once as they are let in."""
    coming, here = iter(guests), dict[int, Guest]()
    known: set[int] = set()
    while True:
        for guest in coming:
            id = llm.submit(guest.prompt, guest.params)
            assert id not in known
            known.add(id)
            here[id] = guest
            if len(here) == AHEAD:
                break
        for id, guest in list(here.items()):
            if guest.goes is not None and len(guest.new) >= guest.goes:
                llm.cancel(id)
                del here[id]
        if not here:
            break
        chunks = llm.poll()
        assert chunks and len({chunk.index for chunk in chunks}) == len(chunks) <= SLOTS
        for chunk in chunks:
            take(here[chunk.index], chunk)  # of nobody unknown, cancelled or done
            if here[chunk.index].end is not None:
                del here[chunk.index]
    assert llm.poll() == [] and len(known) == len(guests)


def held() -> tuple[int, int]:
    """Bytes of Python's objects, and of tensors. Whatever the allocator makes of them."""
    gc.collect()
    tensors = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in gc.get_objects()
               if type(x) in (torch.Tensor, torch.nn.Parameter)}  # fmt: skip
    return tracemalloc.get_traced_memory()[0], sum(tensors.values())


def check(guest: Guest) -> None:
    """It got what it wished for, no more."""
    limit = guest.params.max_new_tokens
    if guest.end is None:
        assert guest.goes is not None and len(guest.new) == guest.goes
    elif guest.end == "length":
        assert len(guest.new) == limit
    else:
        assert guest.params.stop and len(guest.new) <= limit
    if guest.end is not None:
        assert not any(stop in guest.text for stop in guest.params.stop)


def alone(llm: LLM, guest: Guest) -> bool:
    """Whether it would have got the same by itself."""
    result = llm.generate([guest.prompt], guest.params)[0]
    if guest.end is None:
        return result.token_ids[: len(guest.new)] == guest.new
    return (result.token_ids, result.text, result.finish_reason) == (guest.new, guest.text, guest.end)


def test_a_thousand_requests(tmp_path: Path) -> None:
    model = tiny(tmp_path, "ladder", eos=(), layers=2)
    chance = random.Random(0)
    guests = [draw(chance) for _ in range(REQUESTS)]
    with LLM(model, tp=2, max_num_seqs=SLOTS, prefill_chunk=64) as llm:
        serve(llm, guests)
        assert llm.free_slots == SLOTS and len(rank_pids()) == 2
    for guest in guests:
        check(guest)
    ends = [guest.end for guest in guests]
    assert min(ends.count(end) for end in (None, "length", "stop")) > REQUESTS // 20  # there were some of each
    with LLM(model) as llm:
        assert all(alone(llm, guest) for guest in chance.sample(guests, SAMPLE))


def test_no_memory_is_kept(tmp_path: Path) -> None:
    """By ranks in this process, where every object is seen: a request leaves no sequence or text behind, which have
    KEPT bytes at the least. The cache is small: the names of its blocks, which are kept for prompts that begin alike,
    are all there soon.
    """
    chance = random.Random(1)
    with threaded(
        tiny(tmp_path, "ladder", eos=(), layers=2), tp=2, max_num_seqs=SLOTS, prefill_chunk=64, memory=SMALL
    ) as llm:
        tracemalloc.start()
        try:
            used = []
            for _ in range(3):
                serve(llm, [draw(chance) for _ in range(FEW)])  # whose answers go with them
                used.append(held())
        finally:
            tracemalloc.stop()
    (_, *before), (_, *after) = used[0], used[2]
    assert after == before
    assert used[2][0] - used[1][0] < FEW * KEPT, used
