"""Errors as OpenAI's clients know them: a status, and JSON with message, type, param and code."""

import json
from typing import Any

from starlette.responses import Response

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable", 504: "timeout"}


class ApiError(Exception):
    """A request that cannot be answered."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        """`headers`: with underscores for hyphens."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def body(self) -> dict[str, Any]:
        other = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, other),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The client's mistake."""
    return ApiError(400, message, param, code)


def dumps(value: Any) -> bytes:
    """JSON as UTF-8. Halves of characters that a client sent, and that an error quotes, stay escaped."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, "application/json")
