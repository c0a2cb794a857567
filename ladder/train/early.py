"""What is refused of the options of `ladder adapt` and `ladder train` before torch is imported; the runs ask the same
once more. No torch here.
"""

from collections.abc import Collection
from dataclasses import replace

from ladder.config import ModelConfig
from ladder.config.early import early_config
from ladder.config.fields import read_json
from ladder.data.check import INDEX, check_tokens
from ladder.devices import surely_cpu
from ladder.engine.executors.torchrun import torchrun_rank
from ladder.errors import LadderError
from ladder.perf.costs import RankCosts
from ladder.perf.memory import check_host
from ladder.scan.early import check_early
from ladder.train.options import PROMPT, WHOLE, AdaptOptions, ScratchOptions, TrainingOptions
from ladder.train.recipes import check_start, recipe
from ladder.wiring import Wiring, check_names

TRAINED_BYTES = 16  # of a weight that is trained: itself, its gradient and AdamW's two moments, in float32
SMALLER = "train a smaller model, or shard it over several GPUs (--fsdp under torchrun)"


def adapt_early(options: AdaptOptions, training: TrainingOptions) -> None:
    """What `ladder adapt` refuses, as far as it can be told from the options and a config.json."""
    if options.init_from is not None and not options.init_from.is_dir():
        raise LadderError(f"no such folder: {options.init_from}; ladder fit makes one")
    found, config = check_early(options.model, options.wiring, training.seq_len), early_config(options.model)
    if found is not None and config is not None:
        training = training.within(config.context)
        check_adapt(options, training, found[0], config.hidden, config.vocab)
        if options.method == "full":
            check_early_memory(options.model, config, weight_bytes(options), training, whole=original_bytes(options))


def train_early(options: ScratchOptions, training: TrainingOptions, named: frozenset[str]) -> None:
    """What `ladder train` refuses, as far as it can be told from the options."""
    check_names(options.wiring)
    config, training = chosen(options, training, named)
    training = training.within(config.context)
    Wiring.parse(options.wiring, config.layers)
    check_tokens(training.data)
    vocab = read_json(training.data / INDEX).get("vocab")
    config = replace(config, vocab=vocab) if isinstance(vocab, int) and vocab > 0 else config
    check_early_memory(options.size or str(options.recipe), config, TRAINED_BYTES, training, options.tp)


def chosen(
    options: ScratchOptions, training: TrainingOptions, named: Collection[str] | None
) -> tuple[ModelConfig, TrainingOptions]:
    """The model to train, and how: a recipe's values for what was not `named`."""
    check_start(options.size, options.recipe)
    if options.recipe is not None:
        row = recipe(options.recipe)
        return row.config, row.filled(training, named)
    assert options.size is not None
    return ModelConfig.named(options.size), training


def check_adapt(options: AdaptOptions, training: TrainingOptions, wiring: Wiring, hidden: int, vocab: int) -> None:
    """Refuse options that do not go together, or not with a decoder of that width and vocabulary."""
    if options.examples is not None:
        raise LadderError("--examples counts examples of a file of inputs, this model reads tokens: give --tokens")
    if wiring.local and options.ranks > 1 and options.staleness_share:  # without ranks it is refused for that
        raise LadderError(f"there is nothing between the standard model and {str(wiring)!r}: give --staleness 0")
    if options.method == "layers" and wiring.is_standard:
        raise LadderError(f"--method layers trains rewired layers, and {str(wiring)!r} has none")
    if options.ranks > 1 and options.method not in WHOLE:
        raise LadderError(f"--ranks is for --method full and layers, not for {options.method}: leave one out")
    if options.method not in WHOLE and training.fsdp:
        raise LadderError(f"--fsdp is for --method full and layers, {options.method} trains little: leave one out")
    if options.method not in WHOLE and training.optimizer == "muon":
        raise LadderError(f"--optimizer muon is for --method full and layers, not for {options.method}: leave one out")
    if options.method == "side" and training.recompute:
        raise LadderError("--recompute has nothing to do for --method side, which keeps nothing of the model's layers")
    if options.on_policy:
        _check_on_policy(options, training)
    if options.teacher_top >= vocab:
        raise LadderError(f"--teacher-top {options.teacher_top} is no part of a vocabulary of {vocab}")
    if options.teacher_top and options.teacher_cache.resolve() == options.out.resolve():
        raise LadderError(f"{options.out} is where the run goes: name another --teacher, or none")
    if options.method == "lora" and options.lora_rank > hidden:
        raise LadderError(
            f"--lora-rank {options.lora_rank} is more than the model's width of {hidden}: an adapter of so many is no "
            "smaller than the weights, give a lower rank"
        )


def _check_on_policy(options: AdaptOptions, training: TrainingOptions) -> None:
    prompt = options.on_policy_prompt or PROMPT
    if prompt >= training.length:
        raise LadderError(
            f"--on-policy-prompt {prompt} leaves nothing to sample of {training.length} tokens: give a smaller one, or "
            "a larger --seq-len"
        )
    if training.fsdp:
        raise LadderError(
            "--on-policy samples token by token, and --fsdp would gather all weights for each: leave one out"
        )


def weight_bytes(options: AdaptOptions, quantized: bool = False) -> float:
    """Of each weight of a model that is adapted."""
    return TRAINED_BYTES if options.method == "full" else 0 if quantized else 4


def original_bytes(options: AdaptOptions, precision: str = "float32") -> float:
    """Of each weight of its original where that is in memory, whole on every rank."""
    return (2 if precision == "bfloat16" else 4) * options.keeps_original


def training_text(what: str, count: int, each: float) -> str:
    """What needs memory: the beginning of a refusal."""
    return f"training {what} ({count / 1e9:.3g} billion weights, {each:g} bytes for each)"


def check_early_memory(
    what: str, config: ModelConfig, each: float, training: TrainingOptions, sharers: int = 1, whole: float = 0.0
) -> None:
    """Refuse a training that this machine's CPUs cannot hold: `each` bytes for each weight on every rank, or on
    `sharers` together, and with FSDP on all together; `whole` bytes more on every rank in any case. GPUs are asked
    later, and once more the CPUs.
    """
    if not surely_cpu(training.device):
        return
    own, count = torchrun_rank(), RankCosts(config, 1, element_bytes=1).weight_bytes
    ranks, here = (1, 1) if own is None else (own.size, own.local_size)
    need = count * (each / (ranks if training.fsdp else sharers) + whole)
    check_host(training_text(what, count, each + whole), need * here, SMALLER)
