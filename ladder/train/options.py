"""Options of `ladder adapt` and `ladder train`. The command line is generated from these classes."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from ladder.config.early import SEQ_LEN_HELP, sequence_length
from ladder.errors import LadderError, check_known
from ladder.options import argument, check_least, check_types, option
from ladder.scan.options import FIT_TOKENS

METHODS = ("full", "layers", "lora", "side")
WHOLE = ("full", "layers")  # those that train weights as they are
SCHEDULES = ("cosine", "linear", "constant")
DEVICES = ("auto", "cpu", "cuda")
OPTIMIZERS = ("adamw", "muon")
STALENESS_WAYS = ("together", "first", "last", "chance")
LM_WEIGHT, REVERSE_KL, PROMPT = 0.5, 0.5, 64


@dataclass(frozen=True)
class TrainingOptions:
    """The run itself, whatever is trained."""

    data: Path = option(
        Path("data"),
        "Folder of token shards, made by `ladder data`; to adapt models that are no decoders a .safetensors file of "
        "inputs.",
    )
    valid: Path | None = option(
        None, "The same to evaluate on; default: the last 1% of the data, or the last tenth of a file of inputs."
    )
    tokens: int = option(100_000_000, "Tokens to train on; the data is repeated as often as needed.")
    seq_len: int | None = option(None, SEQ_LEN_HELP)
    batch: int = option(64, "Sequences of a step, over all ranks.")
    micro_batch_size: int | None = option(
        None, "Sequences that a rank computes at a time; default: its share of the batch, on a CPU at most 8."
    )
    lr: float = option(1e-3, "Learning rate, at its peak.")
    warmup: float = option(0.02, "Share of the steps in which the learning rate rises from 0.")
    schedule: str = option("cosine", f"How the learning rate falls, to a tenth: {', '.join(SCHEDULES)}.")
    optimizer: str = option("adamw", f"{' or '.join(OPTIMIZERS)}; muon: matrices by Muon, all else by AdamW.")
    weight_decay: float = option(0.1, "Weight decay, times the learning rate.")
    beta2: float = option(0.95, "beta2 of AdamW.")
    clip: float = option(1.0, "Largest norm of the gradient.")
    dtype: str = option(
        "auto", "dtype of the computation: auto (bfloat16 on a GPU, else float32), bfloat16 or float32."
    )
    device: str = option("auto", "auto (a GPU where there is one), cpu or cuda.")
    compile: str = option("auto", "torch.compile the layers and the loss: auto (on a GPU), yes or no.")
    recompute: bool = option(False, "Gradient checkpointing: less memory, a third more computing.")
    fsdp: bool = option(False, "Shard parameters and optimizer over the ranks (FSDP2); default: every rank has all.")
    seed: int = option(1, "Seed of the order of the data and of all random numbers.")
    log_every: int = option(10, "Steps between two lines of log.jsonl.")
    eval_every: int | None = option(None, "Steps between two evaluations; default: ten in a run.")
    eval_tokens: int = option(262_144, "Tokens of an evaluation.")
    save_every: int | None = option(None, "Steps between two checkpoints; default: ten in a run.")
    keep: int = option(1, "Checkpoints that are kept.")

    def __post_init__(self) -> None:
        check_types(self)
        counts = ("tokens", "batch", "log_every", "eval_tokens", "keep", "micro_batch_size", "eval_every", "save_every")
        check_least(self, **dict.fromkeys(counts, 1), seq_len=2)
        for name, most in (("lr", 10.0), ("clip", 1e6), ("weight_decay", 10.0)):
            if (value := getattr(self, name)) is None:
                continue  # `AdaptTrainingOptions.filled` has it
            if not (math.isfinite(value) and (0 if name == "weight_decay" else 1e-12) <= value <= most):
                least = "from 0 to" if name == "weight_decay" else "above 0 and at most"
                raise LadderError(f"{name.replace('_', '-')} must be a number {least} {most}, not {value}")
        for name in ("warmup", "beta2"):
            if (value := getattr(self, name)) is not None and not 0 <= value < 1:
                raise LadderError(f"{name} must be from 0 to below 1, not {value}")
        if not 0 <= self.seed < 2**32:
            raise LadderError(f"seed must be from 0 to 2^32 - 1, not {self.seed}")
        check_known("schedule", self.schedule, SCHEDULES)
        check_known("optimizer", self.optimizer, OPTIMIZERS)
        if self.optimizer == "muon" and self.fsdp:
            raise LadderError("--optimizer muon needs whole matrices, which --fsdp takes apart: leave one out")
        check_known("dtype", self.dtype, ("auto", "bfloat16", "float32"))
        check_known("compile", self.compile, ("auto", "yes", "no"))
        check_known("device", self.device, DEVICES)
        if self.device == "cuda":
            _ = self.device_type  # refused where there is none

    def filled(self, kind: str) -> "TrainingOptions":
        """With everything that `ladder adapt` leaves to what is trained: see `AdaptTrainingOptions`."""
        return self

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return sequence_length(self.seq_len, None)

    def within(self, context: int | None) -> Self:
        """The same for a model of that context: its default filled in, and what is longer refused."""
        return replace(self, seq_len=sequence_length(self.seq_len, context))

    @property
    def steps(self) -> int:
        return -(-self.tokens // (self.batch * self.length))

    @property
    def counted(self) -> tuple[str, int]:
        """What a run counts, and how many of them a step has."""
        return "tokens", self.batch * self.length

    @property
    def device_type(self) -> str:
        from ladder.devices import device_type  # here: it takes torch with it

        return device_type(self.device)

    @property
    def precision(self) -> str:
        return self.dtype if self.dtype != "auto" else "bfloat16" if self.device_type == "cuda" else "float32"

    @property
    def compiled(self) -> bool:
        return self.compile == "yes" or (self.compile == "auto" and self.device_type == "cuda")

    @property
    def save_steps(self) -> int:
        """A multiple of `log_every`, so that a resumed run's lines are those of one that was never interrupted."""
        wanted = self.save_every or max(1, self.steps // 10)
        return -(-wanted // self.log_every) * self.log_every

    def micro_batches(self, ranks: int) -> tuple[int, int]:
        """(sequences that a rank computes at a time, how many such passes a step has)."""
        if self.batch % ranks:
            raise LadderError(f"a batch of {self.batch} sequences cannot be divided evenly by {ranks} ranks")
        share = self.batch // ranks
        default = share if self.device_type == "cuda" else _default_micro_batch(share)
        size = min(self.micro_batch_size or default, share)
        if share % size:
            raise LadderError(f"{share} sequences of a rank are no multiple of --micro-batch-size {size}")
        return size, share // size


@dataclass(frozen=True)
class ExamplesOptions(TrainingOptions):
    """The same where the data are a file of a model's inputs."""

    examples: int = 1  # to train on; the file is repeated as often as needed

    @property
    def steps(self) -> int:
        return -(-self.examples // self.batch)

    @property
    def counted(self) -> tuple[str, int]:
        return "examples", self.batch


@dataclass(frozen=True)
class AdaptOptions:
    """What becomes of which model."""

    model: str = argument("Directory of a checkpoint, or a model of the hub as in org/name: the teacher.")
    out: Path = argument("New folder for the adapted checkpoint, or that of a run to continue.")
    wiring: str = option("ladder", "As in 'ladder' or 'standard:16 ladder:16'; see `ladder scan`.")
    method: str = option(
        "full",
        "What is trained: full (all weights), layers (those of the rewired layers), lora, or side (a small network "
        "beside them).",
    )
    kl_weight: float = option(
        1.0, "Weight of the KL divergence from the original, over all tokens; of features: of the relative distance."
    )
    lm_weight: float | None = option(
        None,
        "Weight of the language-model loss, or of the cross-entropy of the labels in a file of inputs; 0: from the "
        f"original alone; with --kl-weight 0: plain fine-tuning; default: {LM_WEIGHT}, for a file of inputs 0.",
    )
    hidden_weight: float = option(0.0, "Weight of the relative distance from the original's stream after each layer.")
    init_from: Path | None = option(
        None,
        "Folder of the initial weights, of the same wiring, as `ladder fit` or a run has written; side: they stay.",
    )
    fit_tokens: int = option(
        FIT_TOKENS,
        "Without --init-from: fit the weights by least squares on so many tokens first, into OUT/fitted; 0: do not. "
        "Not with side, --staleness or --ranks. Wide models gain by more, see the default of `ladder fit`.",
    )
    staleness: float | None = option(
        None,
        "Share of the steps in which staleness rises from 0 to 1; default: 0, at once, for weights that were fitted, "
        "with --init-from and for side; else 0.5.",
    )
    staleness_way: str = option("together", f"How it rises: {', '.join(STALENESS_WAYS)}.")
    ranks: int = option(1, "TP degree that a desync wiring is adapted for, by emulated ranks.")
    teacher_top: int = option(
        0, "Cache this many of the original's likeliest tokens on disk; 0: the original stays in memory."
    )
    teacher: Path | None = option(
        None,
        "Folder of the cache of --teacher-top. Runs of one model with the same data, --tokens, --batch and --seq-len "
        "can share it; default: OUT/teacher.",
    )
    examples: int | None = option(
        None,
        "Examples to train on, where the data are a file of inputs, which is repeated as often as needed; default: "
        "the file ten times.",
    )
    on_policy: float = option(
        0.0,
        "Share of the steps, the last ones, in which the model learns on text that it samples itself, by its distance "
        "from the original alone.",
    )
    on_policy_prompt: int | None = option(
        None, f"Tokens of each sequence that these steps keep of the text; default: {PROMPT}."
    )
    reverse_kl: float | None = option(
        None,
        "Share of the reverse KL, of the original from the model, in the loss of these steps, from 0 to 1; the rest is "
        f"the KL of all others; default: {REVERSE_KL}.",
    )
    lora_rank: int = option(16, "Rank of --method lora.")
    reduction: int = option(8, "How much narrower than the model --method side's network is, in whole heads.")

    def __post_init__(self) -> None:
        check_types(self)
        check_known("method", self.method, METHODS)
        check_known("staleness-way", self.staleness_way, STALENESS_WAYS)
        for name, most in (("kl_weight", 1000), ("lm_weight", 1000), ("hidden_weight", 1000), ("reverse_kl", 1)):
            if (value := getattr(self, name)) is not None and not 0 <= value <= most:
                raise LadderError(f"{name.replace('_', '-')} must be from 0 to {most}, not {value}")
        if self.lm_weight is not None and not self.kl_weight + self.lm_weight + self.hidden_weight:
            raise LadderError("--kl-weight and --lm-weight are both 0: nothing would be learned")
        if self.hidden_weight and self.teacher_top:
            raise LadderError("--hidden-weight needs the original in memory: leave out --teacher-top")
        if self.hidden_weight and self.method == "side":
            raise LadderError("--hidden-weight trains the model's layers, which --method side leaves as they are")
        if self.staleness is not None and not 0 <= self.staleness <= 1:
            raise LadderError(f"staleness must be from 0 to 1, not {self.staleness}")
        if self.method == "side" and self.staleness:
            raise LadderError("--staleness changes layers that are trained, which --method side leaves as they are")
        if self.init_from is not None and self.staleness:
            raise LadderError("--init-from is of the wiring already, where --staleness ends: leave one out")
        if self.staleness_way != STALENESS_WAYS[0] and not self.staleness_share:
            raise LadderError(f"--staleness-way {self.staleness_way} needs a staleness that rises, and it is 1 at once")
        if self.teacher_top < 0:
            raise LadderError(f"teacher-top must be 0 or more, not {self.teacher_top}")
        if self.teacher_top and not self.kl_weight:
            raise LadderError("--teacher-top needs a --kl-weight above 0: plain fine-tuning has no teacher")
        if self.teacher is not None and not self.teacher_top:
            raise LadderError("--teacher is the folder of the cache of --teacher-top: give both")
        check_least(self, lora_rank=1, ranks=1, reduction=1, examples=1, fit_tokens=0, on_policy_prompt=1)
        self._check_on_policy()

    def _check_on_policy(self) -> None:
        if not 0 <= self.on_policy <= 1:
            raise LadderError(f"on-policy must be from 0 to 1, not {self.on_policy}")
        if not self.on_policy:
            if self.reverse_kl is not None or self.on_policy_prompt is not None:
                raise LadderError("--reverse-kl and --on-policy-prompt are for --on-policy: give a share of the steps")
            return
        if self.teacher_top:
            raise LadderError("--on-policy needs the original in memory, to read new text: leave out --teacher-top")
        if self.method == "side":
            raise LadderError("--on-policy is for methods that train the model itself, not for side: leave one out")
        if not self.kl_weight:
            raise LadderError(
                "--on-policy needs a --kl-weight above 0: of its own text a model learns from the original"
            )
        if self.on_policy + self.staleness_share > 1:
            raise LadderError(
                f"--on-policy {self.on_policy} begins before staleness has risen, in {self.staleness_share} of the "
                "steps: give a smaller share of the steps to one of them"
            )

    def filled(self, lm_weight: float) -> Self:
        """With this weight of the language-model loss, where none was given."""
        return self if self.lm_weight is not None else replace(self, lm_weight=lm_weight)

    @property
    def fits(self) -> bool:
        """Whether weights are fitted first, as far as the options say."""
        starts = self.init_from is not None or self.staleness is not None or self.staleness_way != STALENESS_WAYS[0]
        return self.fit_tokens > 0 and not starts and self.method != "side" and self.ranks == 1

    @property
    def keeps_original(self) -> bool:
        """Whether the original is in memory beside the model that is trained."""
        return bool(self.kl_weight or self.hidden_weight) and not self.teacher_top

    @property
    def teacher_cache(self) -> Path:
        """The folder of --teacher-top's cache."""
        return self.teacher or self.out / "teacher"

    @property
    def staleness_share(self) -> float:
        """The share of the steps in which staleness rises."""
        default = 0.0 if self.fits or self.init_from is not None or self.method == "side" else 0.5
        return default if self.staleness is None else self.staleness


@dataclass(frozen=True)
class ScratchOptions:
    """A model from scratch."""

    out: Path = argument("New folder for the trained checkpoint, or that of a run to continue.")
    size: str | None = option(None, "A named size; its vocabulary becomes that of the data.")
    recipe: str | None = option(None, "A recipe: a size and how to train it; options that are given override it.")
    wiring: str = option("ladder", "As in 'ladder' or 'standard:16 ladder:16'.")
    init_from: Path | None = option(None, "Folder of a finished run of the same model, to train further.")
    ranks: int = option(1, "TP degree that a desync wiring is trained for, by emulated ranks.")
    shared_norm: bool = option(False, "One norm a layer, which attention and MLP both read through, as in PaLM.")
    tp: int = option(1, "Under torchrun: ranks that share one model, the native decoder; the rest is data parallel.")

    def __post_init__(self) -> None:
        check_types(self)
        check_least(self, ranks=1, tp=1)


def _default_micro_batch(sequences: int) -> int:
    """On a CPU: the largest divisor up to 8. More takes memory and is no faster."""
    return next(count for count in range(min(8, sequences), 0, -1) if sequences % count == 0)
