"""OpenAI-compatible endpoints: their addresses, and their failures by kind. httpx is imported here."""

import ipaddress
import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ladder.errors import LadderError, install

APIS = {"completions": "/completions", "chat": "/chat/completions"}  # by name: the path behind /v1
DETAIL = 300  # characters of an answer that an error shows


class EndpointError(OSError):
    """An endpoint did not answer as it should. `kind` is a short name to count errors by."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def load_httpx() -> Any:
    """The package httpx, or the error that says how to install it."""
    try:
        import httpx
    except ImportError:
        raise LadderError(f"talking to an endpoint needs httpx: {install('load')}") from None
    return httpx


def is_url(text: str) -> bool:
    """Whether a text names an endpoint and not a directory."""
    return re.match(r"https?://", text, re.IGNORECASE) is not None


@dataclass(frozen=True)
class Endpoint:
    """Where an endpoint is: `base` ends with its version, as in http://127.0.0.1:8000/v1."""

    base: str
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> "Endpoint":
        """From a URL with or without /v1, or just host:port."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port_is_valid = parts.port is None or parts.port > 0
        except ValueError:  # a port that is no number, a bracket that is not closed
            parts, port_is_valid = urlsplit(""), False
        if not port_is_valid or parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", url):
            raise LadderError(f"{url!r} is not the URL of an endpoint: write it as in http://127.0.0.1:8000")
        if parts.username is not None or parts.query or parts.fragment:
            raise LadderError(
                f"the URL of an endpoint is host, port and path only: give a key with --api-key, not in {url!r}"
            )
        if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
            raise LadderError("the API key must be printable ASCII without spaces")
        path = parts.path.rstrip("/")
        for end in sorted(APIS.values(), key=len, reverse=True):
            path = path.removesuffix(end)
        return cls(urlunsplit((parts.scheme, parts.netloc, path or "/v1", "", "")), api_key)

    @property
    def headers(self) -> dict[str, str]:
        known = {"content-type": "application/json"}
        return known if self.api_key is None else {**known, "authorization": f"Bearer {self.api_key}"}

    @property
    def local(self) -> bool:
        """Whether it is on this machine: no proxy is asked then."""
        host = urlsplit(self.base).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def model(self, answer: Any) -> str:
        """The first model of what GET /models gave."""
        models = answer.get("data") if isinstance(answer, dict) else None
        first = models[0] if isinstance(models, list) and models else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str):
            raise EndpointError("no model", f"{self.base}/models names no model: give --model")
        return str(first["id"])

    def failure(self, error: Exception) -> EndpointError:
        """httpx's error as ours."""
        httpx = load_httpx()
        why = " ".join(str(error).split()) or type(error).__name__
        match error:
            case httpx.ConnectError() | httpx.ConnectTimeout():
                return EndpointError("no connection", f"no connection to {self.base}: {why}")
            case httpx.TimeoutException():
                return EndpointError("timeout", f"{self.base} did not answer in time")
            case httpx.RemoteProtocolError() | httpx.ReadError() | httpx.WriteError() | httpx.CloseError():
                return EndpointError("connection lost", f"{self.base} closed the connection: {why}")
        return EndpointError("request failed", f"the request to {self.base} failed: {why}")

    def refused(self, status: int, body: bytes) -> EndpointError:
        """An answer that is not 200, with what it says."""
        return EndpointError(f"status {status}", f"{self.base} answered with status {status}{_said(body)}")


def _said(body: bytes) -> str:
    """The message of an error's body: OpenAI's form, FastAPI's, or just text."""
    text = body[:65536].decode("utf-8", "replace")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raw = text
    for key in ("error", "message", "detail"):
        if isinstance(raw, dict) and key in raw:
            raw = raw[key]
    shown = " ".join((raw if isinstance(raw, str) else json.dumps(raw)).split())
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in shown)
    return f": {shown[:DETAIL]}" if shown else ""
