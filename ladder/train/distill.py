"""ladder adapt: a model learns to be itself again under another wiring, from its own original."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from ladder.config.families import FAMILIES as NATIVE
from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.card import adapted_card, side_card
from ladder.hf.load import pretrained, quiet
from ladder.hf.wire import check_ranks, layers_of, refuse_ranks
from ladder.scan.original import check_begin, read_original, read_tokenizer
from ladder.train import folder as place
from ladder.train.log import Progress
from ladder.train.loss import Weights
from ladder.train.options import WHOLE, AdaptOptions, TrainingOptions
from ladder.train.side import SideConfig, SideModel
from ladder.train.staleness import Moving
from ladder.train.teacher import Present, Questions, Ranks, Remembered, Teacher
from ladder.train.work import Data, Job, compile_layers, save, work
from ladder.wiring import Wiring


def adapt(options: AdaptOptions, training: TrainingOptions, progress: Progress) -> dict[str, Any]:
    """Train `options.model` under another wiring into `options.out`; returns the last evaluation. A run that was
    stopped, however hard, is continued by the same call.
    """
    folders = {"model": Path(options.model), "begin": options.begin, "data": training.data, "valid": training.valid}
    wanted = {**place.asked(options, training, **folders), "staleness": options.moving}
    if not options.moving:
        del wanted["staleness_way"]  # which runs from before it was refused may have said
    place.check(options.out, wanted)
    if place.finished(options.out):
        raise LadderError(f"{options.out} is finished: name a new folder")
    with quiet():
        wiring, tokenizer = _checked(options, training)

    def make(data: Data, args: Any) -> Job:
        def original() -> Any:
            model = pretrained(AutoModelForCausalLM, options.model, dtype=_dtype(training)).to(args.device)
            if training.compiled:
                compile_layers(model)
            return model

        def questions() -> Questions:
            source = Path(options.model)
            facts: dict[str, Any] = {"weights": place.digest(source)} if source.is_dir() else {"model": options.model}
            facts |= {"data": data.shards.fingerprint, "tokens": data.shards.tokens, "dtype": training.precision}
            ranks = Ranks(args.process_index, args.world_size, args.distributed_state.wait_for_everyone)
            return Questions(data.train, options.answers, options.teacher_top, facts, ranks)

        asked = questions() if options.teacher_top else None
        teacher: Teacher | None = None
        if options.kl_weight or options.hidden_weight:
            teacher = Remembered() if options.teacher_top else Present(original())
        steps = round(options.moving * training.steps)
        kept = _dtype(training) if options.method == "side" else torch.float32  # what is trained is trained in float32
        model = pretrained(AutoModelForCausalLM, str(options.begin or options.model), dtype=kept)
        own = pretrained(AutoConfig, options.model).dtype or torch.float32
        set_seed(training.seed)  # what is new in the model is drawn
        wired = tuple(index for index, name in enumerate(wiring.layers) if name != "standard")
        model = _trainable(rewire(model, wiring, 0.0 if steps else 1.0, options.ranks), options, wired)
        weights = Weights(options.kl_weight, options.lm_weight, options.hidden_weight)
        finish = _finisher(options, wiring, tokenizer, own)
        moving = Moving(steps, options.staleness_way, wired, len(wiring.layers), training.seed) if steps else None
        windows = (lambda: data.train) if asked is None else partial(asked.answers, original, progress)
        return Job(model, weights, teacher, windows, moving, finish)

    return work(options.out, wanted, training, make, progress)


def _dtype(training: TrainingOptions) -> torch.dtype:
    return torch.bfloat16 if training.precision == "bfloat16" else torch.float32


def _checked(options: AdaptOptions, training: TrainingOptions) -> tuple[Wiring, Any]:
    """The wiring and the tokenizer; whatever cannot be done is refused here."""
    config, wiring = read_original(options.model, options.wiring, training.window)
    check_ranks(wiring, options.ranks)
    if options.ranks > 1:
        refuse_ranks(config, options.ranks)
    if wiring.local and options.moving:
        raise LadderError(f"there is no way between the standard model and {str(wiring)!r}: give --staleness 0")
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
    if options.method == "side":
        SideConfig(reduction=options.reduction).shape(config)
    if options.teacher_top >= config.vocab_size:
        raise LadderError(f"--teacher-top {options.teacher_top} is no part of a vocabulary of {config.vocab_size}")
    if options.teacher_top and options.answers.resolve() == options.out.resolve():
        raise LadderError(f"{options.out} is where the run goes: name another --teacher, or none")
    if options.method == "lora" and find_spec("peft") is None:
        raise LadderError("--method lora needs peft: pip install 'ladder-residual[train]'")
    if options.begin is not None:
        check_begin(options.begin, config, wiring, options.ranks)
    return wiring, read_tokenizer(options.model, config, training.data, training.valid)


def _trainable(model: Any, options: AdaptOptions, wired: tuple[int, ...]) -> Any:
    if options.method == "layers":
        model.requires_grad_(False)
        for index in wired:
            layers_of(model)[index].requires_grad_(True)
    if options.method == "side":
        return SideModel(model, SideConfig(reduction=options.reduction))
    if options.method == "lora":
        from peft import LoraConfig, get_peft_model

        return get_peft_model(
            model,
            LoraConfig(task_type="CAUSAL_LM", r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear"),
        )
    return model


def _finisher(options: AdaptOptions, wiring: Wiring, tokenizer: Any, dtype: torch.dtype) -> Callable[[Any, Path], None]:
    def finish(run: Any, folder: Path) -> None:
        if options.method == "lora":
            run.model_wrapped = run.model = run.accelerator.unwrap_model(run.model_wrapped).merge_and_unload()
        if options.method == "side":
            if run.args.process_index == 0:
                run.accelerator.unwrap_model(run.model_wrapped).save(folder)
        else:
            save(run, folder, dtype)
        if run.args.process_index == 0:
            tokenizer.save_pretrained(folder)
            kind = run.model.config.model_type
            learned = bool(options.kl_weight or options.hidden_weight), bool(options.lm_weight)
            begun = options.begin is not None
            text = (
                side_card(options.model, options.out, kind, wiring, options.begin)
                if options.method == "side"
                else adapted_card(options.model, options.out.name, kind, wiring, kind in NATIVE, *learned, begun)
            )
            (folder / "README.md").write_text(text, encoding="utf-8")

    return finish
