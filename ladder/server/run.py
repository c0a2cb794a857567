"""`ladder serve`: from options to a server that listens, and its end."""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from ladder.engine.async_llm import AsyncLLM
from ladder.engine.executors.multi_process import MultiProcessExecutor
from ladder.engine.frontend.supervisor import Restarts
from ladder.engine.options import EMBEDDED
from ladder.engine.setup import Setup
from ladder.errors import LadderError, RankError
from ladder.hub import name_of
from ladder.server.app import MOST_HEADERS, make_app
from ladder.server.endpoint import Served
from ladder.server.metrics import Metrics
from ladder.server.options import ServerOptions

logger = logging.getLogger(__name__)
BACKLOG = 2048  # connections that wait to be accepted
KEEP_ALIVE = 30  # seconds that a connection without requests stays open
LAST_WORDS = 1.0  # seconds in which requests that were cancelled at the end may still answer


def bind(options: ServerOptions) -> socket.socket:
    """Before a model is loaded: a port that is taken costs no time."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
        return listener
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LadderError(f"cannot listen on {options.host} port {options.port}: {reason}") from None


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def model_name(setup: Setup, options: ServerOptions) -> str:
    if options.served_model_name is not None:
        return options.served_model_name
    model = setup.options.model
    return "ladder-embedded" if model == EMBEDDED else name_of(model)


def load(setup: Setup, options: ServerOptions, progress: Callable[[int], None] | None = None) -> AsyncLLM:
    """Every rank is a process of its own, also a single one: it can be started again whatever happened to its GPU, and
    does not share Python's lock with the server.
    """
    if setup.tokenizer is None:
        raise LadderError(f"{setup.options.model} has no tokenizer: a server needs one")
    restarts = Restarts(options.restarts)
    return AsyncLLM.over(setup, lambda report: MultiProcessExecutor(setup, report), restarts, progress)


class Server(uvicorn.Server):
    """Ends when it is told to, or when the engine has been given up."""

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM) -> None:
        super().__init__(config)
        self._llm = llm

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._llm.status.state == "failed"

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's raises the signal once more at the end, which would look like a crash."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def make_server(llm: AsyncLLM, name: str, options: ServerOptions) -> Server:
    served = Served(llm, name, options, Metrics(llm))
    config = uvicorn.Config(
        make_app(served),
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=options.grace,  # type: ignore[arg-type]
        h11_max_incomplete_event_size=MOST_HEADERS,
    )
    return Server(config, llm)


def serve(llm: AsyncLLM, name: str, options: ServerOptions, listener: socket.socket) -> None:
    """Until a signal; closes the model and the socket."""
    try:
        server = make_server(llm, name, options)
        asyncio.run(_serve(server, listener))
        status = llm.status
    finally:
        llm.close()
        listener.close()
    if status.state == "failed":
        raise RankError(f"given up after {llm.failures} failures: {status.error}")


async def _serve(server: Server, listener: socket.socket) -> None:
    await server.serve([listener])
    # requests that were cancelled when the grace was over have yet to answer
    if left := [task for task in server.server_state.tasks if not task.done()]:
        await asyncio.wait(left, timeout=LAST_WORDS)
