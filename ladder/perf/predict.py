"""The performance model: one rank's sub-blocks by what they read and compute, put through the wiring's schedule.

    sub-block = overhead + max( bytes / reading rate, operations / computing rate )
    step      = schedule( sub-blocks, all-reduces ) + contention x hidden time of these + head + the step's own overhead

Quantized weights are dequantized in registers when decoding: the bytes are those of codes and scales. In prefill they
are dequantized first, then multiplied as bf16 is: codes are read and a matrix is written beside the product.

An engine that computes sub-blocks side by side where the wiring allows it takes the shorter of both schedules.

No torch here, and no constants of a model's size: bytes and operations are counted in `costs.py`, what is fitted
belongs to an engine (`engines.py`).
"""

from dataclasses import dataclass, replace
from math import log2

from ladder.comm.link import LINKS, Link
from ladder.config import ModelConfig
from ladder.config.quantization import DENSE, NAMED, named_format
from ladder.perf.chips import Chip
from ladder.perf.costs import RankCosts, causal_pairs
from ladder.perf.engines import ENGINES, MOST_LOST, WHOLE, Engine, Stage
from ladder.perf.memory import Need
from ladder.perf.schedule import Account, Event, Phase, walk, walk_two_lanes
from ladder.wiring import Out, independent


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
    def costs(self) -> RankCosts:
        return RankCosts(self.config, self.tp, sharded_head=self.engine.sharded_head)

    @property
    def memory(self) -> Need:
        """Of one rank, with all sequences at their longest."""
        return Need(self.costs.weight_bytes, self.costs.cache_bytes(self.batch, self.prompt + self.new))

    @property
    def weights(self) -> str:
        """The name of the format of the layers' matrices."""
        return next((name for name, storage in NAMED.items() if storage == self.costs.storage), str(self.costs.storage))

    def message_bytes(self, tokens: int) -> int:
        """Of one all-reduce, or of what one pipeline stage sends to the next."""
        return tokens * self.config.hidden * self.costs.element_bytes


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
class PredictedPass:
    """A decode step or a prefill."""

    seconds: float
    parts: Parts
    account: Account
    all_reduce_time: float  # seconds of one
    sending: float  # that all of them cost the computation
    lanes: int = 1  # that its sub-blocks are computed on

    @property
    def exposed(self) -> float:
        """What the all-reduces cost in all."""
        return self.account.exposed + self.sending


def decoding_parts(s: Setting, context: float) -> Parts:
    """One step of the whole batch after `context` tokens of each sequence."""
    stage = s.engine.single if s.batch == 1 else s.engine.few
    seen = s.prompt + s.new if s.engine.whole_cache else context
    moved = 1 + s.engine.cache * s.costs.heads / s.costs.kv_heads
    cache = s.costs.layer_cache_bytes(s.batch, seen) * moved
    return _parts(s, stage, s.batch, cache, s.costs.score_operations(s.batch * seen), outputs=None)


def prompt_parts(s: Setting) -> Parts:
    """The pass over all prompts at once."""
    tokens = s.batch * s.prompt
    scores = s.costs.score_operations(causal_pairs(s.batch, s.prompt))
    return _parts(s, s.engine.prompt, tokens, 0.0, scores, outputs=tokens if s.engine.head_of_all else s.batch)


def _parts(s: Setting, stage: Stage, tokens: int, cache: float, scores: float, outputs: int | None) -> Parts:
    """`cache`: bytes of one layer's keys and values; `scores`: operations of one layer on them; `outputs`: tokens whose
    logits count, where computing them may take longer than reading the head.
    """
    reading_rate, computing_rate = s.chip.read_tb_s * 1e12, stage.efficiency * s.chip.bf16_tflop_s * 1e12
    smaller = s.engine.smaller if outputs is None else 0.0
    costs, found, bounds, read, operations = s.costs, [], [], 0.0, 0.0
    first = outputs is not None and costs.storage != DENSE  # dequantized, before they are multiplied
    for size, elements, active, more, extra, overhead in (
        (costs.attention_bytes, costs.attention, costs.attention, cache, scores, stage.attention),
        (costs.mlp_bytes(tokens), costs.mlp(tokens), costs.mlp(), 0.0, 0.0, stage.mlp),
    ):
        plain, work = elements * costs.element_bytes, 2 * active * tokens + extra
        dequantized = size + plain if first else 0.0
        size = plain if first else size
        lost = min(MOST_LOST, smaller * max(0.0, log2(WHOLE / size)))
        reach = stage.reaches.get(s.weights, stage.reach) * (1 - lost)
        reading, computing = (size / reach + more / stage.reach) / reading_rate, work / computing_rate
        found.append(overhead + max(reading, computing) + dequantized / (stage.reach * reading_rate))
        bounds.append("memory" if reading >= computing else "compute")
        read += size + more + dequantized
        operations += work
    head, layers = costs.head * costs.element_bytes, s.config.layers
    rest = max(head / (stage.reach * reading_rate), 2 * costs.head * (outputs or 0) / computing_rate)
    parts = (found[0], found[1], s.engine.step + rest)
    return Parts(*parts, layers * read + head, layers * operations, (bounds[0], bounds[1]))


def _pass(s: Setting, parts: Parts, tokens: int, lanes: int = 1, events: list[Event] | None = None) -> PredictedPass:
    all_reduce = 0.0
    if s.tp > 1:
        all_reduce = s.engine.all_reduce_seconds(s.link, s.link_name, s.message_bytes(tokens), s.tp)
    blocks = []
    for attention, mlp in s.config.sub_blocks():
        send = [s.engine.launch * (s.tp > 1 and block.out is Out.REDUCE) for block in (attention, mlp)]
        blocks += [(attention, parts.attention + send[0]), (mlp, parts.mlp + send[1])]
    contention = min(s.engine.most_contention, s.engine.contention + s.engine.contention_growth * log2(tokens))
    # the embedding's all-reduce; without any communication not even that
    reduces = sum(block.out is Out.REDUCE for block, _ in blocks)
    first = s.engine.sharded_head and s.tp > 1 and reduces > 0
    if lanes == 1:
        account = walk(blocks, all_reduce, first, contention, events=events)
    else:
        phases = _phases(s, parts)
        beside = [(block, phases[number % 2]) for number, (block, _) in enumerate(blocks)]
        account = walk_two_lanes(beside, all_reduce, first, contention, events)
    sending = s.engine.launch * reduces if s.tp > 1 and lanes == 1 else 0.0  # two lanes hide it
    return PredictedPass(account.total + parts.rest, parts, account, all_reduce, sending, lanes)


def _phases(s: Setting, parts: Parts) -> tuple[list[Phase], list[Phase]]:
    """Of an attention and of an MLP in a decode step: their first products, what reads nothing, their last product."""
    stage, costs = s.engine.single if s.batch == 1 else s.engine.few, s.costs
    found = []
    for seconds, overhead, inward in zip(
        (parts.attention, parts.mlp), (stage.attention, stage.mlp), costs.inward_shares, strict=True
    ):
        reading = seconds - overhead
        between = Phase(overhead + (s.engine.lane or 0.0), False)
        found.append([Phase(reading * inward, True), between, Phase(reading * (1 - inward), True)])
    return found[0], found[1]


def decoding(s: Setting, context: float | None = None, lanes: int | None = None) -> PredictedPass:
    """A step, by default at the mean context of the run, and on one lane or two, whichever is faster."""
    parts = decoding_parts(s, s.prompt + s.new / 2 if context is None else context)
    blocks = [block for layer in s.config.sub_blocks() for block in layer]
    possible = (1, 2) if s.engine.lane is not None and any(independent(blocks)) else (1,)
    wanted = possible if lanes is None else (lanes,)
    return min((_pass(s, parts, s.batch, count) for count in wanted), key=lambda one: one.seconds)


def events_of(s: Setting, step: PredictedPass) -> list[Event]:
    """What happens in a decode step that `decoding` predicted."""
    found: list[Event] = []
    _pass(s, step.parts, s.batch, step.lanes, found)
    return found


def prefill(s: Setting) -> PredictedPass:
    return _pass(s, prompt_parts(s), s.batch * s.prompt)


def engine_of(chip: Chip) -> Engine:
    """The engine that a chip's figures are for: the paper's measured the H100, ours the others."""
    return ENGINES["paper" if chip.name == "h100" else "ladder"]


def tpot_ms(
    size: str,
    wiring: str,
    tp: int,
    batch: int,
    context: int,
    link: Link,
    chip: str,
    layers: int | None = None,
    weights: str = "bf16",
) -> float | None:
    """Milliseconds per step of our engine at `context`; None for a chip (by torch's name) that is not in the table."""
    known = Chip.of(chip)
    if known is None:
        return None
    config = replace(ModelConfig.named(size), weights=named_format(weights))
    if layers is not None:
        config = config.first(layers)
    name = next((name for name, other in LINKS.items() if other == link), None)
    s = Setting(config.rewired(wiring), tp, batch, context, 0, known, ENGINES["ladder"], link, name)
    return decoding(s, context).seconds * 1e3
