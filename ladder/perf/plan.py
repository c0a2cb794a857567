"""Predicted figures of deployments, also of several machines, and the best of them. No torch here.

Over nodes an all-reduce is hierarchical: reduce and gather within a node on its link, a share of the message between
nodes on theirs. Pipeline stages split the layers; the batch goes through them in as many parts, so that all stages are
busy.

The first token is prefill's, so `new` tokens take new - 1 steps, as `ladder bench` counts them; an engine that was
fitted to published runs counts as those did (`Engine.first_too`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Any

from ladder.comm.link import LINKS, Link
from ladder.config import SIZES, ModelConfig
from ladder.config.quantization import NAMED, named_format
from ladder.errors import LadderError, check_known, hint, nearest
from ladder.perf.arms import link_of, wiring_of
from ladder.perf.chips import CHIPS, Chip
from ladder.perf.costs import RankCosts
from ladder.perf.engines import ENGINES, LINKED, Engine
from ladder.perf.memory import Need, TooLarge, check_memory, more_ranks
from ladder.perf.predict import PredictedPass, Setting, decoding, engine_of, prefill
from ladder.perf.reach import across, check_reach, named_for, remark, usual_link

BASE = "standard"  # what speed-ups are over
OWN_LINK = "auto"  # in place of a link: the one that GPUs of this chip are usually joined by
AS_BF16 = "share of the peak as measured in bf16"
ROOM = 0.95  # of a chip's memory that weights, keys and values may take
MOST_RANKS = 64
NODE_LINK = Link(20e-6, 45e9, "a NIC of 400 Gb/s for every GPU")
SWEEPS = {
    "link": [1, 2, 3, 5, 8, 13, 20, 30, 50, 80, 130, 200, 300, 500, 1000],  # alpha, microseconds
    "batch": [1, 2, 4, 8, 16, 32, 64, 128, 256],
}


@dataclass(frozen=True)
class Deployment:
    """One setting of a plan; names as a user gives them."""

    size: str
    chip: str
    tp: int
    link: str  # or OWN_LINK
    batch: int  # sequences of one replica
    prompt: int
    new: int
    wiring: str  # or an arm's name
    engine: str = "auto"
    nodes: int = 1  # that the ranks of one all-reduce are spread over
    node_link: str | None = None
    pp: int = 1
    gpus: int | None = None  # all of them; default: one replica
    alpha_us: float | None = None  # in place of the link's own
    weights: str = "bf16"  # the format of the layers' matrices
    model: ModelConfig | None = None  # in place of the named size, which is then the name that is shown

    def __post_init__(self) -> None:
        for name in ("tp", "batch", "prompt", "new", "nodes", "pp", "gpus"):
            if getattr(self, name) is not None and not 1 <= getattr(self, name) <= 1_000_000:
                raise LadderError(f"{name} must be from 1 to a million, not {getattr(self, name)}")

    @property
    def config(self) -> ModelConfig:
        """The model, of no wiring yet."""
        return self.model or known_size(self.size)

    def linked(self) -> "Deployment":
        """The same with a link that is named."""
        if self.link != OWN_LINK:
            return self
        return replace(self, link=usual_link(Chip.parse(self.chip).links, self.tp // self.nodes))


def known_size(name: str) -> ModelConfig:
    check_known("size", name, SIZES)
    return SIZES[name]


def known_link(text: str, more: Sequence[str] = ()) -> tuple[Link, str | None]:
    """A link, and its name if it is one of the table. `more`: words that the caller takes beside links."""
    try:
        return Link.parse(text), text if text in LINKS else None
    except LadderError as error:
        also = "".join(f", or {word}" for word in more)
        raise LadderError(f"{error}{also}{hint(text, [*LINKS, *more])}") from None


def check_degree(config: ModelConfig, tp: int) -> None:
    """Refuse a number of ranks that cannot share the model, and weights that its matrices cannot be stored as."""
    try:
        config.check_degree(tp)
    except LadderError as error:
        raise LadderError(f"{error}; the nearest is {nearest(tp, config.degrees())}") from None
    RankCosts(config, tp).check_groups()


def known_engine(name: str, chip: Chip) -> Engine:
    check_known("engine", name, ("auto", *ENGINES))
    return engine_of(chip) if name == "auto" else ENGINES[name]


def over_nodes(link: Link, between: Link, tp: int, nodes: int) -> Link:
    """alpha and beta of a hierarchical all-reduce."""
    each = tp // nodes
    return Link(link.alpha + between.alpha, 1 / (1 / link.beta + 1 / (each * between.beta)))


def setting(d: Deployment) -> Setting:
    """Checked: everything that cannot be is refused here, with the nearest that can."""
    d, config = d.linked(), d.config
    config = replace(config, wiring=wiring_of(d.wiring, config.layers), weights=named_format(d.weights))
    chip = Chip.parse(d.chip)
    check_degree(config, d.tp)
    if d.tp % d.nodes:
        near = nearest(d.nodes, [n for n in range(1, d.tp + 1) if d.tp % n == 0])
        raise LadderError(f"{d.tp} ranks cannot be spread evenly over {d.nodes} nodes; the nearest is --nodes {near}")
    if d.pp > config.layers:
        layers = config.layers
        raise LadderError(f"{d.size}'s {layers} layers cannot be cut into {d.pp} stages; the nearest is --pp {layers}")
    if d.prompt + d.new > config.context:
        raise LadderError(
            f"prompt {d.prompt} and {d.new} new tokens are more than the {config.context} that {d.size} can see: "
            f"shorten them by {d.prompt + d.new - config.context}"
        )
    if d.gpus is not None and d.gpus % (d.tp * d.pp):
        each = d.tp * d.pp
        near = max(each, round(d.gpus / each) * each)
        raise LadderError(f"{d.gpus} GPUs are no whole number of replicas of {each}: the nearest is {near}")
    link, name = _link(d)
    s = Setting(config, d.tp, d.batch, d.prompt, d.new, chip, known_engine(d.engine, chip), link, name)
    _check_memory(d, s)
    return s


def _link(d: Deployment) -> tuple[Link, str | None]:
    """The link of the all-reduces, with its name where the engine may have more figures of it."""
    own = link_of(d.wiring)
    link, name = known_link(d.link)
    if own is not None:
        link, name = known_link(own)
    between = NODE_LINK if d.node_link is None else known_link(d.node_link)[0]
    check_reach(name, d.tp, d.nodes, d.node_link, d.pp)
    if d.nodes > 1 and not across(name):
        link, name = over_nodes(link, between, d.tp, d.nodes), None
    if d.alpha_us is not None and own is None:
        link = replace(link, alpha=d.alpha_us * 1e-6)
    return link, name


def _check_memory(d: Deployment, s: Setting) -> None:
    def need(s: Setting) -> Need:
        return Need(*(part / d.pp for part in s.memory))

    room = ROOM * s.chip.memory_gb * 1e9

    def ways() -> list[str]:
        found = more_ranks(s.config, d.tp, MOST_RANKS, lambda tp: need(replace(s, tp=tp)).total <= room)
        larger = [c for c in CHIPS.values() if need(s).total <= ROOM * c.memory_gb * 1e9]
        found += [f"--chip {min(larger, key=lambda chip: chip.memory_gb).name}"] if larger else []
        stored = {name: replace(s.config, weights=named_format(name)) for name in NAMED}
        smaller = [name for name, config in stored.items() if need(replace(s, config=config)).total <= room]
        found += [f"--weights {name}" for name in smaller[:1] if d.tp in stored[name].degrees()]
        found += ["a smaller --batch"] if need(s).cache > need(s).weights / 4 else []
        return found or ["more pipeline stages (--pp)"]

    check_memory(f"{d.size} at TP {d.tp}", need(s), room, f"each {s.chip.name}", ways)


def predict(d: Deployment) -> dict[str, Any]:
    """One row: what was asked for, then the figures."""
    assumed = _assumed_link(d)
    d = d.linked()
    s = setting(d)
    part = replace(s, batch=max(1, ceil(d.batch / d.pp)))
    step, first = decoding(part), prefill(s)
    hop = prompt_hop = 0.0
    stage = 1.0
    if d.pp > 1:
        between = NODE_LINK if d.node_link is None else known_link(d.node_link)[0]
        hop = (d.pp - 1) * between.seconds(s.message_bytes(part.batch))
        prompt_hop = (d.pp - 1) * between.seconds(s.message_bytes(d.prompt))
        stage = ceil(s.config.layers / d.pp) * d.pp / s.config.layers  # the longest stage sets the pace
    # as many parts of the batch as stages are under way, so none is idle; a token goes through all layers once
    tpot = step.seconds * stage + hop
    # prompts follow each other through the stages: the last enters when all others have left the first
    ttft = first.seconds * stage / d.pp * (1 + (d.pp - 1) / d.batch) + prompt_hop
    decode = (d.new - (not s.engine.first_too)) * tpot
    replicas = 1 if d.gpus is None else d.gpus // (d.tp * d.pp)
    gpus = d.tp * d.pp
    rate = d.batch * d.new / (ttft + decode)
    comm, exposed, memory, costs = step.account.comm, step.exposed, s.memory, s.costs
    return {
        "size": d.size,
        "wiring": str(s.config.wiring),
        "chip": s.chip.name,
        "engine": s.engine.name,
        "tp": d.tp,
        "pp": d.pp,
        "nodes": d.nodes,
        "replicas": replicas,
        "gpus": replicas * gpus,
        "link": link_of(d.wiring) or d.link,
        "alpha_us": _figure(s.link.alpha * 1e6),
        "batch": d.batch,
        "prompt": d.prompt,
        "new": d.new,
        "weights": d.weights,
        "bytes_per_weight": _figure(costs.bytes_per_weight),
        "prefill_s": _figure(ttft),
        "decode_s": _figure(decode),
        "tokens_per_s": _figure(rate * replicas),
        "tokens_per_s_user": _figure(1 / tpot),
        "tokens_per_s_gpu": _figure(rate / gpus),
        "tpot_ms": _figure(tpot * 1e3),
        "speedup": None,  # over standard, where that is predicted too
        "comm_ms": _figure(comm * 1e3),
        "exposed_ms": _figure(exposed * 1e3),
        "hidden": None if not comm else _figure(max(0.0, 1 - exposed / comm)),
        "all_reduces": step.account.all_reduces,
        "all_reduce_us": _figure(step.all_reduce_time * 1e6),
        "lanes": step.lanes,
        **_parts(part, step),
        "weights_gb": _figure(memory.weights / d.pp / 1e9),
        "cache_gb": _figure(memory.cache / d.pp / 1e9),
        "remark": "; ".join(filter(None, (assumed, _remark(d)))) or None,
        "assumed": _assumed(part),
    }


def _assumed_link(d: Deployment) -> str | None:
    """What is said of a link that nobody named and the table of chips does not know, either."""
    if d.link != OWN_LINK or d.tp == 1 or link_of(d.wiring) is not None or Chip.parse(d.chip).full_name:
        return None
    return f"the link of this chip is not known: {d.linked().link} is assumed, name yours with --link"


def _remark(d: Deployment) -> str | None:
    return remark(known_link(link_of(d.wiring) or d.link)[1], d.tp, d.nodes, d.node_link, d.pp)


def _parts(s: Setting, step: PredictedPass) -> dict[str, Any]:
    """Time per sub-block: what it reads or computes, and its overhead."""
    stage = s.engine.single if s.batch == 1 else s.engine.few
    found: dict[str, Any] = {}
    for name, bound, overhead in zip(("attention", "mlp"), step.parts.bound, (stage.attention, stage.mlp), strict=True):
        seconds = getattr(step.parts, name)
        found |= {f"{name}_us": _figure(seconds * 1e6), f"{name}_overhead_us": _figure(overhead * 1e6)}
        found[f"{name}_bound"] = bound
    return found | {"rest_us": _figure(step.parts.rest * 1e6)}


def _assumed(s: Setting) -> str | None:
    """What is not measured of the weights' format."""
    stage = s.engine.single if s.batch == 1 else s.engine.few
    return None if s.weights == "bf16" or s.weights in stage.reaches else AS_BF16


def _figure(value: float) -> float:
    """Five digits that count."""
    return float(f"{value:.5g}")


def plan(deployments: Iterable[Deployment]) -> list[dict[str, Any]]:
    """A row for each; those of one setting with how much faster than standard, with the same weights, they decode."""
    wanted = list(deployments)
    found = {d: predict(d) for d in wanted}
    for d, row in found.items():
        base = found.get(replace(d, wiring=BASE))
        row["speedup"] = None if base is None else _figure(base["tpot_ms"] / row["tpot_ms"])
    return [found[d] for d in wanted]


def swept(d: Deployment, what: str) -> Iterator[Deployment]:
    """`d` with one thing varied: a link's latency, or the batch as far as memory goes."""
    check_known("sweep", what, SWEEPS)
    if what == "batch":
        for batch in SWEEPS["batch"]:
            one = replace(d, batch=batch)
            try:
                setting(one)
            except LadderError:
                if batch == 1:
                    raise
                return
            yield one
    else:
        for alpha in SWEEPS["link"]:
            yield replace(d, alpha_us=alpha)


def best(
    d: Deployment,
    wirings: Iterable[str],
    target_ms: float | None,
    degrees: Sequence[int] = (),
    batches: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Every wiring, TP degree and batch that fits and is fast enough, those that serve most tokens per GPU first.

    Degrees and batches: those given, or all that make sense.
    """
    config, found = replace(d.config, weights=named_format(d.weights)), []
    most = d.nodes * min(LINKED, named_for(d.link) or LINKED)
    every = [n for n in config.degrees() if n & (n - 1) == 0 and n <= most and n % d.nodes == 0]
    for wiring, tp, batch in product(wirings, degrees or every, batches or SWEEPS["batch"]):
        if d.gpus is not None and not degrees and d.gpus % (tp * d.pp):
            continue
        try:
            row = predict(one := replace(d, wiring=wiring, tp=tp, batch=batch))
        except TooLarge:
            continue
        row["speedup"] = _figure(predict(replace(one, wiring=BASE))["tpot_ms"] / row["tpot_ms"])
        if target_ms is None or row["tpot_ms"] <= target_ms:
            found.append(row)
    if not found:
        aim = "" if target_ms is None else f" within {target_ms:g} ms per token"
        ranks = ", ".join(map(str, degrees or every))
        raise LadderError(
            f"{d.size} on {d.chip} cannot be served{aim} by {ranks} ranks: allow more time, or take a faster link or "
            "chip, or more --nodes"
        )
    return sorted(found, key=lambda row: -row["tokens_per_s_gpu"])
