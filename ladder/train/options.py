"""What a training run is made of. The command line is generated from these classes."""

import math
from dataclasses import dataclass
from pathlib import Path

from ladder.errors import LadderError
from ladder.options import argument, check_types, option
from ladder.train.staleness import WAYS

DTYPES = ("bfloat16", "float32")
METHODS = ("full", "layers", "lora", "side")
WHOLE = ("full", "layers")  # those that train weights as they are
SCHEDULES = ("cosine", "linear", "constant")
OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class TrainingOptions:
    """The run itself, whatever is trained."""

    data: Path = option(Path("data"), "Folder of token shards, made by `ladder data`.")
    valid: Path | None = option(None, "Folder of token shards to evaluate on; default: the last 1% of the data.")
    tokens: int = option(100_000_000, "Tokens to train on; the data is read again and again until they are through.")
    window: int = option(1024, "Tokens in a row.")
    batch: int = option(64, "Rows in a step, over all ranks.")
    micro: int | None = option(
        None, "Rows that a rank computes at a time; default: its share of the batch, on a CPU at most 8."
    )
    lr: float = option(1e-3, "Learning rate, at its peak.")
    warmup: float = option(0.02, "Share of the steps in which it grows from 0.")
    schedule: str = option("cosine", f"How it falls, to a tenth: {', '.join(SCHEDULES)}.")
    optimizer: str = option("adamw", f"{' or '.join(OPTIMIZERS)}; muon is for matrices, the rest is AdamW's.")
    weight_decay: float = option(0.1, "Share of a weight that is taken off, times the learning rate.")
    beta2: float = option(0.95, "AdamW's.")
    clip: float = option(1.0, "Largest norm of the gradient.")
    dtype: str = option("auto", "What is computed in: auto (bfloat16 on a GPU, else float32), bfloat16 or float32.")
    device: str = option("auto", "auto (a GPU where there is one), cpu or cuda.")
    compile: str = option("auto", "torch.compile the layers and the loss: auto (on a GPU), yes or no.")
    recompute: bool = option(False, "Gradient checkpointing: less memory, a third more computing.")
    fsdp: bool = option(False, "Shard parameters and optimizer over the ranks (FSDP2); default: every rank has all.")
    seed: int = option(1, "Of the order of the data, and of what is drawn.")
    log_every: int = option(10, "Steps between two lines of log.jsonl.")
    eval_every: int | None = option(None, "Steps between two evaluations; default: ten in a run.")
    eval_tokens: int = option(262_144, "Tokens of an evaluation.")
    save_every: int | None = option(None, "Steps between two checkpoints; default: ten in a run.")
    keep: int = option(1, "Checkpoints that are kept.")

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("tokens", "window", "batch", "log_every", "eval_tokens", "keep"):
            _at_least(name, getattr(self, name), 2 if name == "window" else 1)
        for name in ("micro", "eval_every", "save_every"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name, most in (("lr", 10.0), ("clip", 1e6), ("weight_decay", 10.0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and (0 if name == "weight_decay" else 1e-12) <= value <= most):
                least = "from 0 to" if name == "weight_decay" else "above 0 and at most"
                raise LadderError(f"{name.replace('_', '-')} must be a number {least} {most}, not {value}")
        for name in ("warmup", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise LadderError(f"{name} must be from 0 to below 1, not {getattr(self, name)}")
        if not 0 <= self.seed < 2**32:
            raise LadderError(f"seed must be from 0 to 2^32 - 1, not {self.seed}")
        _known("schedule", self.schedule, SCHEDULES)
        _known("optimizer", self.optimizer, OPTIMIZERS)
        if self.optimizer == "muon" and self.fsdp:
            raise LadderError("--optimizer muon needs whole matrices, which --fsdp takes apart: leave one out")
        _known("dtype", self.dtype, ("auto", *DTYPES))
        _known("compile", self.compile, ("auto", "yes", "no"))
        _check_device(self.device)

    @property
    def steps(self) -> int:
        return -(-self.tokens // (self.batch * self.window))

    @property
    def place(self) -> str:
        return _place(self.device)

    @property
    def precision(self) -> str:
        return self.dtype if self.dtype != "auto" else "bfloat16" if self.place == "cuda" else "float32"

    @property
    def compiled(self) -> bool:
        return self.compile == "yes" or (self.compile == "auto" and self.place == "cuda")

    @property
    def save_steps(self) -> int:
        """A multiple of `log_every`, so that a resumed run's lines are those of one that was never interrupted."""
        wanted = self.save_every or max(1, self.steps // 10)
        return -(-wanted // self.log_every) * self.log_every

    def rows_at_a_time(self, ranks: int) -> tuple[int, int]:
        """(rows that a rank computes at a time, times in a step)."""
        if self.batch % ranks:
            raise LadderError(f"a batch of {self.batch} rows cannot be shared by {ranks} ranks evenly")
        share = self.batch // ranks
        micro = min(self.micro or (share if self.place == "cuda" else _few(share)), share)
        if share % micro:
            raise LadderError(f"{share} rows of a rank are no multiple of --micro {micro}")
        return micro, share // micro


@dataclass(frozen=True)
class AdaptOptions:
    """What becomes of which model."""

    model: str = argument("Directory of a checkpoint, or a model of the hub as in org/name: the teacher.")
    out: Path = argument("Folder for the adapted checkpoint; a new one, or that of a run to be continued.")
    wiring: str = option("ladder", "As in 'ladder' or 'standard:16 ladder:16'; see `ladder scan`.")
    method: str = option(
        "full",
        "What is trained: full (all weights), layers (those of the rewired layers), lora, or side (a small network "
        "beside them).",
    )
    kl_weight: float = option(1.0, "Of the KL divergence from the original, over all tokens.")
    lm_weight: float = option(0.0, "Of the language-model loss; with --kl-weight 0 plain fine-tuning.")
    hidden_weight: float = option(0.0, "Of the distance from the original's stream after each layer, relative to it.")
    begin: Path | None = option(
        None,
        "Begin with these weights, of the same wiring (side: stay with them): what `ladder fit` or a run left.",
    )
    staleness: float | None = option(
        None,
        "Share of the steps in which staleness moves from 0 to 1; default: 0.5, with --begin or side 0: at once.",
    )
    staleness_way: str = option("together", f"How it moves: {', '.join(WAYS)}.")
    ranks: int = option(1, "TP degree that a desync wiring is adapted for, by emulated ranks.")
    teacher_top: int = option(
        0, "Keep only so many of the original's logits, on disk; 0: the original stays in memory."
    )
    teacher: Path | None = option(
        None,
        "Folder for what --teacher-top keeps. Runs of one model with the same data, --tokens, --batch and --window can "
        "share it; default: OUT/teacher.",
    )
    rank: int = option(16, "Of --method lora.")
    reduction: int = option(8, "How much narrower than the model --method side's network is, in whole heads.")

    def __post_init__(self) -> None:
        check_types(self)
        _known("method", self.method, METHODS)
        _known("staleness-way", self.staleness_way, WAYS)
        for name in ("kl_weight", "lm_weight", "hidden_weight"):
            if not 0 <= getattr(self, name) <= 1e3:
                raise LadderError(f"{name.replace('_', '-')} must be from 0 to 1000, not {getattr(self, name)}")
        if not self.kl_weight + self.lm_weight + self.hidden_weight:
            raise LadderError("--kl-weight and --lm-weight are both 0: nothing would be learned")
        if self.hidden_weight and self.teacher_top:
            raise LadderError("--hidden-weight needs the original in memory: leave out --teacher-top")
        if self.hidden_weight and self.method == "side":
            raise LadderError("--hidden-weight trains the model's layers, which --method side leaves as they are")
        if self.staleness is not None and not 0 <= self.staleness <= 1:
            raise LadderError(f"staleness must be from 0 to 1, not {self.staleness}")
        if self.method == "side" and self.staleness:
            raise LadderError("--staleness moves layers that are trained, which --method side leaves as they are")
        if self.begin is not None and self.staleness:
            raise LadderError("--begin is of the wiring already, where --staleness ends: leave one out")
        if self.staleness_way != WAYS[0] and not self.moving:
            raise LadderError(f"--staleness-way {self.staleness_way} needs a staleness that moves, and it is 1 at once")
        if self.teacher_top < 0:
            raise LadderError(f"teacher-top must be 0 or more, not {self.teacher_top}")
        if self.teacher_top and not self.kl_weight:
            raise LadderError("--teacher-top needs a --kl-weight above 0: plain fine-tuning asks no teacher")
        if self.teacher is not None and not self.teacher_top:
            raise LadderError("--teacher is a folder for what --teacher-top keeps: give both")
        _at_least("rank", self.rank, 1)
        _at_least("ranks", self.ranks, 1)
        _at_least("reduction", self.reduction, 1)

    @property
    def answers(self) -> Path:
        """Where the original's are kept."""
        return self.teacher or self.out / "teacher"

    @property
    def moving(self) -> float:
        """The share of the steps in which staleness moves."""
        default = 0.0 if self.begin is not None or self.method == "side" else 0.5
        return default if self.staleness is None else self.staleness


@dataclass(frozen=True)
class FitOptions:
    """What is fitted, to what, on what."""

    model: str = argument("Directory of a checkpoint, or a model of the hub as in org/name: the original.")
    out: Path = argument("New folder for the fitted checkpoint.")
    wiring: str = option("ladder", "As in 'ladder' or 'standard:16 ladder:16'; see `ladder scan`.")
    data: Path = option(Path("data"), "Folder of token shards, made by `ladder data`.")
    tokens: int | None = option(
        None, "Tokens to fit on, from everywhere in the data; default: 64 for each input of the widest projection."
    )
    window: int = option(1024, "Tokens in a row.")
    batch: int = option(8, "Rows at a time.")
    ridge: float = option(0.01, "How much weights are held to what they were.")
    dtype: str = option("auto", "What is computed in: auto (the checkpoint's, on a CPU float32), bfloat16 or float32.")
    device: str = option("auto", "auto (a GPU where there is one), cpu or cuda.")

    def __post_init__(self) -> None:
        check_types(self)
        for name, least in (("window", 2), ("batch", 1), *((("tokens", 1),) if self.tokens is not None else ())):
            _at_least(name, getattr(self, name), least)
        if not 1e-6 <= self.ridge <= 1e3:
            raise LadderError(f"ridge must be from 1e-06 to 1000, not {self.ridge}")
        _known("dtype", self.dtype, ("auto", *DTYPES))
        _check_device(self.device)

    @property
    def place(self) -> str:
        return _place(self.device)


@dataclass(frozen=True)
class ScratchOptions:
    """A model from nothing."""

    out: Path = argument("Folder for the trained checkpoint; a new one, or that of a run to be continued.")
    size: str | None = option(None, "A named size; its vocabulary becomes that of the data.")
    recipe: str | None = option(None, "A recipe: a size and how to train it; options that are given stand above it.")
    wiring: str = option("ladder", "As in 'ladder' or 'standard:16 ladder:16'.")
    ranks: int = option(1, "TP degree that a desync wiring is trained for, by emulated ranks.")

    def __post_init__(self) -> None:
        check_types(self)
        _at_least("ranks", self.ranks, 1)


def _gpu() -> bool:
    import torch  # not before a run: the command line needs none

    return torch.cuda.is_available()


def _check_device(name: str) -> None:
    _known("device", name, ("auto", "cpu", "cuda"))
    if name == "cuda" and not _gpu():
        raise LadderError("device 'cuda' is not there: torch sees no GPU; the nearest is --device cpu")


def _place(name: str) -> str:
    return name if name != "auto" else "cuda" if _gpu() else "cpu"


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise LadderError(f"{name.replace('_', '-')} must be at least {least}, not {value}")


def _few(rows: int) -> int:
    """The largest divisor up to 8: what more would take in memory, a CPU gains nothing by."""
    return next(count for count in range(min(8, rows), 0, -1) if rows % count == 0)


def _known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise LadderError(f"unknown {name} {value!r}: known are {', '.join(known)}")
