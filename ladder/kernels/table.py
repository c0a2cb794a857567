"""Which configuration of a kernel suits which shape of weight: measured on a chip (`ladder tune`), kept as data."""

import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from ladder.errors import LadderError

KERNELS = ("qkv", "gate_up", "both", "row", "head", "attend")
MOST = 64  # rows that our matrix kernels are made for; the library has the rest
SHARED = 220 * 1024  # bytes of a multiprocessor for the tiles under way
NEAREST, FURTHER = 2048, 4  # positions that attention is configured for: the fewest; how many times as many come next
BESIDE = (0, 8, 32, 64, 128, 256)  # sequences decoded beside prompts that attention is configured for; then multiples
WAVE = 256  # programs that any chip with 128 multiprocessors or more holds at once, two on each


@dataclass(frozen=True)
class Gemv:
    """One row of activations."""

    rows: int  # of the weight in a tile
    warps: int
    programs: int  # at most; each takes an equal share of the rows
    stages: int


@dataclass(frozen=True)
class SmallGemm:
    """A few rows."""

    rows: int  # of the weight in a tile; of a pair, half of them are the gate's
    depth: int  # its columns; of a quantized weight those of each warp
    splits: int  # along the inputs
    stages: int
    warps: int
    early: int  # columns that are asked for before the wait


@dataclass(frozen=True)
class Split:
    """Attention."""

    splits: int
    positions: int  # in a block
    warps: int
    stages: int  # blocks under way; finding out where a block is takes one, too
    early: int  # 1: the first block is asked for before the wait

    def within(self, shared: int, line: int) -> "Split":
        """With smaller blocks where those under way, of `line` bytes a position, need more than `shared` bytes."""
        under_way = max(1, (self.stages - 1) // 2)
        return replace(self, positions=max(16, min(self.positions, power_up_to(shared // (line * under_way)))))


Config = Gemv | SmallGemm | Split | None  # None: the library's matrix product; of both, two products


@dataclass(frozen=True)
class Shape:
    """What a configuration is chosen by."""

    kernel: str  # qkv, gate_up, both of them, row (a layer's two projections back into the stream), head, attend
    batch: int  # the bucket: a power of two
    outputs: int
    inputs: int
    pair: bool = False
    bytes: int = 2  # of an element
    lanes: int = 1  # other kernels run beside it on two
    flags: bool = False  # and some of them poll the flags of all-reduces
    bits: int = 0  # of a code, where the weight is quantized
    group: int = 0  # inputs that share a scale

    @property
    def stored(self) -> int:
        """Bits of a weight."""
        return self.bits or 8 * self.bytes

    @property
    def splittable(self) -> bool:
        """Whether whoever reads the output adds up splits: attention does, of its fused input projection."""
        return self.kernel == "qkv"


class Table:
    """Tuned configurations of one chip; shapes it does not list get a configuration by rule."""

    def __init__(self, chip: str, rows: dict[Shape, Config] | None = None) -> None:
        self.chip = chip
        self.rows = dict(rows or {})

    @classmethod
    def of(cls, chip: str) -> "Table":
        """The table that came with the package."""
        return cls(chip, _shipped().get(chip))

    def __getitem__(self, shape: Shape) -> Config:
        """On two lanes what was tuned for them, if it has the bits of one."""
        alone = replace(shape, lanes=1, flags=False)
        config = self.rows[alone] if alone in self.rows else rule(alone)
        tuned = (self.rows[known] for known in (shape, replace(shape, flags=False)) if known in self.rows)
        return next((other for other in tuned if same_bits(config, other)), config)

    def lines(self) -> list[dict[str, Any]]:
        """One JSON object per row."""
        return [
            {"chip": self.chip, **asdict(shape), "config": None if config is None else _named(config)}
            for shape, config in self.rows.items()
        ]

    @staticmethod
    def read(lines: list[dict[str, Any]]) -> dict[str, dict[Shape, Config]]:
        """The rows of every chip in `lines`."""
        tables: dict[str, dict[Shape, Config]] = {}
        for line in lines:
            line = dict(line)
            chip, raw = line.pop("chip"), line.pop("config")
            shape, config = Shape(**line), None if raw is None else _config(dict(raw))
            if not sound(shape, config):
                raise ValueError(f"{config} is not for {shape}")
            tables.setdefault(chip, {})[shape] = config
        return tables


def read_table(path: Path) -> dict[str, dict[Shape, Config]]:
    """What `ladder tune` wrote, by chip."""
    try:
        return Table.read([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
    except FileNotFoundError:
        raise LadderError(f"no such file: {path}; ladder tune writes a table of tuned kernels") from None
    except OSError as error:
        raise LadderError(f"no table of tuned kernels: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LadderError(f"{path} is no table of tuned kernels: make one with `ladder tune`") from None


_KINDS: dict[str, type[Gemv] | type[SmallGemm] | type[Split]] = {"gemv": Gemv, "small_gemm": SmallGemm, "split": Split}


def _named(config: Gemv | SmallGemm | Split) -> dict[str, Any]:
    return {"kind": next(name for name, kind in _KINDS.items() if type(config) is kind), **asdict(config)}


def _config(raw: dict[str, Any]) -> Gemv | SmallGemm | Split:
    kind = raw.pop("kind")
    raw = {"stages": 3, "early": 0, **raw} if kind == "split" else raw  # older tables do not name them
    return _KINDS["small_gemm" if kind == "skinny" else kind](**raw)  # its name in older tables


@cache
def _shipped() -> dict[str, dict[Shape, Config]]:
    text = (files("ladder.kernels") / "tuned.jsonl").read_text(encoding="utf-8")
    return Table.read([json.loads(line) for line in text.splitlines()])


def sound(shape: Shape, config: Config) -> bool:
    """Whether a kernel of this configuration computes what the shape asks for."""
    own = {} if config is None else asdict(config)
    numbers = [n for name, n in {**asdict(shape), **own}.items() if name != "kernel"]
    if not all(isinstance(n, int) and n >= 0 for n in (*numbers, *own.values())):
        return False
    if shape.kernel not in KERNELS or min(shape.batch, shape.outputs, shape.inputs, shape.bytes, shape.lanes) < 1:
        return False
    if any(n & (n - 1) for name, n in own.items() if name not in ("programs", "stages")):
        return False
    match config:
        case None:
            return shape.kernel != "attend"
        case Split():
            least = min(config.splits, config.positions // 16, config.warps, config.stages)
            return shape.kernel == "attend" and least >= 1
        case Gemv():
            fits = config.rows >= 1 and config.programs >= 1 and config.stages >= 2 and config.warps >= 1
            return fits and shape.kernel != "attend" and shape.batch == 1
        case SmallGemm():
            fits = (
                config.rows >= 16 * (1 + shape.pair) and config.depth >= 16 and config.stages >= 2 and config.warps >= 1
            )
            divided = config.splits >= 1 and shape.inputs % config.splits == 0
            if shape.bits:  # no split has a part of a group; halves of 4 bits are 16 inputs apart; nothing is early
                fits = fits and config.depth >= 32 and config.rows <= 128 and config.early == 0
                unit = shape.group if shape.group and config.splits > 1 else 32 if shape.bits == 4 else 1
                divided = divided and shape.inputs // config.splits % unit == 0
            early = divided and (config.early == 0 or 16 <= config.early <= shape.inputs // config.splits)
            return fits and early and shape.kernel != "attend" and (config.splits == 1 or shape.splittable)


def reach(positions: int) -> int:
    """How many positions attention over this many is configured for: so few numbers that all can be compiled before
    the first request comes.
    """
    found = NEAREST
    while found < positions:
        found *= FURTHER
    return found


def beside(count: int) -> int:
    """How many sequences attention of so many is configured for, where they are decoded in a pass with prompts."""
    return next((each for each in BESIDE if count <= each), -(-count // BESIDE[-1]) * BESIDE[-1])


def power_up_to(n: int) -> int:
    """The largest power of two that is not more than n."""
    return 1 << (max(n, 1).bit_length() - 1)


def rule(shape: Shape) -> Config:
    """A configuration that is never far off: tiles of some 16 to 32 KB, enough of them under way, one wave."""
    if shape.kernel == "both":  # it takes a measurement to know that one product is faster than two
        return None
    if shape.kernel == "attend":  # outputs: heads of keys on this rank; inputs: the cache's positions
        share = power_up_to(2 * WAVE // (shape.batch * shape.outputs))  # warps for a sequence's head
        warps = min(4, share)
        splits = min(share // warps, 16 if shape.inputs <= 8192 else 32, power_up_to(shape.inputs // 16))
        positions = (64 if splits >= 16 else 32 * warps) * 2 // shape.bytes
        stages = 5 if shape.batch * shape.outputs <= 3 * WAVE else 3  # all programs at once
        return Split(max(1, splits), positions, warps, 3 if splits >= 8 else stages, int(splits >= 8))
    if shape.batch == 1:
        line = shape.inputs * shape.stored // 8 * (1 + shape.pair)
        padded = power_up_to(2 * shape.inputs - 1) * shape.stored // 8 * (1 + shape.pair)
        # a multiprocessor holds two programs, each with two tiles of 32 KB under way; every thread has four inputs
        if shape.bits:
            warps, stages = max(1, min(8, padded // (1 + shape.pair) // 128)), 3
            rows = max(1, min((1 << 15) // padded, power_up_to(shape.outputs // WAVE)))
        else:
            warps = 8 if line >= 1 << 14 else 4
            rows = max(1, min(power_up_to((28 << 10) // line), power_up_to(shape.outputs // WAVE)))
            stages = 4 if rows * line < 1 << 15 else 3
        ring = rows * padded * (stages - 1)
        if ring <= SHARED:  # else a row of it is too wide
            return Gemv(rows, warps, WAVE if 2 * ring <= SHARED and warps <= 8 else WAVE // 2, stages)
    if shape.batch > MOST:
        return None
    if shape.bits:
        return _few_rows_quantized(shape)
    depth = max(16, min(128 * 2 // shape.bytes, power_up_to(shape.inputs)))
    splits = _splits(shape, rows=64, depth=depth, unit=16, most=8)
    stages = 5 if shape.batch <= 16 else 4
    early = depth if shape.inputs // splits >= 4 * depth and shape.batch <= 16 else 0
    return SmallGemm(64, depth, splits, stages, 4, early)


def _few_rows_quantized(shape: Shape) -> SmallGemm:
    """Of 4 bits and up to 8 rows tensor cores have little to do: more warps hide more of what they wait for."""
    rows, depth = (64, 128) if shape.bits == 4 else (32, 64)
    # a slice has no inputs of two groups at once; two codes of 4 bits are inputs 16 apart
    depth = max(32, min(depth, shape.group or depth, power_up_to(shape.inputs)))
    splits = _splits(shape, rows, depth, unit=shape.group or depth, most=4)
    warps = 8 if shape.bits == 4 and shape.batch <= 8 and shape.inputs // splits % (8 * depth) == 0 else 4
    return SmallGemm(rows, depth, splits, 4 if shape.batch <= 16 else 3, warps, 0)


def _splits(shape: Shape, rows: int, depth: int, unit: int, most: int) -> int:
    """So many that there is about one wave of programs; each has a multiple of `unit` inputs, `depth` at least."""
    splits = min(most, power_up_to(WAVE // -(-shape.outputs // rows))) if shape.splittable else 1
    while splits > 1 and (shape.inputs % (splits * unit) or shape.inputs // splits < depth):
        splits //= 2
    return splits


def same_bits(one: Config, other: Config) -> bool:
    """Whether kernels of both add up in the same order: steps on two lanes have the bits of those on one."""
    match one, other:
        case Gemv(), Gemv():
            return (one.rows, one.warps) == (other.rows, other.warps)
        case SmallGemm() | Split(), SmallGemm() | Split():
            return replace(one, stages=other.stages, early=other.early) == other
        case _:
            return one == other


def candidates(shape: Shape, alone: Config = None) -> list[Config]:
    """What `ladder tune` tries beside the rule's own choice; on two lanes what has the bits of `alone`, the choice on
    one.
    """
    known = rule(shape)
    if shape.lanes > 1:
        found: list[Config] = [alone]
        if isinstance(alone, Gemv):  # fewer programs leave room for others
            found += [replace(alone, programs=p, stages=s) for p in (64, 100, 128, 256) for s in (2, 3, 4, 5, 6, 8)]
        elif isinstance(alone, SmallGemm):
            found += [replace(alone, stages=s, early=early) for s in (3, 4, 5, 6, 8) for early in (0, 128, 256)]
        elif isinstance(alone, Split):
            found += [replace(alone, stages=s, early=early) for s in (3, 5) for early in (0, 1)]
        return [config for config in dict.fromkeys(found) if sound(shape, config)]
    if shape.kernel == "both":
        found = [None, *candidates(replace(shape, kernel="gate_up"))]
        return [config for config in dict.fromkeys(found) if sound(shape, config)]
    found = [known]
    if isinstance(known, Split):
        tiles = ((32, 1), (64, 2), (128, 4), (64, 4))
        ahead = ((3, 0), (5, 0), (3, 1), (5, 1))
        found += [Split(s, p, w, *each) for s in (1, 2, 4, 8, 16) for p, w in tiles for each in ahead]
    elif isinstance(known, Gemv):
        most = 4 if shape.bits else 2  # a quantized weight's rows are short
        for rows in sorted({max(1, known.rows // 2), known.rows, known.rows * 2, known.rows * most}):
            found += [Gemv(rows, w, p, s) for w, p in ((4, 256), (8, 256), (8, 128), (16, 128)) for s in (3, 4, 5)]
    elif isinstance(known, SmallGemm) and shape.bits:
        every = product((32, 64), (64, 128), (1, 4, 8) if shape.splittable else (1,), (3, 4, 5), (4, 8))
        found += [SmallGemm(rows, depth, split, stages, warps, 0) for rows, depth, split, stages, warps in every]
        found.append(None)
    elif isinstance(known, SmallGemm):
        splits = (4, 8) if shape.splittable else (1,)
        for rows, depth, stages in (
            (64, 128, 6),
            (64, 128, 8),
            (64, 256, 4),
            (32, 128, 6),
            (32, 256, 5),
            (128, 128, 5),
        ):
            found += [SmallGemm(rows, depth, s, stages, 4, early) for s in splits for early in (0, 256)]
        found += [replace(known, early=early) for early in (0, 128, 256, 512) if early <= shape.inputs // known.splits]
        found.append(None)
    return [config for config in dict.fromkeys(found) if sound(shape, config)]
