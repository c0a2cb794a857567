"""A request's body: JSON of limited size and depth, read strictly."""

import json
from typing import Any, NoReturn

from starlette.requests import Request

from ladder.server.errors import ApiError, refused

DEPTH = 16  # lists and objects inside each other, at most


async def read_json(request: Request, most: int) -> dict[str, Any]:
    """The object in the body. Raises ClientDisconnect where the client has left."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page can send anything else to a server on its reader's machine
        raise ApiError(415, f"the content type must be application/json, not {kind or 'empty'}")
    return parse_json(await _read(request, most))


async def _read(request: Request, most: int) -> bytes:
    too_large = ApiError(413, f"the body has more than {most} bytes", code="body_too_large", connection="close")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 20 or int(length) > most):
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise too_large
    return bytes(body)


def parse_json(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant)
    except ApiError:
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise refused(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise refused("the body must be a JSON object", code="invalid_json")
    _check_depth(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise refused(f"{name!r} is in the body twice", name, "invalid_json")
        found[name] = value
    return found


def _constant(name: str) -> NoReturn:
    raise refused(f"the body is not valid JSON: {name} is no number", code="invalid_json")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    return refused(f"the body has more than {DEPTH} lists and objects inside each other", code="invalid_json")
