"""The explorer's server: one page and the model's answers, for this machine alone. No torch here."""

import json
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ladder.errors import LadderError
from ladder.explore.answers import Answers
from ladder.explore.choices import Choice

HOST = "127.0.0.1"
Question = Callable[[Choice], dict[str, Any]]


class Server(ThreadingHTTPServer):
    """On 127.0.0.1; knows no files."""

    daemon_threads = True

    def __init__(self, port: int, page: str, answers: Answers) -> None:
        self.page = page.encode()
        self.questions: Mapping[str, Question] = {
            "/answer": answers.of,
            "/curve": answers.curve,
            "/frontier": answers.frontier,
        }
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise LadderError(f"port {port} on {HOST} cannot be used: {error.strerror or error}") from None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "ladder"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        where = urlsplit(self.path)
        # another site may send its visitors' browsers here under a name of its own
        if self.headers.get("Host") not in (
            f"{HOST}:{self.server.server_port}",
            f"localhost:{self.server.server_port}",
        ):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"this server answers its own machine only")
        elif where.path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
        elif where.path in self.server.questions:
            status, found = self._answer(where.path, where.query)
            self._send(status, "application/json", json.dumps(found).encode())
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is no such page")

    def _answer(self, path: str, query: str) -> tuple[HTTPStatus, dict[str, Any]]:
        try:
            choice = Choice.read(dict(parse_qsl(query)))
            return HTTPStatus.OK, self.server.questions[path](choice)
        except LadderError as error:
            return HTTPStatus.OK, {"refused": str(error)}

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logging.getLogger(__name__).debug(format, *args)
