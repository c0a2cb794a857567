"""Tables of what adapting larger models takes, extrapolated from what was measured: docs/use/adapt.md."""

from functools import cache
from typing import Any, NamedTuple

from experiments.tables.figures import Table, fixed, markdown, one, those
from experiments.tables.quality import ADAPTED
from ladder.config import ModelConfig
from ladder.perf.chips import CHIPS, Chip
from ladder.perf.memory import USABLE
from ladder.train.early import TRAINED_BYTES

SIZES = {"1B": "1B", "8B": "llama-3-8b", "70B": "llama-3-70b"}
SEQ_LEN = 1024
SMALLEST = "smollm2-135m"  # the model that was adapted
TEACHER = 4 / 3  # operations with the original's pass, which computes a third of what training does
SPEED = "adapt_speed_h200"
SHAPES = {"135m": "135 M", "1b": "1.2 B"}
BEST = {"135m": 64, "1b": 16}  # sequences of a pass, of the settings that were profiled
MEASURED = "half-fittext-24M-0.0003-16-adamw-131072"
GPUS = (2, 4, 8, 16, 32, 64)


class Way(NamedTuple):
    """How a model is adapted, and the bytes of each of its weights."""

    options: str
    weight: float  # that is trained, or that an adapter is trained beside
    original: float  # 0: only its cache is there, for which it runs once, alone
    sharded: bool = False


WAYS = [
    Way("all weights", TRAINED_BYTES, 2),
    Way("all weights, `--teacher-top 64`", TRAINED_BYTES, 0),
    Way("all weights, `--fsdp`", TRAINED_BYTES, 2, True),
    Way("all weights, `--fsdp --teacher-top 64`", TRAINED_BYTES, 0, True),
    Way("`--method lora`", 4, 2),
    Way("`--method lora --teacher-top 64`", 4, 0),
    Way("`--method lora --teacher-top 64`, beside 4-bit weights", 0.5, 0),
]


@cache
def model(size: str) -> Any:
    """Of a named size, without memory for its weights."""
    import torch  # here: tables without it are written at once
    from transformers import AutoModelForCausalLM

    from ladder.train.scratch import hf_config

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config(ModelConfig.named(size)))


@cache
def weights(size: str) -> int:
    return sum(weight.numel() for weight in model(size).parameters())


@cache
def per_token(size: str) -> float:
    """Operations of a token, the original's included."""
    from ladder.train.log import operations

    return TEACHER * operations(model(size), SEQ_LEN)


def shares() -> tuple[float, float]:
    """Of an H200's peak: what adapting the smallest model and the largest that was tried reached."""
    low, high = (
        float(one(SPEED, measure="adapt_speed", run=2, shape=shape, size=size, seq_len=2048)["mfu"])
        for shape, size in BEST.items()
    )
    return low, high


def speed() -> str:
    """Tokens per second of `ladder adapt`."""
    # of what was measured in both runs the later one
    latest = {
        (line["shape"], line["teacher"], line["seq_len"], line["size"]): line
        for run in (1, 2)
        for line in those(SPEED, measure="adapt_speed", run=run, attention="as it is")
    }
    rows = []
    for (shape, teacher, seq_len, size), line in sorted(latest.items()):
        how = "`--teacher-top 64`" if teacher == "top" else "original in memory"
        figures = [f"{line['tokens_per_s'] / 1e3:,.1f}", f"{fixed(100 * line['mfu'], 1)}%", fixed(line["memory_gb"], 0)]
        rows.append([SHAPES[shape], how, f"{size} x {seq_len}", *figures])
    return markdown(["weights", "", "sequences x tokens of a pass", "thousand tokens/s", "MFU", "GB"], rows)


GROUPS = {
    "products of the layers": ("products",),
    "attention": ("attention",),
    "products of the head": ("loss products",),
    "loss": ("loss",),
    "norms, activations, additions": ("elementwise and norms", "copies"),
    "no kernel runs": ("idle",),
}


def profile() -> str:
    """Where the time of a step goes."""
    found = {
        shape: {line["group"]: float(line["share"]) for line in those(SPEED, measure="adapt_profile", shape=shape)}
        for shape in SHAPES
    }
    rows, rest = [], dict.fromkeys(SHAPES, 1.0)
    for name, groups in GROUPS.items():
        each = [sum(found[shape][group] for group in groups) for shape in SHAPES]
        rest = {shape: rest[shape] - share for shape, share in zip(SHAPES, each, strict=True)}
        rows.append([name, *(f"{fixed(100 * share, 1)}%" for share in each)])
    rows.append(["the rest, above all the optimizer", *(f"{fixed(100 * rest[shape], 1)}%" for shape in SHAPES)])
    return markdown(["", *(f"{name} weights" for name in SHAPES.values())], rows)


def hours(tokens: float, size: str) -> str:
    """Of one H200, at the larger and at the smaller share."""
    found = (tokens * per_token(size) / (3600e12 * CHIPS["h200"].bf16_tflop_s * share) for share in shares()[::-1])
    return " to ".join(fixed(value, 1) if value < 10 else f"{float(f'{value:.2g}'):,.0f}" for value in found)


def cost() -> str:
    run = one(ADAPTED, arm=MEASURED)
    alone = weights(SMALLEST)
    shown = f"{run['tokens'] / 1e6:.0f} M"
    rows = [[f"{alone / 1e9:.3f}".rstrip("0"), "measured", fixed(run["seconds"] / 3600, 2), shown, ""]]
    for size in SIZES.values():
        tokens = run["tokens"] * weights(size) / alone
        many = f"{tokens / 1e6:,.0f} M"
        own = [f"{weights(size) / 1e9:.1f}", f"{per_token(size) / 1e9:,.0f}"]
        rows.append([*own, hours(run["tokens"], size), many, hours(tokens, size)])
    low, high = (fixed(100 * share, 0) for share in shares())
    header = ["billion weights", "GFLOP a token", f"H200 hours, {shown} tokens, at {high}% to {low}% of its peak"]
    return markdown([*header, "tokens, as many a weight", "H200 hours"], rows)


def activations(size: str) -> float:
    """Bytes that training keeps of one sequence: measured with the 1B model, in proportion to layers and width."""
    line, config, measured = one("memory_h200", way="full"), ModelConfig.named(size), ModelConfig.named("1B")
    kept = line["peak_gib"] * 2**30 - TRAINED_BYTES * weights("1B")
    return float(kept / line["batch"] * config.layers * config.hidden / (measured.layers * measured.hidden))


def each_gpu(way: Way, size: str, gpus: int) -> float:
    """Bytes on each of so many."""
    own = way.weight / (gpus if way.sharded else 1) + way.original
    return max(own * weights(size) + activations(size), 2.0 * weights(size))  # the original must fit as a whole


def fits(way: Way, size: str, chip: Chip) -> str | None:
    """The fewest GPUs, and what each has to hold; None: no number of them."""
    for gpus in GPUS if way.sharded else (1,):
        if (need := each_gpu(way, size, gpus)) <= USABLE * chip.memory_gb * 1e9:
            return f"{need / 1e9:,.0f} GB on {gpus} {chip.name.upper()}"
    return None


def memory() -> str:
    chips = [CHIPS[name] for name in ("h200", "b200")]
    rows = []
    for way in WAYS:
        cells = [next((text for chip in chips if (text := fits(way, size, chip))), "no") for size in SIZES.values()]
        rows.append([way.options, *cells])
    return markdown(["", *SIZES], rows)


TABLES: dict[str, Table] = {
    "adapt-cost": cost,
    "adapt-memory": memory,
    "adapt-speed": speed,
    "adapt-profile": profile,
}
