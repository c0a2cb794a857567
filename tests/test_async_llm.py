"""`AsyncLLM`, and `LLM` shared by threads: everybody gets what one gets alone, and failures stay with whom they hit."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ladder import LLM, SamplingParams
from ladder.engine.async_llm import AsyncLLM, Outlet
from ladder.engine.frontend.supervisor import Restarts
from ladder.engine.requests import Request, Result
from ladder.engine.setup import Setup
from ladder.errors import LadderError, RankError
from tests.checkpoints import tiny
from tests.serving import Scripted, scripted_tokens, setup_of, wait_for
from tests.test_faults import rank_pids

PROMPTS = [[1], [2, 3], [4] * 20, [5], [6, 7]]
PARAMS = SamplingParams(12)
QUICK = Restarts(3, 0.05)
KILLED = RankError("rank 1 was killed by SIGKILL; all ranks were stopped")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"), eos=(), layers=2)


@pytest.fixture(scope="module")
def setup(model: Path) -> Setup:
    return setup_of(model)


@pytest.fixture(scope="module")
def alone(model: Path) -> list[Result]:
    with LLM(model) as llm:
        return [llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS]


def over(setup: Setup, *executors: Scripted, restarts: Restarts | None = None) -> AsyncLLM:
    """On these executors, one after the other."""
    made = iter(executors)
    return AsyncLLM.over(setup, lambda _: next(made), restarts)


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """`work(number)` in threads at once; what they return, or raise."""
    found: list[Any] = [None] * count

    def one(number: int) -> None:
        try:
            found[number] = work(number)
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)
    return found


# --- LLM in threads ---------------------------------------------------------------------------------------------------


def test_threads_share_an_llm(model: Path, alone: list[Result]) -> None:
    with LLM(model) as llm:
        found = in_threads(20, lambda number: llm.generate([PROMPTS[number % 5]], PARAMS)[0])
        assert found == alone * 4
        assert llm.free_slots == 16


def test_threads_are_batched_together(setup: Setup) -> None:
    executor = Scripted(pace=0.01)
    with LLM.over(setup, executor) as llm:
        found = in_threads(10, lambda number: llm.generate([[number]], SamplingParams(40))[0].token_ids)
    assert found == [scripted_tokens([number], 40) for number in range(10)]
    assert len(executor.seen) < 100 and max(executor.seen) == 10


def test_a_thread_that_leaves_its_stream_holds_up_nobody(setup: Setup) -> None:
    """The one who has stepped for all goes away; another goes on."""
    with LLM.over(setup, Scripted(pace=0.002)) as llm:
        left = llm.stream([[1]], SamplingParams(500))
        next(left)
        found = in_threads(4, lambda number: llm.generate([[number]], SamplingParams(30))[0].token_ids)
        assert found == [scripted_tokens([number], 30) for number in range(4)]
        mixed = in_threads(6, lambda number: [*llm.stream([[number]], SamplingParams(30))] if number % 2
                           else llm.generate([[number]], SamplingParams(30)))  # fmt: skip
        assert [len(each) for each in mixed] == [1, 30] * 3
        left.close()  # type: ignore[attr-defined]
        assert llm.free_slots == 16


def test_a_failure_reaches_every_thread(setup: Setup) -> None:
    with LLM.over(setup, Scripted(pace=0.01, fails=(5, KILLED))) as llm:
        found = in_threads(5, lambda number: llm.generate([[number]], SamplingParams(100)))
        assert found == [KILLED] * 5
        with pytest.raises(RankError, match="rank 1"):
            llm.generate([[1]], PARAMS)


def test_closed_by_another_thread(model: Path) -> None:
    """Those who wait are told, whether they step or wait for the one who does."""
    for tp in (1, 2):
        llm = LLM(model, tp=tp)
        threading.Timer(0.3, llm.close).start()
        found = in_threads(3, lambda number, llm=llm: llm.generate([[number]] * 8, SamplingParams(500)))  # type: ignore[misc]
        assert all(isinstance(error, LadderError) for error in found), found


# --- AsyncLLM ---------------------------------------------------------------------------------------------------------


def test_everybody_gets_what_one_gets_alone(model: Path, alone: list[Result]) -> None:
    async def main() -> None:
        async with AsyncLLM(model, max_num_seqs=3) as llm:
            found = await asyncio.gather(*(llm.generate(prompt, PARAMS) for prompt in PROMPTS * 3))
            assert [results[0] for results in found] == alone * 3
            chunks = [chunk async for chunk in llm.stream(PROMPTS[2], SamplingParams(12, n=2))]
            for index in range(2):
                own = [chunk for chunk in chunks if chunk.index == index]
                assert [token for chunk in own for token in chunk.token_ids] == alone[2].token_ids
                assert "".join(chunk.text or "" for chunk in own) == alone[2].text
            three = await llm.generate([9], SamplingParams(8, 1.0, seed=4, n=3))
            assert [result.sample for result in three] == [0, 1, 2]
            assert len({tuple(result.token_ids) for result in three}) == 3
            assert llm.open == 0

    asyncio.run(main())


def test_any_event_loop_in_any_thread(setup: Setup) -> None:
    executor = Scripted(pace=0.005)
    llm = over(setup, executor)
    found = in_threads(8, lambda number: asyncio.run(_generate(llm, number)))
    assert found == [scripted_tokens([number], 30) for number in range(8)] and max(executor.seen) > 4
    llm.close()
    llm.close()
    with pytest.raises(LadderError, match="closed"):
        asyncio.run(_generate(llm, 1))


async def _generate(llm: AsyncLLM, number: int, count: int = 30) -> list[int]:
    return (await llm.generate([number], SamplingParams(count)))[0].token_ids


def test_who_leaves_is_cancelled(setup: Setup) -> None:
    executor = Scripted(pace=0.002)

    async def main() -> None:
        async with over(setup, executor) as llm:
            waiting = asyncio.create_task(llm.generate([1], SamplingParams(500)))
            stays = asyncio.create_task(llm.generate([2], SamplingParams(60)))
            stream = llm.stream([3], SamplingParams(500))
            async for _ in stream:
                break
            assert llm.open == 3 and llm.waiting <= 2  # the stream has a token
            waiting.cancel()
            await stream.aclose()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert llm.open == 1
            assert (await stays)[0].token_ids == scripted_tokens([2], 60)
            await asyncio.sleep(0.05)
            assert not executor.running

    asyncio.run(main())


def test_a_loop_that_was_closed_leaves_nothing(setup: Setup) -> None:
    llm = over(setup, Scripted(pace=0.002))

    async def begin() -> Outlet:
        return Outlet(1)

    outlet = asyncio.run(begin())
    outlet.ids = llm._supervisor.add(setup.requests([[1]], SamplingParams(400)), outlet)
    wait_for(lambda: llm.open == 0)
    assert asyncio.run(_generate(llm, 5)) == scripted_tokens([5], 30)
    llm.close()


def test_a_request_that_fails_ends_alone(setup: Setup) -> None:
    original = Request.add

    def add(request: Request, *given: Any) -> Any:
        if request.tokens == (13,) and len(request.new) == 3:
            raise ZeroDivisionError("a bug in its text")
        return original(request, *given)

    async def main() -> None:
        async with over(setup, Scripted()) as llm:
            found = await asyncio.gather(*(llm.generate([number], PARAMS) for number in (12, 13, 14)))
            assert [results[0].finish_reason for results in found] == ["length", "error", "length"]
            with pytest.raises(LadderError, match="vocabulary"):
                await llm.generate([10**6], PARAMS)
            assert llm.open == 0

    with patch.object(Request, "add", add):
        asyncio.run(main())


def test_a_failed_engine_fails_every_request(setup: Setup) -> None:
    async def main() -> None:
        executor = Scripted(pace=0.002, fails=(10, KILLED))
        async with over(setup, executor) as llm:
            found = await asyncio.gather(
                *(llm.generate([number], SamplingParams(100)) for number in range(4)), return_exceptions=True
            )
            assert [str(error) for error in found] == [str(KILLED)] * 4
            assert llm.status.state == "failed" and executor.closed
            with pytest.raises(RankError, match="rank 1"):
                await llm.generate([1], PARAMS)

    asyncio.run(main())


def test_closing_ends_what_is_open(setup: Setup) -> None:
    async def main() -> None:
        async with over(setup, Scripted(pace=0.002)) as llm:
            task = asyncio.create_task(llm.generate([1], SamplingParams(500)))
            await asyncio.sleep(0.05)
        with pytest.raises(LadderError, match="closed"):
            await task

    asyncio.run(main())


# --- restarts ---------------------------------------------------------------------------------------------------------


def run_over(setup: Setup, work: Callable[[AsyncLLM], Coroutine[Any, Any, None]], *executors: Scripted) -> None:
    async def main() -> None:
        async with over(setup, *executors, restarts=QUICK) as llm:
            await work(llm)

    asyncio.run(main())


def test_requests_outlive_a_rank(setup: Setup) -> None:
    """Those that had tokens, those that waited, and those that came meanwhile; no token twice."""

    async def work(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(llm.generate([number], SamplingParams(40))) for number in range(5)]
        chunks = []
        async for chunk in llm.stream([9], SamplingParams(40)):
            chunks.append(chunk)
            if len(chunks) == 1:
                while llm.status.state == "ready":
                    await asyncio.sleep(0.001)
                assert llm.status.error is KILLED
                tasks.append(asyncio.create_task(llm.generate([5], SamplingParams(40))))
        assert [chunk.token_ids[0] for chunk in chunks] == scripted_tokens([9], 40)
        assert [(await task)[0].token_ids for task in tasks] == [scripted_tokens([n], 40) for n in range(6)]
        assert llm.failures == 1 and llm.status.state == "ready"

    run_over(setup, work, Scripted(2, 0.002, fails=(30, KILLED)), Scripted(pace=0.001))


def test_other_tokens_after_a_restart_are_an_error(setup: Setup) -> None:
    """Of the request that had some before."""

    async def work(llm: AsyncLLM) -> None:
        begun, waited = await asyncio.gather(llm.generate([1], SamplingParams(40)), _later(llm))
        assert begun[0].finish_reason == "error" and begun[0].token_ids == scripted_tokens([1], 10)
        assert waited[0].token_ids == scripted_tokens([2], 40, seed=3)

    async def _later(llm: AsyncLLM) -> list[Result]:
        while llm.status.state == "ready":
            await asyncio.sleep(0.001)
        return await llm.generate([2], SamplingParams(40))

    run_over(setup, work, Scripted(1, 0.001, fails=(10, KILLED)), Scripted(drift=3))


def test_given_up(setup: Setup) -> None:
    """A request that was there at three failures gets the error; an engine that fails four times in a row is over."""

    async def work(llm: AsyncLLM) -> None:
        with pytest.raises(RankError, match="rank 1"):
            await llm.generate([1], SamplingParams(40))
        assert llm.failures == 3
        with pytest.raises(RankError, match="rank 1"):
            await llm.generate([1], SamplingParams(40))
        assert llm.failures == 4 and llm.status.state == "failed"

    run_over(setup, work, *(Scripted(fails=(5, KILLED)) for _ in range(4)))


def test_who_serves_may_fail_again_and_again(setup: Setup) -> None:
    async def work(llm: AsyncLLM) -> None:
        for number in range(12):
            assert (await llm.generate([number], SamplingParams(4)))[0].finish_reason == "length"
        assert llm.failures > QUICK.limit

    run_over(setup, work, *(Scripted(fails=(9, KILLED)) for _ in range(12)))


def test_backoff_grows_to_a_limit() -> None:
    assert [Restarts().delay(failures) for failures in (1, 2, 3, 6, 7, 2000)] == [1, 2, 4, 32, 60, 60]


def test_a_model_that_cannot_start_is_not_tried_again(setup: Setup) -> None:
    calls = []

    def start(_: object) -> Scripted:
        calls.append(1)
        raise KILLED

    with pytest.raises(RankError, match="rank 1"):
        AsyncLLM.over(setup, start, QUICK)
    assert len(calls) == 1


def test_killed_ranks_are_started_again(model: Path, alone: list[Result]) -> None:
    """Killed while they work, and while there is nothing to do."""

    async def main() -> None:
        async with AsyncLLM(model, tp=2, restarts=QUICK, max_num_seqs=3) as llm:
            first, many = rank_pids(), SamplingParams(200)
            expected = [await llm.generate(prompt, many) for prompt in PROMPTS]
            tasks = [asyncio.create_task(llm.generate(prompt, many)) for prompt in PROMPTS]
            await asyncio.sleep(0.1)
            os.kill(first[1], signal.SIGKILL)
            assert [await task for task in tasks] == expected and llm.failures == 1
            second = rank_pids()
            os.kill(second[0], signal.SIGKILL)
            while llm.failures == 1:
                await asyncio.sleep(0.01)
            assert "rank 0 was killed by SIGKILL" in str(llm.status.error)
            assert (await llm.generate(PROMPTS[0], PARAMS))[0] == alone[0]
            assert len({*first, *second, *rank_pids()}) == 6

    asyncio.run(main())
    assert rank_pids() == []


def test_decoding_is_as_fast_as_the_executor(setup: Setup) -> None:
    """No waiting of our own between two steps: five hundred of them take next to no time."""
    with LLM.over(setup, Scripted()) as llm:
        begin = time.monotonic()
        llm.generate([[1]], SamplingParams(500))
        sync = time.monotonic() - begin
    begin, other = time.monotonic(), over(setup, Scripted())
    asyncio.run(_generate(other, 1, 500))
    assert sync < 2.0 and time.monotonic() - begin < 4.0
    other.close()
