"""The Python face.

with LLM("path/to/model", wiring="ladder") as llm:
    for result in llm.generate(["Once upon a time"], SamplingParams(max_new_tokens=32)):
        print(result.text)
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ladder.engine.options import EngineOptions, SamplingParams
from ladder.engine.ranks import Ranks
from ladder.engine.requests import Chunk, Opened, Prompt, Request, Result


class LLM:
    """A loaded model. Keywords are those of `EngineOptions`."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._start(Opened(EngineOptions(Path(model), **options)), None)

    @classmethod
    def load(cls, opened: Opened, progress: Callable[[int], None] | None = None) -> "LLM":
        """From a directory that has been opened already; `progress` is told the bytes of weights as they are loaded."""
        llm = cls.__new__(cls)
        llm._start(opened, progress)
        return llm

    def _start(self, opened: Opened, progress: Callable[[int], None] | None) -> None:
        self.opened = opened
        self._ranks = Ranks(opened, progress)

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> list[Result]:
        """One result per prompt, in order. A prompt is a text or a list of token ids."""
        requests = self.opened.requests(prompts, params or SamplingParams())
        for _ in self.run(requests):
            pass
        return [result(prompt, request) for prompt, request in zip(prompts, requests, strict=True)]

    def stream(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Pieces of the results as they come, the prompts' pieces interleaved."""
        return self.run(self.opened.requests(prompts, params or SamplingParams()))

    def run(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Carry out requests that were checked before."""
        size = self.opened.options.batch
        for begin in range(0, len(requests), size):
            yield from self._run_batch(requests[begin : begin + size])

    def _run_batch(self, batch: Sequence[Request]) -> Iterator[Chunk]:
        # a finished line stays in the batch, fed with its last token again and again at the same place
        self._ranks.begin(len(batch), max(len(request.tokens) + request.limit for request in batch))
        tokens = [request.tokens for request in batch]
        while any(request.finish_reason is None for request in batch):
            logits = self._ranks.step(tokens, [request.finish_reason is None for request in batch])
            for request, line in zip(batch, logits, strict=True):
                if request.finish_reason is None:
                    yield request.add(request.sampler.choose(line), self.opened.config.eos)
            tokens = [request.new[-1:] for request in batch]

    def close(self) -> None:
        self._ranks.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def result(prompt: Prompt, request: Request) -> Result:
    """What a finished request has become."""
    assert request.finish_reason is not None
    shown = prompt if isinstance(prompt, str) else list(prompt)
    return Result(shown, request.new, request.text.text if request.text else None, request.finish_reason)
