"""One run: requests are sent when they are due, and nothing of what they gave is lost when the run is interrupted."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ladder.load.arrivals import Arrivals
from ladder.load.exchange import Clock, Exchanger, Outcome

STEP = 0.01  # seconds between two looks at the event loop
TURN = 16  # requests that are sent at a time where all are due: then those before them go on


@dataclass
class Run:
    """What a run gave. `lags`: seconds by which the client's own event loop was late, one for every look at it."""

    arrivals: Arrivals
    planned: int
    begun: float
    outcomes: list[Outcome] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    sent: int = 0
    ended: float = 0.0
    cpu: float = 0.0  # seconds of this process
    interrupted: bool = False

    @property
    def unfinished(self) -> int:
        """Requests that were under way when the run was interrupted."""
        return self.sent - len(self.outcomes)


async def run(
    exchanger: Exchanger,
    bodies: Sequence[bytes],
    arrivals: Arrivals,
    seed: int,
    finished: Callable[[Run, Outcome], None],
) -> Run:
    """Send all bodies; `finished` is called with each outcome. A run that is cancelled (Ctrl-C) returns what it has."""
    made = Run(arrivals, len(bodies), exchanger.clock())
    cpu = time.process_time()
    watcher = asyncio.create_task(_watch(exchanger.clock, made.lags))

    async def one(index: int, due: float | None) -> None:
        made.sent += 1
        outcome = await exchanger.exchange(bodies[index], index, due)
        made.outcomes.append(outcome)
        finished(made, outcome)

    async def worker(left: Iterator[int]) -> None:
        for index in left:
            await one(index, None)

    try:
        async with asyncio.TaskGroup() as group:
            if arrivals.concurrency is not None:
                left = iter(range(len(bodies)))  # of all workers together
                for _ in range(min(arrivals.concurrency, len(bodies))):
                    group.create_task(worker(left))
            else:
                for index, after in enumerate(arrivals.times(len(bodies), seed)):
                    wait = made.begun + after - exchanger.clock()
                    if wait > 0 or index % TURN == 0:
                        await asyncio.sleep(max(0.0, wait))
                    group.create_task(one(index, made.begun + after))
    except asyncio.CancelledError:
        made.interrupted = True
        if (task := asyncio.current_task()) is not None:
            task.uncancel()  # what follows is done as usual
    except ExceptionGroup as failures:  # of `finished`: a full disk
        raise failures.exceptions[0] from None
    finally:
        watcher.cancel()
        made.cpu = time.process_time() - cpu
        made.ended = exchanger.clock()
    return made


async def _watch(clock: Clock, lags: list[float]) -> None:
    while True:
        before = clock()
        await asyncio.sleep(STEP)
        lags.append(max(0.0, clock() - before - STEP))
