"""ladder fit for models that read more than text: vision, towers, encoders. The data are their inputs."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from ladder.config.card import fitted_card
from ladder.errors import LadderError
from ladder.files import check_new, new_folder
from ladder.hf import rewire
from ladder.hf.families import known_families, layouts_of
from ladder.hf.load import pretrained, quiet
from ladder.hf.register import auto_of
from ladder.hf.stacks import as_text, named_wiring, parse_each, stack_depths
from ladder.progress import Progress
from ladder.scan.checkpoints import refuse_quantized, write_beside, write_model
from ladder.scan.early import refuse_local
from ladder.scan.fit import computing_dtype
from ladder.scan.inputs import Inputs, OutputDistance, arguments, output_distance
from ladder.scan.options import FitOptions
from ladder.scan.solve import solve_inputs
from ladder.wiring import Wiring


@dataclass(frozen=True)
class InputsFitResult:
    """The rewired and the fitted model beside the original, on examples that were not fitted to."""

    examples: int  # to fit on
    rewired: OutputDistance
    fitted: OutputDistance

    def __str__(self) -> str:
        return f"fitted on {self.examples} examples: {self.rewired} rewired, {self.fitted} fitted"


def reads_inputs(model: str) -> bool:
    """Whether a model is no decoder of text: its data are a file of inputs, and not a folder of tokens."""
    with quiet():
        model_type = pretrained(AutoConfig, model).model_type
    return model_type in known_families() and layouts_of(model_type)[0].layer_class is not None


def fit_inputs(options: FitOptions, progress: Progress) -> InputsFitResult:
    """Write `options.out`, or refuse, and leave nothing behind."""
    out = options.out.resolve()
    check_new(out)
    with quiet():
        config = pretrained(AutoConfig, options.model)
        refuse_quantized(options.model, config, "fit the model that they were made from and quantize what comes out")
        depths = stack_depths(config)
        if as_text(named_wiring(vars(config), depths), vars(config).get("wiring")) != "standard":
            raise LadderError(f"{options.model} is wired already: name its original")
        wirings = parse_each(options.wiring, depths)
        if all(wiring.is_standard for wiring in wirings):
            raise LadderError("the wiring is standard, as the model is: there is nothing to fit")
        for wiring in wirings:
            refuse_local(wiring)
        if options.tokens is not None:
            raise LadderError("--tokens counts tokens of text: all examples of the file are used, leave it out")
        auto: Any = getattr(transformers, auto_of({**config.to_dict(), "architectures": config.architectures}))
        original = pretrained(auto, options.model, dtype=computing_dtype(options.dtype, options.device_type))
        whole = Inputs.open(options.data, type(original).forward, labels=True).unlabelled()
        whole.check_fit(original.eval())
        inputs, measured = whole.split(options.batch)
        with new_folder(out) as folder:
            model, found = _fitted(original.to(options.device_type), options, inputs, measured, progress)
            _write(model.to("cpu", config.dtype or torch.float32), folder, options, wirings, found)
            if out.exists():
                out.rmdir()  # empty, as was seen
            folder.rename(out)
    return found


def _fitted(
    original: Any, options: FitOptions, inputs: Inputs, measured: Inputs, progress: Progress
) -> tuple[Any, InputsFitResult]:
    model = rewire(copy.deepcopy(original), options.wiring)
    before = output_distance(model, original, measured, options.batch)
    batches = [arguments(model, batch) for batch in inputs.batches(options.batch)]
    solve_inputs(model, options.wiring, batches, options.ridge, progress)
    found = InputsFitResult(len(inputs), before, output_distance(model, original, measured, options.batch))
    if not found.fitted.value <= before.value:
        raise LadderError(
            f"fitted on {found.examples} examples the model is farther from its original ({found.fitted}) than merely "
            f"rewired ({before}): give more examples, or a larger --ridge"
        )
    return model, found


def _write(model: Any, folder: Path, options: FitOptions, wirings: list[Wiring], found: InputsFitResult) -> None:
    write_model(model, folder)
    write_beside(options.model, folder)
    auto = auto_of({"model_type": model.config.model_type, "architectures": [type(model).__name__]})
    family, result = model.config.model_type, f"It was {found}"
    card = fitted_card(options.model, options.out.name, family, wirings[0], False, result, auto, len(wirings))
    (folder / "README.md").write_text(card, encoding="utf-8")
