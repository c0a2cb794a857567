"""The schedule of a wiring: when each sub-block computes, when its all-reduce runs, what waits. No torch here."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from ladder.wiring import Out, SubBlock, Wiring


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


def hideable(wiring: Wiring) -> int:
    """All-reduces of a pass beside which some sub-block computes: none of `standard`, all but the last of `ladder`."""
    account = walk([(block, 1.0) for layer in wiring.sub_blocks() for block in layer], 1.0, first=False)
    return round(account.comm - account.waited)


class Event(NamedTuple):
    """Something of a schedule that takes time; seconds since the pass began."""

    kind: str  # compute, all-reduce or wait
    block: int  # the sub-block that computes, whose partial sum it is, or that waits; one more than there are: the end
    begin: float
    end: float


def walk(
    blocks: Sequence[tuple[SubBlock, float]],
    all_reduce: float,
    first: bool,
    contention: float = 0.0,
    concurrent: int = 1,
    events: list[Event] | None = None,
) -> Account:
    """Sub-blocks with the seconds that each computes; an all-reduce takes `all_reduce` seconds, and at most
    `concurrent` of them run at a time, taking turns.

    The same rules as `ResidualStream`: a sub-block waits until at most `lag` all-reduces are missing, the end for all
    of them. `first`: the embedding has an all-reduce too, which every wiring waits for. A computation beside which an
    all-reduce runs takes longer by `contention` x the time that they share. `events`: gets what happens, after the
    embedding's all-reduce.
    """
    record = [] if events is None else events
    slowed = 0.0
    now = all_reduce if first else 0.0
    waited, free, count = now, [now] * concurrent, int(first)
    in_flight: deque[float] = deque()
    for number, (block, seconds) in enumerate(blocks):
        before = now
        while len(in_flight) > block.lag:
            arrival = in_flight.popleft()
            waited += max(0.0, arrival - now)
            now = max(now, arrival)
        shared = min(seconds, max(0.0, max(free) - now))
        record += [Event("wait", number, before, now)] * (now > before)
        begin = now
        now += seconds + contention * shared
        slowed += contention * shared
        record.append(Event("compute", number, begin, now))
        if block.out is Out.REDUCE:
            turn = count % concurrent
            sent = max(now, free[turn])
            free[turn] = sent + all_reduce
            in_flight.append(free[turn])
            record.append(Event("all-reduce", number, sent, free[turn]))
            count += 1
    before = now
    for arrival in in_flight:
        waited += max(0.0, arrival - now)
        now = max(now, arrival)
    record += [Event("wait", len(blocks), before, now)] * (now > before)
    return Account(now, count, count * all_reduce, waited, slowed)


@dataclass(frozen=True)
class Phase:
    """A part of a sub-block: seconds that it takes alone, in which it reads memory as fast as it can or not at all."""

    seconds: float
    reads: bool


@dataclass(frozen=True)
class Needs:
    """What a sub-block on one of two lanes waits for."""

    all_reduces: int  # that must be complete when it begins, of those begun before it
    ended: tuple[int, ...]  # sub-blocks that must have ended when it begins
    joins: tuple[int, ...]  # and when its last phase begins: the one whose partial sum is held


def needs(blocks: Sequence[SubBlock]) -> Iterator[Needs]:
    """By the rules of `ResidualStream`: what some reader has waited for stays in the stream."""
    begun = read = 0
    local: list[int] = []
    for number, block in enumerate(blocks):
        read = max(read, begun - block.lag)
        ended, held = local[-1:], number > 0 and blocks[number - 1].out is Out.HOLD
        yield Needs(read, tuple(ended), (number - 1,) if held else ())
        local += [number] * (block.out is Out.LOCAL)
        begun += block.out is Out.REDUCE


def walk_two_lanes(
    blocks: Sequence[tuple[SubBlock, Sequence[Phase]]],
    all_reduce: float,
    first: bool,
    contention: float = 0.0,
    events: list[Event] | None = None,
) -> Account:
    """`walk` where attention and MLP are computed on lanes of their own: a sub-block begins when what it reads is
    there. Two that read memory share its bandwidth. The last phase is the projection out, which adds the partial sum
    that is held.
    """
    record = [] if events is None else events
    wants = list(needs([block for block, _ in blocks]))
    now = all_reduce if first else 0.0
    waited, slowed, link = now, 0.0, now
    ended: set[int] = set()
    arrivals: list[float] = []  # of all-reduces, which follow each other on the link
    arrived = 0  # how many of them are there
    to_send = deque(number for number, (block, _) in enumerate(blocks) if block.out is Out.REDUCE)
    lanes = [deque(range(lane, len(blocks), 2)) for lane in (0, 1)]
    idle = [now, now]  # since when a lane has nothing to compute
    running: dict[int, deque[list[float]]] = {}  # by sub-block: seconds left of each phase, and whether it reads
    begun: dict[int, float] = {}
    while len(ended) < len(blocks):
        while arrived < len(arrivals) and arrivals[arrived] <= now:
            arrived += 1
        for lane, queue in enumerate(lanes):
            if queue and not any(number % 2 == lane for number in running):
                want = wants[queue[0]]
                if arrived >= want.all_reduces and ended.issuperset(want.ended):
                    number = queue.popleft()
                    running[number] = deque([phase.seconds, phase.reads] for phase in blocks[number][1])
                    begun[number] = now
                    record += [Event("wait", number, idle[lane], now)] * (now > idle[lane])
        active = {
            number: phases
            for number, phases in running.items()
            if len(phases) > 1 or ended.issuperset(wants[number].joins)
        }
        readers = sum(bool(phases[0][1]) for phases in active.values())
        in_flight = arrived < len(arrivals)
        pace = 1 - contention if in_flight else 1.0
        rates = {number: pace / (readers if phases[0][1] else 1) for number, phases in active.items()}
        steps = [phases[0][0] / rates[number] for number, phases in active.items()]
        step = min([*steps, *([arrivals[arrived] - now] if in_flight else [])], default=inf)
        assert step < inf, "a sub-block waits for what never comes"
        waited += 0 if active else step
        slowed += step * (1 - pace) if active else 0
        now += step
        for number, phases in active.items():
            phases[0][0] -= step * rates[number]
            if phases[0][0] < 1e-15:  # what rounding leaves
                phases.popleft()
            if not phases:
                del running[number]
                ended.add(number)
                idle[number % 2] = now
                record.append(Event("compute", number, begun[number], now))
        while to_send and to_send[0] in ended:
            sent = max(now, link)
            link = sent + all_reduce
            arrivals.append(link)
            record.append(Event("all-reduce", to_send.popleft(), sent, link))
    end = max([now, *arrivals])
    record += [Event("wait", len(blocks), now, end)] * (end > now)
    return Account(end, len(arrivals) + first, (len(arrivals) + first) * all_reduce, waited + end - now, slowed)
