"""Where the ranks of one machine find each other: a file in memory that only their processes have open.

A store that listens on a port would answer whoever connects to it, list its keys and let them be changed. This one has
no port and no name, and ends with the last process that has it open.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.reduction import DupFd
from typing import Any

from torch.distributed import FileStore  # type: ignore[attr-defined]

from ladder.engine.executors.seal import new_token
from ladder.logs import current_level


@dataclass
class Rendezvous:
    """What the process that starts the ranks gives to each of them. Pickled, it hands its file to a child process."""

    size: int
    token: bytes = field(default_factory=new_token, repr=False)
    log_level: int = field(default_factory=current_level)
    file: int = field(default_factory=lambda: os.memfd_create("ladder-rendezvous"))

    def store(self) -> FileStore:
        """For one rank's process group."""
        return FileStore(f"/proc/self/fd/{self.file}", self.size)

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def __reduce__(self) -> tuple[Callable[..., "Rendezvous"], tuple[Any, ...]]:
        return _received, (self.size, self.token, self.log_level, DupFd(self.file))


def _received(size: int, token: bytes, log_level: int, file: Any) -> Rendezvous:
    return Rendezvous(size, token, log_level, file.detach())


def loopback() -> str | None:
    """The interface that only this machine reaches."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
