"""What happens during some layers of a predicted step: computation, all-reduces, and what waits. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass

from ladder.perf.plan import Deployment, setting
from ladder.perf.predict import decoding, events_of
from ladder.perf.schedule import Event, needs
from ladder.wiring import Out, SubBlock

KINDS = ("attention", "MLP")


@dataclass(frozen=True)
class Bar:
    """Something that takes time; microseconds since the first of the layers began to compute.

    `kind`: attention, MLP, all-reduce or wait. `name`: the sub-block that computes, that waits, or whose partial sum it
    is. `after`: what the computation reads last: the sub-block of the newest all-reduce that must be complete, and when
    that is.
    """

    kind: str
    name: str
    lane: int  # that it is computed on; of an all-reduce that of its sub-block
    begin: float
    end: float
    after: str | None = None
    since: float | None = None


@dataclass(frozen=True)
class Timeline:
    """Some layers in the second half of a step, where a model that changes its wiring halfway has changed it."""

    wiring: str
    lanes: int
    first: int  # layer
    layers: int
    microseconds: float  # from the first of them to the first that follows
    bars: tuple[Bar, ...]


def timeline(d: Deployment, layers: int = 2) -> Timeline:
    """`layers` of a step of `d`, cut off where they begin and end."""
    s = setting(d)
    step = decoding(s)
    blocks = [block for layer in s.config.sub_blocks() for block in layer]
    layers = min(layers, s.config.layers)
    first = min(3 * s.config.layers // 4, s.config.layers - layers)
    events = events_of(s, step)
    begins = {event.block: event.begin for event in events if event.kind == "compute"}
    start, until = begins[2 * first], begins.get(2 * (first + layers), max(event.end for event in events))
    there = [event for event in events if s.tp > 1 or event.kind != "all-reduce"]  # one GPU has none
    bars = [_bar(event, start, until) for event in there if event.end > start and event.begin < until]
    sums = _newest(blocks) if s.tp > 1 else {}
    ends = {event.block: event.end for event in events if event.kind == "all-reduce"}
    linked = [_linked(bar, event, sums, ends, start) for bar, event in bars]
    return Timeline(str(s.config.wiring), step.lanes, first, layers, (until - start) * 1e6, tuple(linked))


def _bar(event: Event, start: float, until: float) -> tuple[Bar, Event]:
    kind = KINDS[event.block % 2] if event.kind == "compute" else event.kind
    begin, end = (max(event.begin, start) - start) * 1e6, (min(event.end, until) - start) * 1e6
    return Bar(kind, _name(event.block), event.block % 2, begin, end), event


def _name(block: int) -> str:
    return f"{KINDS[block % 2]} {block // 2}"


def _newest(blocks: Sequence[SubBlock]) -> dict[int, int]:
    """By sub-block: whose all-reduce is the newest that it needs."""
    begun = [number for number, block in enumerate(blocks) if block.out is Out.REDUCE]
    return {number: begun[need.all_reduces - 1] for number, need in enumerate(needs(blocks)) if need.all_reduces}


def _linked(bar: Bar, event: Event, sums: dict[int, int], ends: dict[int, float], start: float) -> Bar:
    if event.kind != "compute" or event.block not in sums or event.begin < start:
        return bar
    read = sums[event.block]
    return Bar(*(bar.kind, bar.name, bar.lane, bar.begin, bar.end), _name(read), (ends[read] - start) * 1e6)
