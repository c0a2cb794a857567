"""The Python API for asyncio: `AsyncLLM`.

async with AsyncLLM("path/to/model", tp=2) as llm:
    async for chunk in llm.stream("Once upon a time", SamplingParams(max_new_tokens=32)):
        print(chunk.text)
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any

from ladder.engine.executors.start import start
from ladder.engine.executors.torchrun import torchrun_rank
from ladder.engine.frontend.supervisor import Restarts, Start, Status, Supervisor
from ladder.engine.options import EMBEDDED, RENAMED, EngineOptions, SamplingParams
from ladder.engine.requests import Chunk, Prompt, Request, Result
from ladder.engine.setup import Setup
from ladder.errors import LadderError
from ladder.hub import directory_of
from ladder.options import refuse_renamed


class Outlet:
    """The chunks of some requests, for a coroutine that waits for them. Used by the thread of its event loop only."""

    def __init__(self, running: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.ids: list[int] = []
        self.running = running  # requests that have not ended
        self._chunks: list[Chunk] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Chunk]:
        """All chunks that have come since the last call, at least one; empty where all requests have ended."""
        while self.running and not self._chunks:
            if self._error is not None:
                raise self._error.with_traceback(None)
            self._waiter = self.loop.create_future()
            await self._waiter
        chunks, self._chunks = self._chunks, []
        self.running -= sum(chunk.finish_reason is not None for chunk in chunks)
        return chunks


class AsyncLLM:
    """A loaded model and its ranks. Keywords are those of `EngineOptions`. Close it, or use it in `async with`.

    A thread of its own computes. Any number of coroutines may ask at once, of any event loop in any thread; a
    coroutine that is cancelled, or leaves its stream, cancels its request. A request that fails ends alone. When a rank
    fails, every open request gets that error; with `restarts` the ranks are started again, and requests go on.
    """

    def __init__(self, model: str | Path = EMBEDDED, restarts: Restarts | None = None, **options: Any) -> None:
        refuse_renamed(options, RENAMED)
        setup = Setup(EngineOptions(directory_of(Path(model)), **options))
        self._begin(setup, lambda progress: start(setup, progress), restarts)

    @classmethod
    def over(
        cls,
        setup: Setup,
        start: Start,
        restarts: Restarts | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> "AsyncLLM":
        """On executors that `start` makes; `progress` is called with the bytes of weights as the first one loads."""
        llm = cls.__new__(cls)
        llm._begin(setup, start, restarts, progress)
        return llm

    def _begin(
        self,
        setup: Setup,
        start: Start,
        restarts: Restarts | None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        if torchrun_rank() is not None:
            raise LadderError("AsyncLLM and `ladder serve` start ranks by themselves: run them without torchrun")
        self.setup = setup
        self._supervisor: Supervisor[Outlet] = Supervisor(start, self._deliver, self._fail, restarts, progress)

    @property
    def status(self) -> Status:
        """Whether the engine computes, is being started again, or has been given up."""
        return self._supervisor.status

    @property
    def failures(self) -> int:
        """How often the engine has failed so far."""
        return self._supervisor.failures

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._supervisor.requests)

    @property
    def waiting(self) -> int:
        """Those of them that have no token yet."""
        return self._supervisor.requests.waiting

    @property
    def room(self) -> int | None:
        """Tokens that a request may have, its prompt's and its output's; None before the first engine has started."""
        return self._supervisor.requests.room

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> list[Result]:
        """The `n` results of a prompt, a text or a list of ids."""
        requests = await self._checked(prompt, params)
        async with aclosing(self.run(requests)) as parts:
            async for _ in parts:
                pass
        return [request.result() for request in requests]

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGenerator[Chunk, None]:
        """Chunks as they come; those of the `n` results, numbered by `index`, are interleaved."""
        async with aclosing(self.run(await self._checked(prompt, params))) as parts:
            async for chunks in parts:
                for chunk in chunks:
                    yield chunk

    async def _checked(self, prompt: Prompt, params: SamplingParams | None) -> list[Request]:
        """Tokenized by another thread: long prompts take a while."""
        return await asyncio.to_thread(self.setup.requests, [prompt], params or SamplingParams())

    async def run(self, requests: Sequence[Request]) -> AsyncGenerator[list[Chunk], None]:
        """Run requests that were checked before: all chunks that have come since the last."""
        outlet = Outlet(len(requests))
        try:
            outlet.ids = self._supervisor.add(requests, outlet)
            while chunks := await outlet.take():
                yield chunks
        finally:
            self._supervisor.cancel(outlet.ids)

    def _deliver(self, chunks: list[tuple[Outlet, Chunk]]) -> None:
        """One call into each event loop for all chunks of a step."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Outlet, Chunk]]] = {}
        for pair in chunks:
            by_loop.setdefault(pair[0].loop, []).append(pair)
        for loop, pairs in by_loop.items():
            self._call(loop, [outlet for outlet, _ in pairs], _put, pairs)

    def _fail(self, outlets: Sequence[Outlet], error: Exception) -> None:
        for outlet in outlets:
            self._call(outlet.loop, [outlet], outlet.fail, error)

    def _call(
        self, loop: asyncio.AbstractEventLoop, outlets: list[Outlet], function: Callable[[Any], None], given: Any
    ) -> None:
        try:
            loop.call_soon_threadsafe(function, given)
        except RuntimeError:  # the loop has been closed, and with it went those who waited
            for outlet in outlets:
                self._supervisor.cancel(outlet.ids)

    def close(self) -> None:
        """Stop all ranks; requests that are still open get an error."""
        self._supervisor.close()

    async def aclose(self) -> None:
        """The same, without holding up the event loop."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()


def _put(pairs: list[tuple[Outlet, Chunk]]) -> None:
    for outlet, chunk in pairs:
        outlet.put(chunk)
