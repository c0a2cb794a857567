"""The Python API: `LLM`.

with LLM("path/to/model", wiring="ladder", tp=2) as llm:
    for result in llm.generate(["Once upon a time"], SamplingParams(max_new_tokens=32)):
        print(result.text)
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from ladder.engine.executors.start import Executor, adopt_torchrun_size, start
from ladder.engine.model_runner import AbortSequence, AddSequence, Command
from ladder.engine.options import EMBEDDED, RENAMED, EngineOptions, SamplingParams
from ladder.engine.requests import Chunk, Prompt, Request, Result
from ladder.engine.scheduler import SequenceSpec
from ladder.engine.setup import Setup
from ladder.errors import LadderError
from ladder.options import refuse_renamed


class LLM:
    """A loaded model and its ranks. Keywords are those of `EngineOptions`. Close it, or use it in a `with` block.

    Requests may be added at any time (`submit`) and cancelled at any time (`cancel`). They advance while chunks are
    asked for (`poll`, and `generate` and `stream`, which are built on it).
    """

    def __init__(self, model: str | Path = EMBEDDED, **options: Any) -> None:
        refuse_renamed(options, RENAMED)
        setup = Setup(adopt_torchrun_size(EngineOptions(Path(model), **options)))
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
        self._ids = count()
        self._open: dict[int, tuple[Request, list[Chunk]]] = {}  # by id, each with the list that its chunks go to
        self._submitted: list[Chunk] = []
        self._closed = False

    @property
    def free_slots(self) -> int:
        """How many more requests could run at once, after everything submitted and cancelled so far."""
        self._check_open()
        return self._executor.free_slots

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """The results of the prompts in order, `n` of each. A prompt is a text or a list of ids; `params` one for all
        or one each.
        """
        prompts = prompts if isinstance(prompts, str | bytes) else list(prompts)
        requests = self._requests(prompts, params)
        for _ in self.run(requests):
            pass
        return [request.result() for request in requests]

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[Chunk]:
        """Chunks of the results as they come, those of all prompts interleaved. Stopping early cancels the rest."""
        return self.run(self._requests(prompts, params))

    def run(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Run requests that were checked before. Requests submitted elsewhere advance too; their chunks are kept."""
        box: list[Chunk] = []
        ids = {self._submit(request, box) for request in requests}
        try:
            while box or ids & self._open.keys():
                while box:
                    yield box.pop(0)
                if ids & self._open.keys():
                    self._advance()
        finally:
            for id in ids:
                self.cancel(id)

    def _requests(
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
        request = self.setup.requests([prompt], params)[0]
        request.index = self._submit(request, self._submitted)
        return request.index

    def _submit(self, request: Request, box: list[Chunk]) -> int:
        self._check_open()
        id = next(self._ids)
        self._open[id] = (request, box)
        self._executor.send([AddSequence(SequenceSpec(id, request.tokens, request.limit, request.params))])
        return id

    def cancel(self, id: int) -> None:
        """Drop a request and its chunks that were not taken yet. One that has ended already is no error."""
        self._submitted[:] = [chunk for chunk in self._submitted if chunk.index != id]
        if self._open.pop(id, None) is not None and not self._closed:
            self._executor.send([AbortSequence(id)])

    def poll(self) -> list[Chunk]:
        """New chunks of the submitted requests; empty only when none of them is running or waiting."""
        while not self._submitted and any(box is self._submitted for _, box in self._open.values()):
            self._advance()
        chunks = list(self._submitted)
        self._submitted.clear()
        return chunks

    def _advance(self) -> None:
        """Wait for tokens and append their chunks to the lists of their requests."""
        self._check_open()
        aborts: list[Command] = []
        for token in self._executor.poll():
            if token.id not in self._open:
                continue  # cancelled while this token was computed
            request, box = self._open[token.id]
            box.append(request.add(token.token, token.finish_reason, token.logprobs))
            if request.finish_reason is not None:
                del self._open[token.id]
                if token.finish_reason is None:  # a stop text, which the ranks do not know of
                    aborts.append(AbortSequence(token.id))
        if aborts:
            self._executor.send(aborts)

    def close(self) -> None:
        """Stop all ranks."""
        self._closed = True
        self._executor.close()

    def _check_open(self) -> None:
        if self._closed:
            raise LadderError("this LLM has been closed: make a new one")

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
