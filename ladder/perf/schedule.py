"""The walk over a wiring's table: when each sub-block computes, when its sum travels, who waits. No torch here."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ladder.wiring import Out, SubBlock


@dataclass(frozen=True)
class Account:
    """Seconds of one pass."""

    total: float
    sums: int
    wire: float  # that sums were on the wire
    waited: float  # that the computation waited for them
    slowed: float  # that it took longer beside them

    @property
    def exposed(self) -> float:
        """What the sums cost."""
        return self.waited + self.slowed


def walk(
    blocks: Sequence[tuple[SubBlock, float]], travel: float, first: bool, contention: float = 0.0, lanes: int = 1
) -> Account:
    """Sub-blocks with the seconds that each computes; a sum travels for `travel` seconds, one after the other, or on
    `lanes` in turn.

    The same rules as `ResidualStream`: a sub-block waits until at most `lag` sums are missing, the end for all of them.
    `first`: the embedding is a sum too, which everybody waits for. A computation beside which a sum travels takes
    longer by `contention` x the time that they share.
    """
    slowed = 0.0
    now = travel if first else 0.0
    waited, free, sums = now, [now] * lanes, int(first)
    on_the_wire: deque[float] = deque()
    for block, seconds in blocks:
        while len(on_the_wire) > block.lag:
            arrival = on_the_wire.popleft()
            waited += max(0.0, arrival - now)
            now = max(now, arrival)
        shared = min(seconds, max(0.0, max(free) - now))
        now += seconds + contention * shared
        slowed += contention * shared
        if block.out is Out.REDUCE:
            lane = sums % lanes
            free[lane] = max(now, free[lane]) + travel
            on_the_wire.append(free[lane])
            sums += 1
    for arrival in on_the_wire:
        waited += max(0.0, arrival - now)
        now = max(now, arrival)
    return Account(now, sums, sums * travel, waited, slowed)
