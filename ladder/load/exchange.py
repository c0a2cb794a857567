"""One request and its streamed answer, with the time of every token."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ladder.client.endpoint import APIS, Endpoint, EndpointError, load_httpx
from ladder.client.stream import Events, read_piece

Clock = Callable[[], float]


@dataclass
class Outcome:
    """What became of a request. Times are seconds of one clock."""

    index: int
    due: float  # when it should have been sent
    sent: float
    tokens_at: list[float] = field(default_factory=list)  # when each event with a token came
    ended: float = 0.0
    prompt_tokens: int | None = None
    usage_tokens: int | None = None  # new ones, as the endpoint counts them
    finish_reason: str | None = None
    error: str | None = None  # its kind
    detail: str = ""

    @property
    def output_tokens(self) -> int:
        """As the endpoint counts them; else the events that came."""
        return len(self.tokens_at) if self.usage_tokens is None else self.usage_tokens

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token."""
        return 1000 * (self.tokens_at[0] - self.sent) if self.tokens_at else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first."""
        if self.output_tokens < 2 or len(self.tokens_at) < 2:
            return None
        return 1000 * (self.tokens_at[-1] - self.tokens_at[0]) / (self.output_tokens - 1)

    @property
    def itl_ms(self) -> list[float]:
        """Inter-token latencies: from each event with a token to the next."""
        return [1000 * (b - a) for a, b in zip(self.tokens_at, self.tokens_at[1:], strict=False)]

    @property
    def e2e_ms(self) -> float:
        return 1000 * (self.ended - self.sent)


class Exchanger:
    """Sends requests over one client's connections."""

    def __init__(self, endpoint: Endpoint, api: str, timeout: float, clock: Clock = time.perf_counter) -> None:
        httpx = load_httpx()
        self.endpoint, self._timeout, self.clock = endpoint, timeout, clock
        self._url = httpx.URL(endpoint.base + APIS[api])
        self._errors = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError)
        from ladder.client.transport import ManyStreams  # which needs httpx

        headers = {**endpoint.headers, "accept-encoding": "identity"}
        self._client = httpx.AsyncClient(
            headers=headers, timeout=None, transport=ManyStreams(), trust_env=not endpoint.local
        )

    async def __aenter__(self) -> "Exchanger":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> Any:
        """An answer's JSON."""
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._client.get(self.endpoint.base + path)
        except TimeoutError:
            raise EndpointError("timeout", f"{self.endpoint.base}{path} did not answer in time") from None
        except self._errors as error:
            raise self.endpoint.failure(error) from None
        if answer.status_code != 200:
            raise self.endpoint.refused(answer.status_code, answer.content)
        try:
            return answer.json()
        except (ValueError, RecursionError):
            raise EndpointError("no JSON", f"{self.endpoint.base}{path} did not answer with JSON") from None

    async def exchange(self, body: bytes, index: int = 0, due: float | None = None) -> Outcome:
        """Send a request and read its answer to the end. A failure is in the outcome, not raised."""
        now = self.clock()
        outcome = Outcome(index, now if due is None else due, now)
        try:
            async with asyncio.timeout(self._timeout):
                await self._read(body, outcome)
        except TimeoutError:
            outcome.error, outcome.detail = "timeout", f"no end of the answer after {self._timeout:g} s"
        except EndpointError as error:
            outcome.error, outcome.detail = error.kind, str(error)
        except self._errors as error:
            failure = self.endpoint.failure(error)
            outcome.error, outcome.detail = failure.kind, str(failure)
        outcome.ended = self.clock()
        return outcome

    async def _read(self, body: bytes, outcome: Outcome) -> None:
        events = Events()
        async with self._client.stream("POST", self._url, content=body) as answer:
            if answer.status_code != 200:
                raise self.endpoint.refused(answer.status_code, await answer.aread())
            async for data in answer.aiter_raw():
                now = self.clock()
                for event in events.feed(data):
                    piece = read_piece(event)
                    if piece.is_token:
                        outcome.tokens_at.append(now)
                    outcome.finish_reason = piece.finish_reason or outcome.finish_reason
                    if piece.prompt_tokens is not None:
                        outcome.prompt_tokens = piece.prompt_tokens
                    if piece.output_tokens is not None:
                        outcome.usage_tokens = piece.output_tokens
        if events.done or outcome.finish_reason is not None:
            return
        if "text/event-stream" not in answer.headers.get("content-type", ""):
            raise EndpointError("no stream", f"{self.endpoint.base} did not answer with a stream of events")
        raise EndpointError("closed midway", f"{self.endpoint.base} ended the stream before its end")
