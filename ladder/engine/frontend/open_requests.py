"""The open requests of an executor: any thread may add and cancel them while one thread steps."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Generic, TypeVar

from ladder.engine.executors.start import Executor
from ladder.engine.model_runner import AbortSequence, AddSequence, Command, NewToken
from ladder.engine.requests import Chunk, Request
from ladder.engine.scheduler import SequenceSpec
from ladder.errors import LadderError

logger = logging.getLogger(__name__)
Owner = TypeVar("Owner")  # whoever gets a request's chunks


@dataclass
class OpenRequest(Generic[Owner]):
    """A request that has not ended."""

    request: Request
    owner: Owner
    failures: int = 0  # of engines that it was sent to
    repeated: int = 0  # tokens that this engine has computed again

    def command(self, id: int) -> Command:
        request = self.request
        params = replace(request.params, stop=())  # texts are found here: the ranks know tokens
        return AddSequence(SequenceSpec(id, request.tokens, request.limit, params))

    def take(self, token: NewToken) -> Chunk | None:
        """The chunk of a new token; None where an earlier engine gave the same token before it failed."""
        request = self.request
        if self.repeated < len(request.new):
            self.repeated += 1
            if token.token == request.new[self.repeated - 1] and token.finish_reason is None:
                return None
            logger.warning("a request could not be continued: the engine computed other tokens after its restart")
            return self._error()
        try:
            chunk = request.add(token.token, token.finish_reason, token.logprobs)
        except Exception:  # of its text: no other request has to do with it
            logger.exception("a request failed")
            return self._error()
        self.repeated = len(request.new)
        return chunk

    def _error(self) -> Chunk:
        self.request.finish_reason = "error"
        return Chunk(self.request.index, (), "", "error")


class OpenRequests(Generic[Owner]):
    """By id. Commands are queued by whoever has them, and sent by `flush`."""

    def __init__(self, executor: Executor | None = None) -> None:
        """`executor`: None as long as there is none; requests are kept until `resume`."""
        # locks of which one thread may hold several levels: the garbage collector closes a stream wherever it likes
        self.lock = threading.RLock()
        self._send_lock = threading.RLock()
        self._sending = False
        self._executor = executor
        self.room = None if executor is None else executor.room  # tokens of a request, at most
        self._ids = count()
        self._open: dict[int, OpenRequest[Owner]] = {}
        self._commands: list[Command] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> int:
        """How many have no token yet."""
        with self.lock:
            return sum(not entry.request.new for entry in self._open.values())

    def add(self, requests: Sequence[Request], owner: Owner, numbered: bool = False) -> list[int]:
        """Their ids; `numbered`: which are the indices of their chunks too."""
        ids = []
        for request in requests:
            if self.room is not None and len(request.tokens) + request.limit > self.room:
                raise LadderError(
                    f"a request of {len(request.tokens)} tokens and up to {request.limit} new ones does not fit into "
                    f"the KV cache, which has room for {self.room}: lower max_new_tokens, or raise --memory"
                )
        with self.lock:
            for request in requests:
                id = next(self._ids)
                request.index = id if numbered else request.index
                self._open[id] = entry = OpenRequest(request, owner)
                ids.append(id)
                if self._executor is not None:
                    self._commands.append(entry.command(id))
        return ids

    def cancel(self, id: int) -> Owner | None:
        """Whose it was; None where it has ended."""
        with self.lock:
            entry = self._open.pop(id, None)
            if entry is None:
                return None
            if self._executor is not None:
                self._commands.append(AbortSequence(id))
            return entry.owner

    def flush(self, wait: bool = True) -> None:
        """Send the commands. `wait`: False where another thread that sends already may send these as well."""
        if not self._send_lock.acquire(blocking=wait):
            return
        try:
            if self._sending:  # further up in this thread, which goes on when it is done
                return
            self._sending = True
            try:
                while True:
                    with self.lock:
                        commands, self._commands = self._commands, []
                        executor = self._executor
                    if not commands or executor is None:
                        return
                    executor.send(commands)
            finally:
                self._sending = False
        finally:
            self._send_lock.release()

    def step(self) -> list[tuple[Owner, Chunk]]:
        """Wait for tokens; their chunks. One thread at a time."""
        assert self._executor is not None
        tokens = self._executor.poll()
        chunks: list[tuple[Owner, Chunk]] = []
        with self.lock:
            for token in tokens:
                entry = self._open.get(token.id)
                if entry is None:
                    continue  # cancelled while this token was computed
                chunk = entry.take(token)
                if chunk is None:
                    continue
                chunks.append((entry.owner, chunk))
                if chunk.finish_reason is not None:
                    del self._open[token.id]
                    if token.finish_reason is None:  # a stop text, which the ranks do not know of
                        self._commands.append(AbortSequence(token.id))
        return chunks

    def suspend(self, most: int) -> list[Owner]:
        """The executor has failed. Requests are kept for the next one, but for those that have now been with `most`
        executors that failed: one of them may be the cause. Returns their owners.
        """
        with self.lock:
            self._executor = None
            self._commands = []
            for entry in self._open.values():
                entry.failures += 1
            given_up = {id: entry.owner for id, entry in self._open.items() if entry.failures >= most}
            for id in given_up:
                del self._open[id]
        return list(given_up.values())

    def resume(self, executor: Executor) -> None:
        """All open requests are computed by another executor, from their beginning. Tokens that were given before must
        come again, and are not given twice.
        """
        with self.lock:
            self._executor, self.room = executor, executor.room
            for entry in self._open.values():
                entry.repeated = 0
            self._commands = [entry.command(id) for id, entry in self._open.items()]
