"""ladder adapt for models that read more than text: vision, towers, encoders, encoder-decoders. The data are their
inputs, and, to learn from them as well, labels.
"""

import copy
import logging
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, set_seed

from ladder.config.card import adapted_card
from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.load import pretrained, quiet
from ladder.hf.register import auto_of
from ladder.hf.stacks import as_text, named_wiring, parse_each, stack_depths
from ladder.hf.wire import layers_of, rank_slices, refuse_ranks, refuse_settings
from ladder.progress import Progress
from ladder.scan.checkpoints import refuse_quantized, write_beside
from ladder.scan.inputs import LABELS, Inputs, answers, arguments, rows
from ladder.train import folder
from ladder.train.inputs_trainer import ExamplesData, InputsTeacher, InputsTrainer, called
from ladder.train.loss import IGNORED, LossWeights
from ladder.train.options import WHOLE, AdaptOptions, ExamplesOptions, TrainingOptions
from ladder.train.recipes import INPUTS
from ladder.train.run import TrainingTask, compile_layers, run_training, save_trained
from ladder.train.stages.staleness import StalenessSchedule
from ladder.wiring import ROWS, Wiring

logger = logging.getLogger(__name__)
TIMES = 10  # that a file is read, if nothing else is said
_OF_TEXT = ("tokens", "seq_len", "eval_tokens")


@dataclass(frozen=True)
class _Checked:
    """What was read before a weight was."""

    config: Any
    auto: Any  # transformers' class that loads the model
    wirings: list[Wiring]  # of its stacks


def adapt_inputs(options: AdaptOptions, training: TrainingOptions, progress: Progress) -> dict[str, Any]:
    """Train `options.model` under another wiring into `options.out`; returns the last evaluation. A run that was
    stopped, however hard, is continued by the same call.
    """
    training, options = training.filled(INPUTS), replace(options.filled(0.0), fit_tokens=0)
    paths = {"model": Path(options.model), "init_from": options.init_from}
    paths |= {"data": training.data, "valid": training.valid}
    wanted = {**folder.described(options, training.within(None), **paths), "staleness": options.staleness_share}
    folder.check(options.out, wanted)
    with quiet():
        checked = _checked(options, training)
        forward = checked.auto._model_mapping[type(checked.config)].forward
        data = ExamplesData.open(training, forward)
    run = _of_examples(options, training, len(data.train))
    if options.init_from is None:
        logger.info("the weights are not fitted before the training: for models that read inputs ladder fit does it")

    def opened(given: TrainingOptions, ranks: int) -> ExamplesData:
        if len(data.valid) < ranks:
            raise LadderError(f"{len(data.valid)} examples to evaluate on, {ranks} are needed")
        return data

    def make(data: ExamplesData, args: Any) -> TrainingTask:
        set_seed(training.seed)  # for what a checkpoint lacks, a pooler, say: the same in each start
        original = pretrained(checked.auto, options.model, dtype=torch.float32)
        source = original if options.init_from is None else None
        model = copy.deepcopy(source) if source is not None else _initial(checked, options, type(original))
        of_logits = _check_outputs(options, original, data)
        steps = round(options.staleness_share * run.steps)
        rewire(model, options.wiring, 0.0 if steps else 1.0, options.ranks)
        wired = _wired_layers(model)
        if options.method == "layers":
            model.requires_grad_(False)
            for index in wired:
                layers_of(model)[index].requires_grad_(True)
        teacher: Any = None
        if options.kl_weight or options.hidden_weight:
            wide = run.precision != "bfloat16"
            teacher = InputsTeacher(original.to(args.device, torch.float32 if wide else torch.bfloat16), of_logits)
            if run.compiled:
                compile_layers(original)
        args.ddp_find_unused_parameters = True  # a tower's scale, a pooler: not every output counts
        staleness = None
        if steps:
            count = len(layers_of(model))
            staleness = StalenessSchedule(steps, options.staleness_way, wired, count, training.seed)
        weights = LossWeights(options.kl_weight, options.lm_weight or 0.0, options.hidden_weight)
        dtype = checked.config.dtype or torch.float32

        def finish(trainer: Any, out: Path) -> None:
            save_trained(trainer, out, dtype)
            if trainer.args.process_index == 0:
                _write_beside(options, type(original).__name__, checked, out)

        return TrainingTask(model, weights, teacher, lambda: data.train, staleness, finish)

    return run_training(options.out, wanted, run, make, progress, opened, InputsTrainer)


def _checked(options: AdaptOptions, training: TrainingOptions) -> _Checked:
    """All that cannot be done is refused here, in one sentence."""
    for name in _OF_TEXT:
        if getattr(training, name) != _default(name):
            flag = name.replace("_", "-")
            raise LadderError(f"--{flag} counts tokens of text, and {options.model} reads inputs: give --examples")
    if options.method not in WHOLE:
        raise LadderError(f"--method {options.method} is for decoders of text: give full or layers")
    if options.teacher_top:
        raise LadderError("--teacher-top is for decoders of text: the original stays in memory, leave it out")
    if options.on_policy:
        raise LadderError("--on-policy is for decoders of text, which can sample it: leave it out")
    if training.fsdp:
        raise LadderError("--fsdp is for decoders of text: leave it out")
    config = pretrained(AutoConfig, options.model)
    refuse_settings(config)
    refuse_quantized(options.model, config, "adapt the model that they were made from")
    depths = stack_depths(config)
    if as_text(named_wiring(vars(config), depths), vars(config).get("wiring")) != "standard":
        raise LadderError(f"{options.model} is wired already: name its original")
    wirings = parse_each(options.wiring, depths)
    if options.ranks > 1:
        refuse_ranks(config, options.ranks)
    for (layout, _), wiring in zip(depths, wirings, strict=True):
        if options.ranks > 1 and not layout.post_norm:
            rank_slices(wiring, options.ranks, len(layout.branches))
        elif wiring.local:
            raise LadderError(
                f"{str(wiring)!r} keeps partial sums local, which is another model at every TP degree: give --ranks, "
                "the degree that it is for"
            )
        if wiring.local and options.staleness_share:
            raise LadderError(f"there is nothing between the standard model and {str(wiring)!r}: give --staleness 0")
    if options.method == "layers" and all(wiring.is_standard for wiring in wirings):
        raise LadderError(f"--method layers trains rewired layers, and {options.wiring!r} has none")
    if getattr(config, "problem_type", None) in ("multi_label_classification", "regression"):
        raise LadderError(f"{options.model} is trained for {config.problem_type}, whose logits are no probabilities")
    if options.init_from is not None:
        _check_init(options, config, wirings)
    auto: Any = getattr(transformers, auto_of({**config.to_dict(), "architectures": config.architectures}))
    return _Checked(config, auto, wirings)


def _check_init(options: AdaptOptions, config: Any, wirings: list[Wiring]) -> None:
    """Refuse initial weights that are of another model or wiring."""
    start = Path(str(options.init_from))
    if not (start / "config.json").exists():
        raise LadderError(f"{start} has no config.json: name a finished model, of ladder fit or ladder adapt")
    own = pretrained(AutoConfig, str(start))
    if (found := own.model_type) != config.model_type or own.architectures != config.architectures:
        raise LadderError(f"{start} is another model, {found} with {own.architectures}: name weights of this one")
    held = named_wiring(vars(own), stack_depths(own))
    if held != wirings:
        raise LadderError(f"{start} is wired {as_text(held, vars(own).get('wiring'))!r}, not {options.wiring!r}")
    if (ranks := getattr(own, "wiring_ranks", 1)) != options.ranks:
        raise LadderError(f"{start} is for {ranks} ranks, not {options.ranks}: name weights for the same number")


def _default(name: str) -> Any:
    return next(entry.default for entry in fields(TrainingOptions) if entry.name == name)


def _of_examples(options: AdaptOptions, training: TrainingOptions, count: int) -> ExamplesOptions:
    """The options of a run over so many examples."""
    run = ExamplesOptions(**asdict(training), examples=options.examples or TIMES * count)
    # streams are collected by hooks, which compiled layers do not have
    return replace(run, compile="no") if options.hidden_weight else run


def _initial(checked: _Checked, options: AdaptOptions, kind: Any) -> Any:
    model = pretrained(checked.auto, str(options.init_from), dtype=torch.float32)
    if type(model).__name__ != kind.__name__:
        raise LadderError(f"{options.init_from} is a {type(model).__name__}, not a {kind.__name__}")
    return model


def _wired_layers(model: Any) -> tuple[int, ...]:
    """The layers with another wiring than standard, of all stacks, one stack after the other."""
    specs: list[Any] = [layer.spec for layer in layers_of(model)]
    standard = ROWS["standard"][0]
    return tuple(at for at, spec in enumerate(specs) if any(block != standard for block in spec.wiring))


def _check_outputs(options: AdaptOptions, model: Any, data: ExamplesData) -> bool:
    """Whether it gives back logits. Refuses labels that are not of them, and outputs that nothing can be learned of."""
    for inputs in (data.train.inputs, data.valid.inputs):
        inputs.check_fit(model.eval())
    first = Inputs({name: tensor[:1] for name, tensor in data.valid.inputs.tensors.items()})
    with torch.no_grad():
        given = arguments(model, first.unlabelled().tensors)
        found = answers(called(model, model, given), given)
    logits = found.get("logits")
    if logits is not None and logits.shape[-1] == 1:
        raise LadderError(f"{options.model} has a single logit, which is no probability: nothing can be distilled")
    if not options.lm_weight and first.labels is None:
        return logits is not None
    if logits is None:
        raise LadderError(f"{options.model} gives back features, which {LABELS} say nothing of: leave them out")
    if first.labels is None:
        raise LadderError(f"--lm-weight is for {LABELS}, which the file of inputs has not")
    if (told := rows(first.labels, given, 0)).numel() != len(logits):
        raise LadderError(f"{LABELS} must be {len(logits)} for each example, not {told.numel()}")
    for inputs in (data.train.inputs, data.valid.inputs):
        labels = inputs.tensors[LABELS]
        wrong = labels[((labels < 0) & (labels != IGNORED)) | (labels >= logits.shape[-1])]
        if len(wrong):
            raise LadderError(f"{LABELS} must be from 0 to {logits.shape[-1] - 1}, or {IGNORED}, not {int(wrong[0])}")
    return True


def _write_beside(options: AdaptOptions, kind: str, checked: _Checked, out: Path) -> None:
    write_beside(options.model, out)
    family = checked.config.model_type
    losses = bool(options.kl_weight or options.hidden_weight), bool(options.lm_weight)
    ways = (*losses, options.init_from is not None, None)
    auto = auto_of({"model_type": family, "architectures": [kind]})
    first, stacks = checked.wirings[0], len(checked.wirings)
    text = adapted_card(options.model, options.out.name, family, first, False, *ways, auto, stacks)
    (out / "README.md").write_text(text, encoding="utf-8")
