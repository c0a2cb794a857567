"""A transport of httpx's for many streams at once. httpx's own searches all connections for each request, and takes
several times as long for each event of a stream: with a thousand streams the client would be what is measured.

It has one connection for each request under way, and keeps those that are free. Time-outs are the caller's.
"""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from typing import NamedTuple

import httpx

LIMIT = 1 << 18  # bytes that are read ahead, and of an answer's head


class Origin(NamedTuple):
    """Where a connection leads."""

    host: str
    port: int
    secure: bool


class ManyStreams(httpx.AsyncBaseTransport):
    """HTTP/1.1 over asyncio's streams."""

    def __init__(self) -> None:
        self._free: dict[Origin, list[_Connection]] = {}
        self._addresses: dict[Origin, str] = {}  # that worked: a name is looked up once
        self._tls: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        secure = url.scheme == "https"
        origin = Origin(url.host, url.port or (443 if secure else 80), secure)
        head = request.method.encode() + b" " + url.raw_path + b" HTTP/1.1\r\n"
        head += b"".join(name + b": " + value + b"\r\n" for name, value in request.headers.raw) + b"\r\n"
        message = head + await request.aread()
        free = self._free.setdefault(origin, [])
        connection = None
        while free and connection is None:
            connection = free.pop()
            if connection.ended:  # the endpoint has closed it meanwhile
                connection.close()
                connection = None
        connection = connection or await self._connect(origin)
        try:
            return await connection.ask(message, request, free)
        except (OSError, EOFError) as error:  # not sent again: it may have been received
            connection.close()
            why = "no answer" if isinstance(error, EOFError) else str(error) or type(error).__name__
            raise httpx.ReadError(why, request=request) from None
        except BaseException:
            connection.close()
            raise

    async def _connect(self, origin: Origin) -> "_Connection":
        if origin.secure and self._tls is None:
            self._tls = httpx.create_ssl_context()
        tls = {"ssl": self._tls, "server_hostname": origin.host} if origin.secure else {}
        try:
            host = self._addresses.get(origin, origin.host)
            reader, writer = await asyncio.open_connection(host, origin.port, limit=LIMIT, **tls)  # type: ignore[arg-type]
        except OSError as error:
            raise httpx.ConnectError(str(error)) from None
        self._addresses[origin] = writer.get_extra_info("peername")[0]
        return _Connection(reader, writer)

    async def aclose(self) -> None:
        for connection in (one for free in self._free.values() for one in free):
            connection.close()
        self._free.clear()
        await asyncio.sleep(0)  # closing takes a turn of the event loop


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    async def ask(self, message: bytes, request: httpx.Request, free: list["_Connection"]) -> httpx.Response:
        """Send a request and read the head of its answer."""
        self._writer.write(message)
        await self._writer.drain()
        status = 100
        while 100 <= status < 200:  # what is said before the answer itself
            try:
                lines = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
                version, code, *_ = lines[0].split(b" ")
                status = int(code)
                parts = [line.partition(b":") for line in lines[1:]]
                fields = [(name.strip().lower(), value.strip()) for name, _, value in parts]
            except (ValueError, asyncio.LimitOverrunError):
                raise httpx.RemoteProtocolError("the answer is not HTTP", request=request) from None
        values = dict(fields)
        stays = version == b"HTTP/1.1" and values.get(b"connection", b"").lower() != b"close"
        length = values.get(b"content-length", b"")
        body = _Body(self, free if stays else None, b"chunked" in values.get(b"transfer-encoding", b"").lower(), length)
        return httpx.Response(status, headers=fields, stream=body, request=request)

    @property
    def ended(self) -> bool:
        """Whether the other side has closed it."""
        return self.reader.at_eof() or self.reader.exception() is not None or self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()


class _Body(httpx.AsyncByteStream):
    """The body of an answer as it comes: in chunks, of a known length, or until the connection ends."""

    def __init__(self, connection: _Connection, free: list[_Connection] | None, chunked: bool, length: bytes) -> None:
        self._connection, self._free = connection, free
        self._chunks = Chunks() if chunked else None
        self._left = int(length) if length.isdigit() else None
        self._ended = self._left == 0 and not chunked

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while not self._ended:
            try:
                data = await self._connection.reader.read(LIMIT)
            except OSError as error:
                raise httpx.ReadError(str(error) or type(error).__name__) from None
            if not data and (self._chunks is not None or self._left is not None):
                raise httpx.RemoteProtocolError("the connection ended before the answer")
            if self._chunks is not None:
                data = self._chunks.feed(data)
                self._ended = self._chunks.ended
            elif self._left is not None:
                self._left -= len(data)
                self._ended = self._left <= 0
            elif not data:
                self._ended, self._free = True, None
            if data:
                yield data

    async def aclose(self) -> None:
        if self._ended and self._free is not None:
            self._free.append(self._connection)
        else:
            self._connection.close()


class Chunks:
    """The chunked encoding, undone as bytes come."""

    def __init__(self) -> None:
        self._rest = b""
        self._left = 0  # bytes of the chunk that is being read, its line's end included
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body among these."""
        buffer, at, found = self._rest + data, 0, []
        while True:
            if self._left:
                part = buffer[at : at + self._left]
                found.append(part[: max(0, self._left - 2)] if len(part) > self._left - 2 else part)
                at += len(part)
                self._left -= len(part)
                if self._left:
                    break
            end = buffer.find(b"\r\n", at)
            if end < 0:
                if len(buffer) - at > 1024:
                    raise httpx.RemoteProtocolError("a chunk of the answer has no size")
                break
            text = buffer[at:end].partition(b";")[0].strip()
            if not re.fullmatch(rb"[0-9a-fA-F]{1,12}", text):
                raise httpx.RemoteProtocolError(f"{text[:20]!r} is no size of a chunk")
            size = int(text, 16)
            if size == 0:  # and fields may follow
                self.ended = buffer.find(b"\r\n\r\n", end) >= 0
                break
            at, self._left = end + 2, size + 2
        self._rest = buffer[at:]
        return b"".join(found)
