"""Wirings: what each sub-block of a decoder reads, and what happens to its partial sum. No torch here.

A decoder is a sequence of sub-blocks (attention, MLP, attention, MLP, ...) around one residual stream. Two facts per
sub-block describe every published wiring:

    lag   how many all-reduces may still be in flight when the sub-block reads the stream
    out   what happens to its own partial sum: reduce it over the ranks, hold it for the next one, keep it local

A row of the table is a cycle of such pairs, repeated over the sub-blocks of a run of layers:

    standard     (0 reduce)                 every sub-block waits for the all-reduce before it
    parallel     (0 hold, 0 reduce)         attention and MLP read the same stream and share one all-reduce (PaLM)
    parallel-N   (N hold, N reduce)         ... which runs while the next N layers compute
    ladder       (1 reduce)                 every all-reduce runs while the next sub-block computes
    ladder-N     (N reduce)                 ... while the next N sub-blocks compute
    ladder-A-M   (A reduce, M reduce)       lag A for attention, lag M for the MLP
    desync-Nx    (0 local) x (N-1), 0 reduce    and the model's last sub-block reduces, wherever in the cycle it is
    desync-Nx-L  (L local) x (N-1), L reduce    ... L all-reduces behind
    desync-Nx-local, desync-Nx-L-local          the cycle alone: a model that ends within one ends local
    none         (0 local)                  no communication: what one lane could reach, not a model

A layer has as many sub-blocks as its family: two, or three in a decoder that also attends to an encoder (attention,
cross-attention, MLP). Rows that speak of a layer say it so: in `parallel` all but its last are held, and all of them
share the last one's all-reduce; in `ladder-A-M` every attention has lag A. All other rows count sub-blocks.

A `Wiring` names one row per layer. As text: `ladder`; `standard:16 ladder:16`; `standard:3 ladder` (the first 3, then
all others); `ladder@16-31` (the rest standard); `ladder standard@0,30-31` (a default, then exceptions).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby, pairwise

from ladder.errors import LadderError, hint


class Out(StrEnum):
    """What happens to a sub-block's partial sum."""

    REDUCE = "reduce"  # sum it over the ranks, together with whatever was held or has drifted
    HOLD = "hold"  # keep it out of the stream and send it together with the next one
    LOCAL = "local"  # add it to this rank's stream alone


@dataclass(frozen=True)
class SubBlock:
    """One sub-block's place in the wiring."""

    lag: int
    out: Out


Row = tuple[SubBlock, ...]

ROWS: dict[str, Row] = {
    "standard": (SubBlock(0, Out.REDUCE),),
    "parallel": (SubBlock(0, Out.HOLD), SubBlock(0, Out.REDUCE)),
    "ladder": (SubBlock(1, Out.REDUCE),),
    "none": (SubBlock(0, Out.LOCAL),),
}

_NUMBER = r"(0|[1-9][0-9]{0,3})"
_LADDER = re.compile(rf"ladder-{_NUMBER}(?:-{_NUMBER})?")
_PARALLEL = re.compile(rf"parallel-{_NUMBER}")
_DESYNC = re.compile(rf"desync-([1-9][0-9]{{0,3}})x(?:-{_NUMBER})?(-local)?")
_KNOWN = "standard, parallel, parallel-N, ladder, ladder-N, ladder-A-M, desync-Nx, desync-Nx-L, desync-Nx-local, none"
# one for each of those
EXAMPLES = (*ROWS, "parallel-1", "ladder-2", "ladder-1-2", "desync-2x", "desync-2x-1", "desync-3x-local")


def canonical(name: str, proposed: Sequence[str] = EXAMPLES) -> str:
    """The one spelling of a row's name (`ladder-1` is `ladder`, `desync-1x` is `standard`); refuses unknown names, with
    the nearest of those `proposed`. (`desync-2x-local` is `desync-2x`: a layer ends where its cycle does.)
    """
    if name in ROWS:
        return name
    if match := _PARALLEL.fullmatch(name):
        return "parallel" if match[1] == "0" else name
    if match := _DESYNC.fullmatch(name):
        every, lag, ends = match[1], match[2] or "0", match[3] or ""
        if every == "1":
            return canonical(f"ladder-{lag}")
        return f"desync-{every}x" + (f"-{lag}" if lag != "0" else "") + (ends if every != "2" else "")
    if match := _LADDER.fullmatch(name):
        attention, mlp = match[1], match[2] or match[1]
        if attention != mlp:
            return f"ladder-{attention}-{mlp}"
        return {"0": "standard", "1": "ladder"}.get(attention, f"ladder-{attention}")
    known = f"{_KNOWN} (N, A, M, L are numbers below 10000)"
    raise LadderError(f"unknown wiring {name!r}: known are {known}{hint(name, proposed)}")


def check_names(pattern: str) -> None:
    """Refuse a pattern that has names of no row, whatever the number of layers."""
    for item in pattern.split():
        canonical(re.split("[:@]", item)[0])


def row(name: str) -> Row:
    """The cycle of sub-blocks behind a row's name."""
    name = canonical(name)
    if name in ROWS:
        return ROWS[name]
    if match := _PARALLEL.fullmatch(name):
        return SubBlock(int(match[1]), Out.HOLD), SubBlock(int(match[1]), Out.REDUCE)
    if match := _DESYNC.fullmatch(name):
        lag = int(match[2] or 0)
        return (SubBlock(lag, Out.LOCAL),) * (int(match[1]) - 1) + (SubBlock(lag, Out.REDUCE),)
    lags = [int(lag) for lag in name.split("-")[1:]]
    return tuple(SubBlock(lag, Out.REDUCE) for lag in lags)


def ends_with_reduce(name: str) -> bool:
    """Whether a model that ends with this row ends with an all-reduce, wherever in its cycle the row is then."""
    match = _DESYNC.fullmatch(name)
    return match is not None and match[3] is None


def layer_cycle(name: str, count: int) -> Row:
    """The cycle behind a row's name for layers of `count` sub-blocks, of which the last is the MLP."""
    cycle, name = row(name), canonical(name)
    of_a_layer = cycle[0].out is Out.HOLD or (name.startswith("ladder") and len(cycle) == 2)
    return cycle[:1] * (count - 1) + cycle[1:] if of_a_layer else cycle


def independent(blocks: Sequence[SubBlock]) -> list[bool]:
    """Whether each sub-block may run at the same time as the one before it, whose result it does not read."""
    free = (one.out is Out.HOLD or (one.out is Out.REDUCE and other.lag > 0) for one, other in pairwise(blocks))
    return [False, *free]


def read_together(attention: SubBlock, mlp: SubBlock) -> bool:
    """Whether the MLP of a layer reads the same stream as its attention, which sends nothing. (Where attention sends,
    as in ladder-0-1 and ladder-1-2, the MLP's first product hides the all-reduce, and must come after it.)
    """
    return attention.out is Out.HOLD and mlp.lag >= attention.lag


@dataclass(frozen=True)
class Wiring:
    """One row name per layer."""

    layers: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(canonical(name) for name in self.layers))

    @classmethod
    def parse(cls, text: str, layers: int) -> "Wiring":
        """Read a pattern and check it against the number of layers."""
        items = text.split()
        if not items:
            raise LadderError("empty wiring: write for example 'ladder', 'standard:16 ladder:16' or 'ladder@16-31'")
        if any(":" in item for item in items):
            return cls._from_runs(items, text, layers)
        default = items.pop(0) if "@" not in items[0] else "standard"
        names = [canonical(default)] * layers
        taken: set[int] = set()
        for item in items:
            name, at, numbers = item.partition("@")
            if not at:
                raise LadderError(f"wiring {text!r}: {item!r} needs the layers it is for, as in '{item}@16-31'")
            for layer in _numbers(numbers, text, layers):
                if layer in taken:
                    raise LadderError(f"wiring {text!r}: layer {layer} is named twice")
                taken.add(layer)
                names[layer] = canonical(name)
        return cls(tuple(names))

    @classmethod
    def _from_runs(cls, items: Sequence[str], text: str, layers: int) -> "Wiring":
        runs: list[tuple[str, int | None]] = []  # None: the layers that the others leave
        for item in items:
            if "@" in item:
                raise LadderError(f"wiring {text!r}: {item!r} cannot stand beside NAME:COUNT: write all one way")
            name, colon, count = item.partition(":")
            if colon and not re.fullmatch(r"[1-9][0-9]{0,5}", count):
                raise LadderError(f"wiring {text!r}: {item!r} is not NAME:COUNT, as in 'standard:16 ladder:16'")
            canonical(name)
            runs.append((name, int(count) if colon else None))
        open_ended = [name for name, count in runs if count is None]
        if len(open_ended) > 1:
            raise LadderError(f"wiring {text!r}: {open_ended[1]!r} needs a count, as one run alone may be what is left")
        counted = sum(count or 0 for _, count in runs)
        if counted > layers:
            raise LadderError(f"wiring {text!r} covers more than the model's {layers} layers")
        if not open_ended and counted < layers:
            raise LadderError(f"wiring {text!r} covers {counted} layers, the model has {layers}")
        if open_ended and counted == layers:
            raise LadderError(f"wiring {text!r} leaves no layer of the model's {layers} to {open_ended[0]!r}")
        return cls(tuple(name for name, count in runs for _ in range(layers - counted if count is None else count)))

    @classmethod
    def from_ladder_layers(cls, value: object, layers: int) -> "Wiring":
        """The key `ladder_layers` of the paper's checkpoints: an int n (the last n layers) or a list of numbers."""
        if value is None:
            return cls(("standard",) * layers)
        if isinstance(value, int) and not isinstance(value, bool):
            if not 0 <= value <= layers:
                raise LadderError(f"ladder_layers is {value}, the model has {layers} layers")
            return cls(("standard",) * (layers - value) + ("ladder",) * value)
        if not isinstance(value, list | tuple) or any(isinstance(n, bool) or not isinstance(n, int) for n in value):
            raise LadderError(f"ladder_layers must be a number or a list of layer numbers, not {value!r}")
        wrong = [n for n in value if not 0 <= n < layers]
        if wrong:
            raise LadderError(f"ladder_layers names layer {wrong[0]}, the model's layers are 0 to {layers - 1}")
        return cls(tuple("ladder" if n in value else "standard" for n in range(layers)))

    def __str__(self) -> str:
        """The shortest text of runs; `parse` reads it back."""
        runs = [(name, len(list(group))) for name, group in groupby(self.layers)]
        if len(runs) == 1:
            return runs[0][0]
        return " ".join(f"{name}:{count}" for name, count in runs)

    @property
    def is_standard(self) -> bool:
        """Whether this is what every other program does."""
        return set(self.layers) == {"standard"}

    @property
    def local(self) -> bool:
        """Whether some partial sums stay on their ranks."""
        return any(block.out is Out.LOCAL for layer in self.sub_blocks() for block in layer)

    def sub_blocks(self) -> tuple[tuple[SubBlock, SubBlock], ...]:
        """(attention, MLP) of every layer of a decoder."""
        return tuple((attention, mlp) for attention, mlp in self.layer_blocks(2))

    def layer_blocks(self, count: int) -> tuple[Row, ...]:
        """The `count` sub-blocks of every layer. A row's cycle starts anew where a run of layers of that row starts. A
        run of desync that other layers follow may end within its cycle: the next all-reduce carries what has drifted.
        At the model's end nothing follows, so its last sub-block reduces.
        """
        table: list[Row] = []
        for name, group in groupby(self.layers):
            cycle = layer_cycle(name, count)
            for index in range(len(list(group))):
                table.append(tuple(cycle[(count * index + part) % len(cycle)] for part in range(count)))
        if self.layers and ends_with_reduce(self.layers[-1]):
            table[-1] = (*table[-1][:-1], replace(table[-1][-1], out=Out.REDUCE))
        return tuple(table)

    def all_reduces(self) -> int:
        """All-reduces of one forward pass, the embedding's not counted."""
        return sum(block.out is Out.REDUCE for layer in self.sub_blocks() for block in layer)


def _numbers(text: str, pattern: str, layers: int) -> list[int]:
    """`0,4-7` as [0, 4, 5, 6, 7]."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        if not match:
            raise LadderError(f"wiring {pattern!r}: {part!r} is not a layer number or a range such as 16-31")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= layers:
            raise LadderError(f"wiring {pattern!r}: {part!r} does not fit, the model's layers are 0 to {layers - 1}")
        numbers += range(first, last + 1)
    return numbers
