"""What the server counts, in the text format of Prometheus."""

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ladder.engine.async_llm import AsyncLLM
from ladder.engine.requests import Chunk, Request

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = ("ok", "refused", "cancelled", "timeout", "error")
# seconds
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
MEDIUM = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LONG = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """One server's."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "ladder_requests", "HTTP requests for generation by outcome.", ["outcome"], registry=registry
        )
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        running = Gauge("ladder_sequences_running", "Sequences that have a token.", registry=registry)
        running.set_function(lambda: llm.open - llm.waiting)
        waiting = Gauge("ladder_sequences_waiting", "Sequences without a token yet.", registry=registry)
        waiting.set_function(lambda: llm.waiting)
        ready = Gauge("ladder_engine_ready", "1 while the engine computes, 0 while it is started.", registry=registry)
        ready.set_function(lambda: float(llm.status.state == "ready"))
        failures = Gauge("ladder_engine_failures", "How often the engine has failed.", registry=registry)
        failures.set_function(lambda: llm.failures)
        self._prompt_tokens = Counter("ladder_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._new_tokens = Counter("ladder_generated_tokens", "Tokens that were generated.", registry=registry)
        self._first = Histogram(
            "ladder_time_to_first_token_seconds",
            "From request to first token.",
            buckets=MEDIUM,
            registry=registry,
        )
        self._between = Histogram(
            "ladder_inter_token_seconds", "Between two tokens of a sequence.", buckets=SHORT, registry=registry
        )
        self._whole = Histogram(
            "ladder_request_seconds", "From a request to the end of its answer.", buckets=LONG, registry=registry
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def begin(self) -> "Observed":
        return Observed(self)

    def end(self, outcome: str, seconds: float) -> None:
        self._requests.labels(outcome).inc()
        if outcome == "ok":
            self._whole.observe(seconds)

    def prompts(self, requests: Sequence[Request]) -> None:
        self._prompt_tokens.inc(sum(len(request.tokens) for request in requests if request.sample == 0))

    def tokens(self, count: int, since: float, first: bool) -> None:
        """So many new tokens of a sequence, after so many seconds."""
        self._new_tokens.inc(count)
        if first:
            self._first.observe(since)
        for _ in range(count - first):
            self._between.observe(since / (count - first))


class Observed:
    """One HTTP request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._begin = time.monotonic()
        self._last: dict[int, float] = {}  # when each result had its newest token
        self.outcome = "error"

    def add(self, chunks: Sequence[Chunk]) -> None:
        now = time.monotonic()
        for chunk in chunks:
            if chunk.token_ids:
                first = chunk.index not in self._last
                self._metrics.tokens(len(chunk.token_ids), now - self._last.get(chunk.index, self._begin), first)
                self._last[chunk.index] = now

    def end(self) -> None:
        self._metrics.end(self.outcome, time.monotonic() - self._begin)
