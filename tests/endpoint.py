"""An OpenAI-compatible endpoint for tests: known delays, known texts, and faults that are asked for."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

TEXT = ["Never", " wait", " for", " the", " network", "."]


class FakeEndpoint:
    """Listens on a port of its own in a thread. A request's fault is what `fault(number, body)` names, if anything."""

    def __init__(
        self,
        ttft: float = 0.0,
        gap: float = 0.0,
        usage: bool = True,
        ids: bool = True,
        template: bool = True,
        keep: bool = True,
        idle: float | None = None,
        fault: Callable[[int, dict[str, Any]], str | None] = lambda number, body: None,
    ) -> None:
        self.ttft, self.gap, self.usage, self.ids, self.template = ttft, gap, usage, ids, template
        self.keep, self.idle = keep, idle  # whether a connection serves several requests; how long it waits for one
        self.fault = fault
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.running = self.most = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "FakeEndpoint":
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result()
        self._server = server
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            self._server.close()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self.idle)).decode()
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                self.heads.append(head)
                if not await self._answer(head.split(" ")[1], body, writer) or not self.keep:
                    break
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, raw: bytes, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection can be used again."""
        if path == "/v1/models":
            return self._whole(writer, 200, {"object": "list", "data": [{"id": "fake"}]})
        body = json.loads(raw)
        self.bodies.append(body)
        fault = self.fault(len(self.bodies) - 1, body)
        chat = path == "/v1/chat/completions"
        if not self.ids and isinstance(body.get("prompt"), list):
            return self._whole(writer, 400, {"error": {"message": "prompt must be a string"}})
        if chat and not self.template:
            return self._whole(writer, 400, {"error": {"message": "this model has no chat template"}})
        if fault == "500":
            return self._whole(writer, 500, {"error": {"message": "out of order"}})
        if fault == "reset":
            return False
        if fault == "no stream":
            return self._whole(writer, 200, {"choices": [{"text": "at once"}]})
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._stream(body, chat, fault, writer)
        finally:
            self.running -= 1

    async def _stream(self, body: dict[str, Any], chat: bool, fault: str | None, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n")
        writer.write(b"\r\n" if self.keep else b"connection: close\r\n\r\n")
        if chat:
            self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        await asyncio.sleep(self.ttft if fault != "slow" else 60)
        count = body.get("max_tokens", len(TEXT))
        for number in range(count):
            if number:
                await asyncio.sleep(self.gap)
            if fault and number == 2:
                if fault == "midway":
                    return False
                if fault == "early end":
                    writer.write(b"0\r\n\r\n")
                    return True
                self._data(writer, b"data: {\n\n" if fault == "broken" else b'data: {"error": {"message": "full"}}\n\n')
            text, reason = TEXT[number % len(TEXT)], "length" if number == count - 1 else None
            said = {"delta": {"content": text}} if chat else {"text": text}
            self._event(writer, {"choices": [{"index": 0, **said, "finish_reason": reason}]})
            await writer.drain()
        if self.usage:
            usage = {"prompt_tokens": self._prompt_tokens(body), "completion_tokens": count}
            self._event(writer, {"choices": [], "usage": usage})
        self._data(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _prompt_tokens(self, body: dict[str, Any]) -> int:
        """Ids as they are; a text has three tokens, and two more for each word."""
        prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        return len(prompt) if isinstance(prompt, list) else 3 + 2 * len(prompt.split())

    def _event(self, writer: asyncio.StreamWriter, value: Any) -> None:
        self._data(writer, b"data: " + json.dumps(value).encode() + b"\n\n")

    def _data(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n" % len(data) + data + b"\r\n")

    def _whole(self, writer: asyncio.StreamWriter, status: int, value: Any) -> bool:
        data = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
        head += "\r\n" if self.keep else "connection: close\r\n\r\n"
        writer.write(head.encode() + data)
        return True
