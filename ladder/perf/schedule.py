"""The schedule of a wiring: when each sub-block computes, when its all-reduce runs, what waits. No torch here."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ladder.wiring import Out, SubBlock


@dataclass(frozen=True)
class Account:
    """Seconds of one pass."""

    total: float
    all_reduces: int
    comm: float  # that all-reduces took
    waited: float  # that the computation waited for them
    slowed: float  # that it took longer beside them

    @property
    def exposed(self) -> float:
        """What the all-reduces cost."""
        return self.waited + self.slowed


def walk(
    blocks: Sequence[tuple[SubBlock, float]],
    all_reduce: float,
    first: bool,
    contention: float = 0.0,
    concurrent: int = 1,
) -> Account:
    """Sub-blocks with the seconds that each computes; an all-reduce takes `all_reduce` seconds, and at most
    `concurrent` of them run at a time, taking turns.

    The same rules as `ResidualStream`: a sub-block waits until at most `lag` all-reduces are missing, the end for all
    of them. `first`: the embedding has an all-reduce too, which every wiring waits for. A computation beside which an
    all-reduce runs takes longer by `contention` x the time that they share.
    """
    slowed = 0.0
    now = all_reduce if first else 0.0
    waited, free, count = now, [now] * concurrent, int(first)
    in_flight: deque[float] = deque()
    for block, seconds in blocks:
        while len(in_flight) > block.lag:
            arrival = in_flight.popleft()
            waited += max(0.0, arrival - now)
            now = max(now, arrival)
        shared = min(seconds, max(0.0, max(free) - now))
        now += seconds + contention * shared
        slowed += contention * shared
        if block.out is Out.REDUCE:
            turn = count % concurrent
            free[turn] = max(now, free[turn]) + all_reduce
            in_flight.append(free[turn])
            count += 1
    for arrival in in_flight:
        waited += max(0.0, arrival - now)
        now = max(now, arrival)
    return Account(now, count, count * all_reduce, waited, slowed)
