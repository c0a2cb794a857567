"""`ladder load`: runs of requests against an endpoint, one after the other, each written down as it goes."""

import asyncio
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ladder.errors import LadderError
from ladder.files import LineFile, check_appendable
from ladder.load.exchange import Exchanger, Outcome
from ladder.load.options import LoadOptions
from ladder.load.prepare import Prepared, prepare
from ladder.load.run import Run, run
from ladder.load.summary import SUMMARY, request_line, summary
from ladder.load.workload import Planned, plan
from ladder.progress import Progress

SPARE_FILES = 128  # that this process may need beside its connections


def load(options: LoadOptions, stamp: Callable[[], Mapping[str, Any]], progress: Progress) -> list[dict[str, Any]]:
    """The line of each run. `stamp`: the machine that this runs on; asked for when the endpoint has answered. What is
    wrong with the options or the file of requests is refused before anything is sent. Ctrl-C ends the runs; the one it
    meets has a line of what finished.
    """
    planned = plan(options)
    check_appendable(options.out)
    if options.out.exists():
        with options.out.open("rb") as file:
            if not (file.read(1024).lstrip() or b"{").startswith(b"{"):
                raise LadderError(f"{options.out} is no file of JSON lines: name another with --out")
    allow_connections(max(min(run.concurrency or len(planned), len(planned)) for run in options.runs))
    return asyncio.run(Load(options, planned, stamp, progress).runs())


def allow_connections(count: int) -> None:
    """A connection is an open file: raise this process's limit, or say which limit is too low."""
    if sys.platform == "win32":  # which has none
        return
    import resource

    need = count + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < need:
        if hard != resource.RLIM_INFINITY and hard < need:
            raise LadderError(
                f"{count} requests at once need {need} open files, the limit is {hard}: give --concurrency, a lower "
                f"--rate or fewer --requests, or raise the limit (ulimit -Hn)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


class Load:
    """The runs of one command: the same requests, arriving in different ways."""

    def __init__(
        self,
        options: LoadOptions,
        planned: Sequence[Planned],
        stamp: Callable[[], Mapping[str, Any]],
        progress: Progress,
    ) -> None:
        self._options, self._planned, self._progress = options, planned, progress
        self._stamp, self._machine = stamp, dict[str, Any]()
        self._before = 0  # requests of earlier runs
        self._tokens = 0  # new ones, of this run

    async def runs(self) -> list[dict[str, Any]]:
        options, found = self._options, []
        self._show(0, f"asking {options.endpoint.base}")
        async with Exchanger(options.endpoint, options.api, options.timeout) as exchanger:
            prepared = await prepare(exchanger, options, self._planned)
            self._machine.update(self._stamp())
            for arrivals in options.runs:
                id = secrets.token_hex(4)
                with LineFile(options.out).opened() as write:

                    def finished(made: Run, outcome: Outcome, id: str = id, write: Any = write) -> None:
                        write(request_line(id, made.begun, self._planned[outcome.index], outcome))
                        self._count(made, outcome, exchanger.clock())

                    made = await run(exchanger, prepared.bodies, arrivals, options.seed, finished)
                    line = self._line(id, prepared, made)
                    write(line)
                found.append(line)
                self._before, self._tokens = self._before + len(self._planned), 0
                if made.interrupted:
                    break
        return found

    def _line(self, id: str, prepared: Prepared, made: Run) -> dict[str, Any]:
        options = self._options
        head = {
            "measure": SUMMARY,
            "run": id,
            "label": options.label or prepared.model,
            "url": options.endpoint.base,
            "api": options.api,
            "model": prepared.model,
            "prompt_kind": prepared.prompt_kind,
            "prompt_length": "file" if options.requests_file else options.prompt_length,
            "output_length": "file" if options.requests_file else options.output_length,
            "sampling": options.sampling,
            "seed": options.seed,
            "timeout_s": options.timeout,
        }
        time = datetime.now(UTC).isoformat(timespec="seconds")
        return {**head, **summary(made, self._planned, options.objectives), **self._machine, "time": time}

    def _count(self, made: Run, outcome: Outcome, now: float) -> None:
        self._tokens += outcome.output_tokens
        self._show(
            len(made.outcomes), f"{made.arrivals.name}: {self._tokens / max(now - made.begun, 1e-9):.0f} tokens/s"
        )

    def _show(self, done: int, what: str) -> None:
        self._progress(self._before + done, len(self._planned) * len(self._options.runs), what)
