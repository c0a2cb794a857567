"""Engines in processes of their own: started together, measured one after the other.

Starting an engine takes a minute in which the GPU has little to do; measuring needs it alone. A child says when it is
ready, waits until it is told to go on, reports one JSON object, and is gone before the next one goes on.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

READY, GO = "ready", "go\n"


class Child:
    """`python -m MODULE --child ARGUMENTS`."""

    def __init__(self, module: str, arguments: Sequence[str], switches: dict[str, str]) -> None:
        self._said = " ".join(arguments)
        command = [sys.executable, "-m", module, "--child", *arguments]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env={**os.environ, **switches}, **pipes)

    def _line(self, wanted: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(wanted):
                return line
        raise SystemExit(f"{self._said} failed: status {self._process.wait()}")

    def wait_until_ready(self) -> None:
        self._line(READY)

    def measure(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(GO)
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._line("{"))
        self._process.wait()
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def measured(
    module: str, arms: Sequence[Sequence[str]], at_once: int, switches: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """What a child for each of `arms` reports, in their order; `at_once` of them start together."""
    for first in range(0, len(arms), at_once):
        children = [Child(module, arguments, switches) for arguments in arms[first : first + at_once]]
        try:
            for child in children:
                child.wait_until_ready()
            for child in children:
                yield child.measure()
        finally:
            for child in children:
                child.kill()


def ready() -> None:
    """In a child: waits for its turn."""
    print(READY, flush=True)
    if sys.stdin.readline() != GO:
        os._exit(1)


def report(found: dict[str, Any]) -> NoReturn:
    """In a child: the end. An engine inside a process may take long to be taken apart."""
    print(json.dumps(found), flush=True)
    os._exit(0)
