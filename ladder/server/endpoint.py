"""One HTTP request for generation: read, checked, answered whole or in parts, cancelled when its client leaves."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from ladder.engine.async_llm import AsyncLLM
from ladder.engine.requests import Request
from ladder.errors import LadderError, RankError
from ladder.server import schema
from ladder.server.answers import Answer, merged
from ladder.server.body import read_json
from ladder.server.chat import chat_tokens
from ladder.server.errors import ApiError, dumps, json_response, refused
from ladder.server.logprobs import TokenTexts
from ladder.server.metrics import Metrics, Observed
from ladder.server.options import ServerOptions

logger = logging.getLogger(__name__)
EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(frozen=True)
class Served:
    """What all endpoints share."""

    llm: AsyncLLM
    model: str  # its name
    options: ServerOptions
    metrics: Metrics


class Endpoint:
    """An ASGI application. `parse` reads a body, `answer` writes results."""

    def __init__(
        self,
        served: Served,
        parse: Callable[[dict[str, Any], int], schema.Asked],
        answer: Callable[[str, schema.Asked, TokenTexts], Answer],
    ) -> None:
        self._served = served
        self._parse = parse
        self._answer = answer
        self._texts = TokenTexts(served.llm.setup.tokenizer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        observed = self._served.metrics.begin()
        reply = Reply(scope, receive, send)
        try:
            await self._attempt(HttpRequest(scope, receive), reply, observed)
        except ClientDisconnect:
            observed.outcome = "cancelled"
        except asyncio.CancelledError:  # the server ends, and its grace is over
            await reply.fail(ApiError(503, "the server is shutting down", connection="close"))
        except ApiError as error:
            observed.outcome = "refused" if error.status < 500 else "timeout" if error.status == 504 else "error"
            await reply.fail(error)
        except RankError as error:
            await reply.fail(ApiError(503, str(error), code="engine_failed"))
        except LadderError as error:  # it does not fit into the cache, or there is no engine any more
            ended = self._served.llm.status.state in ("failed", "closed")
            observed.outcome = "error" if ended else "refused"
            await reply.fail(ApiError(503, str(error), code="engine_failed") if ended else schema.bad_input(error))
        except Exception:
            logger.exception("a request failed")
            await reply.fail(ApiError(500, "an internal error: see the server's log"))
        finally:
            observed.end()

    async def _attempt(self, http: HttpRequest, reply: "Reply", observed: Observed) -> None:
        seconds = self._served.options.request_timeout
        try:
            async with asyncio.timeout(seconds):
                body = await read_json(http, self._served.options.max_body)
                await until_disconnect(http.receive, self._work(body, reply, observed))
        except TimeoutError:
            raise ApiError(504, f"the request took longer than {seconds:g} s", code="timeout") from None

    async def _work(self, body: dict[str, Any], reply: "Reply", observed: Observed) -> None:
        llm = self._served.llm
        asked = self._parse(body, llm.setup.config.context)
        if asked.model not in (None, self._served.model):
            message = f"the model {asked.model!r} does not exist: this server has {self._served.model!r}"
            raise ApiError(404, message, "model", "model_not_found")
        self._admit(asked.params.n * max(1, len(asked.prompts)))
        requests = await asyncio.to_thread(self._requests, asked)
        self._admit(len(requests))
        self._served.metrics.prompts(requests)
        answer = self._answer(self._served.model, asked, self._texts)
        if asked.stream:
            await self._stream(answer, asked, requests, reply, observed)
        else:
            async with aclosing(llm.run(requests)) as parts:
                async for chunks in parts:
                    observed.add(chunks)
            _check_finite(requests)
            observed.outcome = "ok"
            await reply.whole(answer.whole(requests))

    async def _stream(
        self, answer: Answer, asked: schema.Asked, requests: list[Request], reply: "Reply", observed: Observed
    ) -> None:
        begun: set[int] = set()
        async with aclosing(self._served.llm.run(requests)) as parts:
            async for chunks in parts:
                observed.add(chunks)
                for chunk in merged(chunks):
                    request = requests[chunk.index]
                    if chunk.index not in begun and (first := answer.first(request)) is not None:
                        await reply.event(first)
                    begun.add(chunk.index)
                    if chunk.finish_reason == "error":
                        _check_finite(requests)
                    if (part := answer.part(request, chunk)) is not None:
                        await reply.event(part)
        observed.outcome = "ok"
        await reply.done(answer.usage_part(requests) if asked.include_usage else None)

    def _admit(self, count: int) -> None:
        """Refuse what would have to wait for too many others."""
        llm, options = self._served.llm, self._served.options
        most = llm.setup.options.max_num_seqs + options.max_queue
        if count > most:
            raise refused(f"the request asks for {count} results at once: this server has at most {most}", "n")
        if llm.open + count > most:
            message = f"too many requests: {llm.open} sequences are running or waiting, at most {most}"
            raise ApiError(429, message, code="queue_full", retry_after="1")

    def _requests(self, asked: schema.Asked) -> list[Request]:
        """By another thread: tokenizing a long prompt takes a while."""
        setup = self._served.llm.setup
        prompts = [chat_tokens(setup, asked.messages)] if asked.messages else list(asked.prompts)
        try:
            requests = setup.requests(prompts, asked.params)
        except LadderError as error:
            raise schema.bad_input(error) from None
        if asked.fills and (room := self._served.llm.room) is not None:
            for request in requests:  # the cache may hold less than the model's context
                request.limit = max(1, min(request.limit, room - len(request.tokens)))
        return requests


def _check_finite(requests: list[Request]) -> None:
    if any(request.finish_reason == "error" for request in requests):
        raise ApiError(500, "the request failed: the model's output is not finite, or could not be continued")


async def until_disconnect(receive: Receive, work: Any) -> None:
    """Run a coroutine; cancel it and raise ClientDisconnect when the client leaves."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        await task
    finally:
        for each in (task, leaving):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Reply:
    """A response: whole, or events; an error in either of them."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._begun = False

    async def whole(self, value: dict[str, Any]) -> None:
        self._begun = True
        await json_response(value)(self._scope, self._receive, self._send)

    async def event(self, value: dict[str, Any]) -> None:
        await self._write(b"data: " + dumps(value) + b"\n\n")

    async def done(self, last: dict[str, Any] | None) -> None:
        """The end of a stream of events, after a last one."""
        if last is not None:
            await self.event(last)
        await self._write(b"data: [DONE]\n\n", more=False)

    async def _write(self, data: bytes, more: bool = True) -> None:
        if not self._begun:
            self._begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def fail(self, error: ApiError) -> None:
        """As the response, or as the last event of one that has begun."""
        if self._begun:
            await self._write(b"data: " + dumps(error.body()) + b"\n\n", more=False)
        else:
            await error.response()(self._scope, self._receive, self._send)
