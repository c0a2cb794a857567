"""ladder adapt: a model is trained under another wiring to agree with its original."""

import logging
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from ladder.config import ModelConfig
from ladder.config.card import adapted_card, side_card
from ladder.config.families import FAMILIES as NATIVE
from ladder.data.shards import Shards
from ladder.engine.executors.torchrun import torchrun_rank
from ladder.errors import LadderError, install
from ladder.hf import rewire
from ladder.hf.convert import convert
from ladder.hf.load import pretrained, quantizer_of, quiet, reason, weight_count
from ladder.hf.wire import check_ranks, layers_of, refuse_ranks
from ladder.progress import Progress
from ladder.scan.checkpoints import (
    check_init_from,
    context_of,
    read_original,
    read_tokenizer,
    refuse_not_finite,
    refuse_quantized,
)
from ladder.train import folder
from ladder.train.early import check_adapt, original_bytes, weight_bytes
from ladder.train.loss import LossWeights
from ladder.train.options import LM_WEIGHT, AdaptOptions, TrainingOptions
from ladder.train.run import (
    TrainingData,
    TrainingTask,
    check_memory,
    compile_layers,
    run_training,
    save_trained,
)
from ladder.train.side import SideConfig, SideModel
from ladder.train.stages.fitted import decided, fit_first, fitted_weights
from ladder.train.stages.on_policy import OnPolicy
from ladder.train.stages.staleness import StalenessSchedule
from ladder.train.teacher import CacheBuilder, CachedTeacher, OnlineTeacher, RankGroup, Teacher
from ladder.wiring import Wiring

logger = logging.getLogger(__name__)


def adapt(options: AdaptOptions, training: TrainingOptions, progress: Progress) -> dict[str, Any]:
    """Train `options.model` under another wiring into `options.out`; returns the last evaluation. A run that was
    stopped, however hard, is continued by the same call.
    """
    training, options = training.filled(options.method), options.filled(LM_WEIGHT)
    with quiet():
        config = pretrained(AutoConfig, options.model)
        training, asked = training.within(context_of(config)), options.fits
        options, unfitted = decided(options, training, config)
    folders = {"model": Path(options.model), "init_from": options.init_from}
    folders |= {"data": training.data, "valid": training.valid}
    wanted = {**folder.described(options, training, **folders), "staleness": options.staleness_share}
    wanted["fit_tokens"] = options.fit_tokens if options.fits else 0
    if not options.staleness_share:
        del wanted["staleness_way"]  # older runs may have it although it has no effect
    folder.check(options.out, wanted)
    with quiet():
        wiring, tokenizer, quantizer = _checked(options, training)
        _remark_on_family(options)
    if unfitted is not None and _first_rank():
        level = logging.WARNING if asked else logging.INFO
        logger.log(level, "the weights are not fitted before the training: %s", unfitted)
    begun = fitted_weights(options)

    def make(data: TrainingData, args: Any) -> TrainingTask:
        def original() -> Any:
            model = pretrained(AutoModelForCausalLM, options.model, dtype=_dtype(training)).to(args.device)
            if training.compiled:
                compile_layers(model)
            return model

        def cache_builder() -> CacheBuilder:
            source = Path(options.model)
            facts: dict[str, Any] = {"weights": folder.digest(source)} if source.is_dir() else {"model": options.model}
            facts |= {"data": data.shards.fingerprint, "tokens": data.shards.tokens, "dtype": training.precision}
            ranks = RankGroup(args.process_index, args.world_size, args.distributed_state.wait_for_everyone)
            return CacheBuilder(data.train, options.teacher_cache, options.teacher_top, facts, ranks)

        builder = cache_builder() if options.teacher_top else None
        teacher: Teacher | None = None
        if options.kl_weight or options.hidden_weight:
            teacher = CachedTeacher() if options.teacher_top else OnlineTeacher(original())
        steps = round(options.staleness_share * training.steps)
        frozen = options.method == "side" or quantizer is not None
        dtype = _dtype(training) if frozen else torch.float32  # trained weights are float32
        model = pretrained(AutoModelForCausalLM, str(begun or options.model), dtype=dtype)
        refuse_not_finite(model, str(begun or options.model))
        own = pretrained(AutoConfig, options.model).dtype or torch.float32
        set_seed(training.seed)  # for the model's new parameters
        wired = tuple(index for index, name in enumerate(wiring.layers) if name != "standard")
        model = _trainable(rewire(model, wiring, 0.0 if steps else 1.0, options.ranks), options, wired)
        weights = LossWeights(options.kl_weight, options.lm_weight or 0.0, options.hidden_weight)
        finish = _finisher(options, wiring, tokenizer, own, quantizer)
        staleness = None
        if steps:
            staleness = StalenessSchedule(steps, options.staleness_way, wired, len(wiring.layers), training.seed)
        sequences = (lambda: data.train) if builder is None else partial(builder.build, original, progress)
        on_policy = OnPolicy.of(options, training, steps) if options.on_policy else None
        return TrainingTask(model, weights, teacher, sequences, staleness, finish, on_policy)

    first = (lambda args: fit_first(options, training, args, progress)) if options.fits else None
    return run_training(options.out, wanted, training, make, progress, first=first)


def _remark_on_family(options: AdaptOptions) -> None:
    """Said before the training: what it gives may be for transformers alone."""
    if options.method == "side" or not _first_rank():
        return
    try:
        ModelConfig.from_hf(pretrained(AutoConfig, options.model).to_dict())
    except LadderError as error:
        logger.warning("what is trained will run in transformers alone, not in ladder generate and serve: %s", error)


def _first_rank() -> bool:
    own = torchrun_rank()
    return own is None or own.rank == 0


def _dtype(training: TrainingOptions) -> torch.dtype:
    return torch.bfloat16 if training.precision == "bfloat16" else torch.float32


def _checked(options: AdaptOptions, training: TrainingOptions) -> tuple[Wiring, Any, str | None]:
    """The wiring, the tokenizer, and the quantizer of the weights to start from; all that cannot be done is refused
    here.
    """
    Shards.open(training.data)  # a folder that is not there is told of first
    config, wiring, _ = read_original(options.model, options.wiring, training.seq_len)
    check_adapt(options, training, wiring, config.hidden_size, config.vocab_size)
    check_ranks(wiring, options.ranks)
    if options.ranks > 1:
        refuse_ranks(config, options.ranks)
    if options.method == "side":
        SideConfig(reduction=options.reduction).shape(config)
    if options.method == "lora" and find_spec("peft") is None:
        raise LadderError(f"--method lora needs peft: {install('train')}")
    if options.init_from is not None:
        check_init_from(options.init_from, config, wiring, options.ranks)
        config = pretrained(AutoConfig, str(options.init_from))
    if options.method != "lora":
        instead = "train an adapter beside them (--method lora), or adapt the model that they were made from and "
        refuse_quantized(str(options.init_from or options.model), config, instead + "quantize what comes out")
    tokenizer = read_tokenizer(options.model, config, training.data, training.valid)
    each, whole = weight_bytes(options, quantizer_of(config) is not None), original_bytes(options, training.precision)
    check_memory(options.model, weight_count(AutoModelForCausalLM, config), each, training, whole=whole)
    return wiring, tokenizer, quantizer_of(config)


def _trainable(model: Any, options: AdaptOptions, wired: tuple[int, ...]) -> Any:
    if options.method == "layers":
        model.requires_grad_(False)
        for index in wired:
            layers_of(model)[index].requires_grad_(True)
    if options.method == "side":
        return SideModel(model, SideConfig(reduction=options.reduction))
    if options.method == "lora":
        return _with_lora(model, options.lora_rank)
    return model


def _with_lora(model: Any, rank: int) -> Any:
    """Adapters beside all linear layers, of whatever class a quantizer has made them."""
    from peft import LoraConfig, get_peft_model

    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_trainable:
        raise LadderError(f"transformers does not train beside weights of {quantizer_of(model.config)}")
    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    try:
        return get_peft_model(model, config)
    except (ImportError, TypeError, ValueError) as error:
        raise LadderError(f"peft has no LoRA for this model: {reason(error)}") from error


def _save_adapter(trainer: Any, source: str, wiring: Wiring, out: Path) -> None:
    """The quantized weights that were started from, unchanged, and the adapter beside them."""
    local = Path(source).is_dir()
    convert(source if local else snapshot_download(source, local_files_only=True), out, str(wiring))
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    for config in model.peft_config.values():
        config.base_model_name_or_path = ""  # the weights of its own folder
    model.save_pretrained(out, save_embedding_layers=False)
    for file in out.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors creates it for its owner alone


def _finisher(
    options: AdaptOptions, wiring: Wiring, tokenizer: Any, dtype: torch.dtype, quantizer: str | None
) -> Callable[[Any, Path], None]:
    def finish(trainer: Any, out: Path) -> None:
        if options.method == "lora" and quantizer is None:
            merged = trainer.accelerator.unwrap_model(trainer.model_wrapped).merge_and_unload()
            trainer.model_wrapped = trainer.model = merged
        if options.method != "side" and quantizer is None:
            save_trained(trainer, out, dtype)
        if trainer.args.process_index == 0:
            if quantizer is not None:
                _save_adapter(trainer, str(options.init_from or options.model), wiring, out)
            if options.method == "side":
                trainer.accelerator.unwrap_model(trainer.model_wrapped).save(out)
            tokenizer.save_pretrained(out)
            kind = trainer.model.config.model_type
            losses = bool(options.kl_weight or options.hidden_weight), bool(options.lm_weight)
            ways = (*losses, fitted_weights(options) is not None, quantizer)
            text = (
                side_card(options.model, options.out, kind, wiring, options.init_from)
                if options.method == "side"
                else adapted_card(options.model, options.out.name, kind, wiring, kind in NATIVE, *ways)
            )
            (out / "README.md").write_text(text, encoding="utf-8")

    return finish
