"""An OpenAI-compatible endpoint as the partner of a conversation."""

import json
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from ladder.chat.partner import Message, continued
from ladder.client.endpoint import APIS, Endpoint, EndpointError, load_httpx
from ladder.client.stream import Events, read_piece

CONNECT, READ = 10.0, 600.0  # seconds: until there is a connection; until the next piece
# how endpoints refuse the chat API for a model that has no chat template, or lack that API
REFUSALS = ("status 400", "status 404", "status 405", "status 422", "status 501")


class RemotePartner:
    """Asks the chat API; where the endpoint has none for its model, the completions API, with the text so far."""

    waits_safely = True

    def __init__(self, endpoint: Endpoint, model: str | None, sampling: Mapping[str, Any]) -> None:
        httpx = load_httpx()
        self._endpoint, self._sampling = endpoint, dict(sampling)
        self._errors = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError)
        timeout = httpx.Timeout(READ, connect=CONNECT)
        self._client = httpx.Client(headers=endpoint.headers, timeout=timeout, trust_env=not endpoint.local)
        try:
            self.name = model or self._first_model()
        except BaseException:
            self._client.close()
            raise
        self.notes: list[str] = []
        self._continues: bool | None = None  # unknown before the first answer

    def __enter__(self) -> "RemotePartner":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.close()

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        if not self._continues:
            pieces = self._streamed("chat", {"messages": [message._asdict() for message in messages]})
            try:
                first = next(pieces, "")
                self._continues = False
            except EndpointError as error:
                if self._continues is False or error.kind not in REFUSALS:
                    raise
                refusal = error
            else:
                yield first
                yield from pieces
                return
            pieces = self._streamed("completions", {"prompt": continued(messages)})
            try:
                first = next(pieces, "")
            except EndpointError:
                raise refusal from None  # not for want of a chat template
            self._continues = True
            self.notes.append(f"{self.name} is not asked by chat but to continue the text: {refusal}")
            yield first
        else:
            pieces = self._streamed("completions", {"prompt": continued(messages)})
        yield from pieces

    def _streamed(self, api: str, body: Mapping[str, Any]) -> Iterator[str]:
        events, ended = Events(), False
        content = json.dumps({"model": self.name, "stream": True, **self._sampling, **body}).encode()
        try:
            with self._client.stream("POST", self._endpoint.base + APIS[api], content=content) as answer:
                if answer.status_code != 200:
                    raise self._endpoint.refused(answer.status_code, answer.read())
                for data in answer.iter_bytes():
                    for event in events.feed(data):
                        piece = read_piece(event)
                        ended = ended or piece.finish_reason is not None
                        if piece.text:
                            yield piece.text
        except self._errors as error:
            raise self._endpoint.failure(error) from None
        if not ended and not events.done:
            raise EndpointError("closed midway", f"{self._endpoint.base} ended the answer before its end")

    def _first_model(self) -> str:
        try:
            answer = self._client.get(f"{self._endpoint.base}/models")
        except self._errors as error:
            raise self._endpoint.failure(error) from None
        if answer.status_code != 200:
            raise self._endpoint.refused(answer.status_code, answer.content)
        try:
            return self._endpoint.model(answer.json())
        except (ValueError, RecursionError):
            raise EndpointError("no JSON", f"{self._endpoint.base}/models did not answer with JSON") from None
