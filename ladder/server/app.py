"""The application: which paths there are, who may use them, and errors that are OpenAI's everywhere."""

import hmac
import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ladder.server import schema
from ladder.server.answers import ChatAnswer, CompletionAnswer
from ladder.server.endpoint import Endpoint, Served
from ladder.server.errors import ApiError, json_response
from ladder.server.metrics import CONTENT_TYPE

MOST_HEADERS = 64 * 1024  # bytes


def make_app(served: Served) -> Starlette:
    """The ASGI application of a server."""
    created = int(time.time())
    model = {"id": served.model, "object": "model", "created": created, "owned_by": "ladder"}
    model |= {"max_model_len": served.llm.setup.config.context}  # as in vLLM

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        if (name := request.path_params["name"]) != served.model:
            raise ApiError(404, f"the model {name!r} does not exist", "model", "model_not_found")
        return json_response(model)

    async def health(request: Request) -> Response:
        status = served.llm.status
        found = {"status": status.state} | ({"reason": str(status.error)} if status.error else {})
        return json_response(found, 200 if status.state == "ready" else 503)

    async def metrics(request: Request) -> Response:
        return Response(served.metrics.text(), media_type=CONTENT_TYPE)

    routes = [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/v1/completions", Endpoint(served, schema.completion, CompletionAnswer), methods=["POST"]),
        Route("/v1/chat/completions", Endpoint(served, schema.chat, ChatAnswer), methods=["POST"]),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    key = served.options.key()
    middleware = [Middleware(Headers)] + ([] if key is None else [Middleware(ApiKey, key=key)])
    handlers = {HTTPException: _http_error, ApiError: _api_error}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)  # type: ignore[arg-type]


async def _http_error(request: Request, error: HTTPException) -> Response:
    """An unknown path, or a method that it has not."""
    message = f"{request.method} {request.url.path} does not exist" if error.status_code == 404 else error.detail
    if error.status_code == 405:
        message = f"{request.url.path} does not have the method {request.method}"
    response = ApiError(error.status_code, message).response()
    response.headers.update(error.headers or {})
    return response


async def _api_error(request: Request, error: ApiError) -> Response:
    return error.response()


class Headers:
    """Refuses large ones. (uvicorn does so only where they come in several pieces.)"""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            size = len(scope["query_string"]) + sum(len(name) + len(value) for name, value in scope["headers"])
            if size > MOST_HEADERS:
                error = ApiError(431, f"the headers have more than {MOST_HEADERS} bytes", connection="close")
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ApiKey:
    """Paths below /v1 need the key; health and metrics, which say nothing of requests, do not."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in ("/health", "/metrics"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):  # in the same time wherever they differ
                error = ApiError(401, "a wrong API key, or none", code="invalid_api_key", www_authenticate="Bearer")
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
