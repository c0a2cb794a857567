"""The performance model: one rank's sub-blocks by what they read and compute, put through the wiring's schedule.

    sub-block = overhead + max( bytes / reading rate, operations / computing rate )
    step      = schedule( sub-blocks, sums ) + contention x hidden time of the sums + head + the step's own overhead

No torch here, and no constants of a model's size: what is fitted belongs to an engine (`engines.py`).
"""

from dataclasses import dataclass
from math import log2

from ladder.comm.link import LINKS, Link
from ladder.config import ModelConfig
from ladder.perf.chips import Chip
from ladder.perf.engines import ENGINES, WHOLE, Engine, Stage
from ladder.perf.schedule import Account, walk
from ladder.wiring import Out

BYTES = 2  # of a weight, an activation and a message's element


@dataclass(frozen=True)
class Setting:
    """What is predicted: a model under its wiring, shared by `tp` ranks."""

    config: ModelConfig
    tp: int
    batch: int
    prompt: int
    new: int
    chip: Chip
    engine: Engine
    link: Link
    link_name: str | None = None

    @property
    def kv_heads(self) -> int:
        """Of one rank: replicated where there are fewer than ranks."""
        return max(1, self.config.kv_heads // self.tp)

    @property
    def weights(self) -> tuple[int, int]:
        """Elements of one rank's attention and MLP, of one layer."""
        c = self.config
        heads = c.heads // self.tp
        attention = c.hidden * c.head_dim * (2 * heads + 2 * self.kv_heads)
        return attention, 3 * c.hidden * c.ffn // self.tp

    @property
    def weight_bytes(self) -> int:
        """Of one rank."""
        c = self.config
        ends = (1 if c.tied else 2) * c.vocab * c.hidden
        return BYTES * (c.layers * sum(self.weights) + ends // (self.tp if self.engine.sharded_head else 1))

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all requests at their longest, of one rank."""
        c = self.config
        return BYTES * 2 * c.layers * self.batch * (self.prompt + self.new) * self.kv_heads * c.head_dim


@dataclass(frozen=True)
class Parts:
    """Seconds of one attention, one MLP and the rest of a pass, with what bounds them."""

    attention: float
    mlp: float
    rest: float
    read: float  # bytes that the pass reads
    operations: float
    bound: tuple[str, str]  # memory or compute


@dataclass(frozen=True)
class Pass:
    """A pass as predicted."""

    seconds: float
    parts: Parts
    account: Account
    travel: float  # seconds of one sum
    sending: float  # that all of them cost the computation

    @property
    def exposed(self) -> float:
        """What the sums cost in all."""
        return self.account.exposed + self.sending


def _reach(stage: Stage, engine: Engine, size: float) -> float:
    return stage.reach * (1 - engine.smaller * max(0.0, log2(WHOLE / size)))


def decoding_parts(s: Setting, context: float) -> Parts:
    """One step of the whole batch with `context` tokens behind each request."""
    stage = s.engine.single if s.batch == 1 else s.engine.few
    seen = s.prompt + s.new if s.engine.whole_cache else context
    group = s.config.heads / s.tp / s.kv_heads
    cache = 2 * s.batch * seen * s.kv_heads * s.config.head_dim * BYTES * (1 + s.engine.cache * group)
    looking = 4 * s.batch * seen * s.config.heads // s.tp * s.config.head_dim
    found, bounds, read, operations = [], [], 0.0, 0.0
    for elements, more, extra, overhead in zip(
        s.weights, (cache, 0.0), (looking, 0), (stage.attention, stage.mlp), strict=True
    ):
        size = elements * BYTES
        reading = (size / _reach(stage, s.engine, size) + more / stage.reach) / (s.chip.read_tb_s * 1e12)
        computing = (2 * elements * s.batch + extra) / (stage.efficiency * s.chip.bf16_tflop_s * 1e12)
        found.append(overhead + max(reading, computing))
        bounds.append("memory" if reading >= computing else "compute")
        read += size + more
        operations += 2 * elements * s.batch + extra
    head = s.config.vocab * s.config.hidden * BYTES / (s.tp if s.engine.sharded_head else 1)
    rest = s.engine.step + head / (stage.reach * s.chip.read_tb_s * 1e12)
    layers = s.config.layers
    return Parts(found[0], found[1], rest, layers * read + head, layers * operations, (bounds[0], bounds[1]))


def prompt_parts(s: Setting) -> Parts:
    """The pass over all prompts at once."""
    stage, tokens = s.engine.prompt, s.batch * s.prompt
    rate = stage.efficiency * s.chip.bf16_tflop_s * 1e12
    looking = 2 * s.batch * s.prompt**2 * s.config.heads // s.tp * s.config.head_dim  # causal: half of the square
    found, bounds, read, operations = [], [], 0.0, 0.0
    for elements, extra, overhead in zip(s.weights, (looking, 0), (stage.attention, stage.mlp), strict=True):
        computing = (2 * elements * tokens + extra) / rate
        reading = elements * BYTES / (stage.reach * s.chip.read_tb_s * 1e12)
        found.append(overhead + max(computing, reading))
        bounds.append("compute" if computing > reading else "memory")
        read += elements * BYTES
        operations += 2 * elements * tokens + extra
    outputs = tokens if s.engine.head_of_all else s.batch
    head = s.config.vocab * s.config.hidden / (s.tp if s.engine.sharded_head else 1)
    rest = s.engine.step + max(2 * head * outputs / rate, head * BYTES / (stage.reach * s.chip.read_tb_s * 1e12))
    layers = s.config.layers
    return Parts(found[0], found[1], rest, layers * read + head * BYTES, layers * operations, (bounds[0], bounds[1]))


def _pass(s: Setting, parts: Parts, tokens: int) -> Pass:
    travel = 0.0
    if s.tp > 1:
        travel = s.engine.travel(s.link, s.link_name, tokens * s.config.hidden * BYTES, s.tp)
    blocks = []
    for attention, mlp in s.config.wiring.sub_blocks():
        send = [s.engine.launch * (s.tp > 1 and block.out is Out.REDUCE) for block in (attention, mlp)]
        blocks += [(attention, parts.attention + send[0]), (mlp, parts.mlp + send[1])]
    contention = min(s.engine.most_contention, s.engine.contention + s.engine.contention_growth * log2(tokens))
    # the embedding's sum; without any communication not even that
    first = s.engine.sharded_head and s.tp > 1 and s.config.wiring.sums() > 0
    account = walk(blocks, travel, first, contention)
    sending = s.engine.launch * s.config.wiring.sums() if s.tp > 1 else 0.0
    return Pass(account.total + parts.rest, parts, account, travel, sending)


def decoding(s: Setting, context: float | None = None) -> Pass:
    """A step, by default at the mean context of the run."""
    return _pass(s, decoding_parts(s, s.prompt + s.new / 2 if context is None else context), s.batch)


def prefill(s: Setting) -> Pass:
    return _pass(s, prompt_parts(s), s.batch * s.prompt)


def engine_of(chip: Chip) -> Engine:
    """The engine that a chip's figures are for: the paper's measured the H100, ours the others."""
    return ENGINES["paper" if chip.name == "h100" else "ladder"]


def tpot_ms(
    size: str, wiring: str, tp: int, batch: int, context: int, link: Link, chip: str, layers: int | None = None
) -> float | None:
    """Milliseconds per step of our engine at `context`; None for a chip (by torch's name) that is not in the table."""
    known = Chip.of(chip)
    if known is None:
        return None
    config = ModelConfig.named(size)
    if layers is not None:
        config = config.first(layers)
    name = next((name for name, other in LINKS.items() if other == link), None)
    s = Setting(config.rewired(wiring), tp, batch, context, 0, known, ENGINES["ladder"], link, name)
    return decoding(s, context).seconds * 1e3
