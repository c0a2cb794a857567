"""The Python API: `LLM`.

with LLM("path/to/model", wiring="ladder", tp=2) as llm:
    for result in llm.generate(["Once upon a time"], SamplingParams(max_new_tokens=32)):
        print(result.text)
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from ladder.engine.executors.start import Executor, start
from ladder.engine.executors.torchrun import adopt_torchrun_size
from ladder.engine.frontend.open_requests import OpenRequests
from ladder.engine.options import EMBEDDED, RENAMED, EngineOptions, SamplingParams
from ladder.engine.requests import Chunk, Prompt, Request, Result
from ladder.engine.setup import Setup
from ladder.errors import LadderError
from ladder.hub import directory_of
from ladder.options import refuse_renamed


class Inbox:
    """The chunks of some requests, for the threads that wait for them."""

    def __init__(self, lock: threading.RLock, whole: bool = False) -> None:
        """`whole`: nobody asks before all of the requests have ended."""
        self.changed = threading.Condition(lock)
        self.chunks: list[Chunk] = []
        self.running = 0  # requests that have not ended
        self.whole = whole

    @property
    def ready(self) -> bool:
        return not self.running or bool(self.chunks)

    def put(self, chunk: Chunk) -> None:
        if not self.whole:
            self.chunks.append(chunk)
        self.running -= chunk.finish_reason is not None
        if self.ready:
            self.changed.notify_all()


class LLM:
    """A loaded model and its ranks. Keywords are those of `EngineOptions`. Close it, or use it in a `with` block.

    Requests may be added at any time (`submit`) and cancelled at any time (`cancel`), by any thread. They advance while
    chunks are asked for (`poll`, and `generate` and `stream`, which are built on it): one of the threads that ask
    steps for all of them.
    """

    def __init__(self, model: str | Path = EMBEDDED, **options: Any) -> None:
        refuse_renamed(options, RENAMED)
        setup = Setup(adopt_torchrun_size(EngineOptions(directory_of(Path(model)), **options)))
        self._begin(setup, start(setup))

    @classmethod
    def load(cls, setup: Setup, progress: Callable[[int], None] | None = None) -> "LLM":
        """From a setup; `progress` is called with the bytes of weights as they are loaded."""
        return cls.over(setup, start(setup, progress))

    @classmethod
    def over(cls, setup: Setup, executor: Executor) -> "LLM":
        """On an executor that has been started already."""
        llm = cls.__new__(cls)
        llm._begin(setup, executor)
        return llm

    def _begin(self, setup: Setup, executor: Executor) -> None:
        self.setup = setup
        self._executor = executor
        self._requests: OpenRequests[Inbox] = OpenRequests(executor)
        self._lock = self._requests.lock
        self._submitted = Inbox(self._lock)
        self._stepping = False  # whether a thread is in a step
        self._waiting: list[threading.Condition] = []  # of threads that could be the next to step
        self._failure: Exception | None = None
        self._closed = False

    @property
    def free_slots(self) -> int:
        """How many more requests could run at once, after everything submitted and cancelled so far."""
        turn = threading.Condition(self._lock)
        with self._lock:
            while self._stepping:
                self._wait(turn)
            self._check_open()
            self._stepping = True
        with self._step_ends():
            self._requests.flush()
            free = self._executor.free_slots
        with self._lock:
            self._pass_on()
        return free

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """The results of the prompts in order, `n` of each. A prompt is a text or a list of ids; `params` one for all
        or one each.
        """
        prompts = prompts if isinstance(prompts, str | bytes) else list(prompts)
        requests = self._checked(prompts, params)
        for _ in self._run(requests, whole=True):
            pass
        return [request.result() for request in requests]

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[Chunk]:
        """Chunks of the results as they come, those of all prompts interleaved. Stopping early cancels the rest."""
        return self.run(self._checked(prompts, params))

    def run(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Run requests that were checked before. Requests submitted elsewhere advance too; their chunks are kept."""
        return self._run(requests)

    def _run(self, requests: Sequence[Request], whole: bool = False) -> Iterator[Chunk]:
        inbox = Inbox(self._lock, whole)
        ids: list[int] = []
        try:
            ids += self._add(requests, inbox)
            while chunks := self._take(inbox):
                yield from chunks
        finally:
            for id in ids:
                self.cancel(id)

    def _checked(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        params = SamplingParams() if params is None else params
        if not isinstance(params, list | tuple):
            return self.setup.requests(prompts, params)  # type: ignore[arg-type]
        if len(params) != len(prompts):
            raise LadderError(f"{len(prompts)} prompts with {len(params)} sampling parameters: give one each, or one")
        requests: list[Request] = []
        for prompt, own in zip(prompts, params, strict=True):
            requests += self.setup.requests([prompt], own, len(requests))
        return requests

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Add a request for one result. Its chunks' `index` is the number returned."""
        params = params or SamplingParams()
        if params.n != 1:
            raise LadderError(f"submit adds one request, not n={params.n}: submit it so often, with seeds of their own")
        return self._add(self.setup.requests([prompt], params), self._submitted, numbered=True)[0]

    def _add(self, requests: Sequence[Request], inbox: Inbox, numbered: bool = False) -> list[int]:
        with self._lock:
            self._check_open()
            ids = self._requests.add(requests, inbox, numbered)
            inbox.running += len(ids)
        try:
            self._requests.flush()
        except BaseException:
            for id in ids:
                self._drop(id)
            raise
        return ids

    def cancel(self, id: int) -> None:
        """Drop a request and its chunks that were not taken yet. One that has ended already is no error."""
        with self._lock:
            self._submitted.chunks[:] = [chunk for chunk in self._submitted.chunks if chunk.index != id]
            dropped = self._drop(id)
        if dropped and not self._closed and self._failure is None:
            self._requests.flush()

    def _drop(self, id: int) -> bool:
        with self._lock:
            inbox = self._requests.cancel(id)
            if inbox is None:
                return False
            inbox.running -= 1
            inbox.changed.notify_all()
            return True

    def poll(self) -> list[Chunk]:
        """New chunks of the submitted requests; empty only when none of them is running or waiting."""
        return self._take(self._submitted)

    def _take(self, inbox: Inbox) -> list[Chunk]:
        """Wait for chunks; empty where all requests have ended. Steps, unless another thread does so already."""
        while True:
            with self._lock:
                if inbox.ready:
                    chunks = list(inbox.chunks)
                    inbox.chunks.clear()
                    self._pass_on()
                    return chunks
                self._check_open()
                if self._stepping:
                    self._wait(inbox.changed)
                    continue
                self._stepping = True
            with self._step_ends():
                chunks_of = self._requests.step()
                with self._lock:
                    for box, chunk in chunks_of:
                        box.put(chunk)
                self._requests.flush()

    def _wait(self, changed: threading.Condition) -> None:
        self._waiting.append(changed)
        try:
            changed.wait()
        except BaseException:
            self._pass_on()  # what this thread was woken for may have been its turn
            raise
        finally:
            self._waiting.remove(changed)

    @contextmanager
    def _step_ends(self) -> Iterator[None]:
        """Whatever happens, the next thread can step; what has failed for one has failed for all."""
        try:
            yield
        except BaseException as error:
            with self._lock:
                self._stepping = False
                if isinstance(error, Exception):
                    self._failure = error
                self._wake(self._waiting)
            raise
        self._stepping = False

    def _pass_on(self) -> None:
        """Wake a thread that waits, which steps if nothing has come for it meanwhile."""
        if not self._stepping:
            self._wake(self._waiting[:1])

    def _wake(self, waiting: list[threading.Condition]) -> None:
        for changed in waiting:
            changed.notify_all()

    def close(self) -> None:
        """Stop all ranks."""
        self._closed = True
        self._executor.close()  # while another thread steps, or sends to a rank that does not read
        with self._lock:
            self._wake(self._waiting)

    def _check_open(self) -> None:
        if self._closed:
            raise LadderError("this LLM has been closed: make a new one")
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
