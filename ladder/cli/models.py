"""`ladder convert`, `ladder quantize` and `ladder eval`."""

import json
from dataclasses import asdict, dataclass, fields
from itertools import product
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from ladder.cli.verbs import bytes_bar, steps_bar, verb
from ladder.config import DTYPES
from ladder.config.early import (
    CONTINUED,
    check_continuations,
    check_continued,
    check_model_named,
    check_pattern,
    check_window,
    early_config,
)
from ladder.config.fields import read_config
from ladder.devices import check_name
from ladder.errors import LadderError, check_known
from ladder.files import check_new
from ladder.options import argument, check_least, option
from ladder.quantize.options import CalibrationOptions, QuantizeOptions, check_not_quantized
from ladder.scan.early import check_early, refuse_local

if TYPE_CHECKING:
    from ladder.hf.evaluate import Arm


@dataclass(frozen=True)
class ConvertOptions:
    """A checkpoint, and the wiring to convert it to."""

    model: str = argument("Directory of a checkpoint, or a model of the hub as in org/name.")
    out: Path = argument("New folder for the wired checkpoint.")
    wiring: str | None = option(None, "As in 'ladder' or 'standard:16 ladder:16'; default: what its config names.")
    revision: str | None = option(None, "Branch, tag or commit of a model of the hub.")


@verb(ConvertOptions)
def convert(options: ConvertOptions) -> None:
    """Rewire a Hugging Face checkpoint: same weights, another wiring. It needs adaptation afterwards."""
    check_new(options.out.resolve())
    check_model_named(options.model)
    check_pattern(options.wiring, options.model)
    from ladder.hf.convert import convert_from  # imports for seconds: not for what can be refused at once

    with bytes_bar("copying") as progress:
        before, wiring = convert_from(options.model, options.out, options.wiring, options.revision, progress)
    typer.echo(f"wrote {options.out}: {wiring}")
    if wiring == before:
        typer.echo("That is the wiring it had: nothing was rewired.")
    elif before.is_standard:
        typer.echo("Its weights were trained under another wiring: adapt them before use.")
    else:
        typer.echo(f"It was wired {str(before)!r}: weights that were trained for that need adaptation before use.")


@verb(QuantizeOptions, CalibrationOptions)
def quantize(options: QuantizeOptions, calibration: CalibrationOptions) -> None:
    """Quantize a checkpoint's matrices to 8 or 4 bits, of any wiring; embedding and head stay as they are."""
    check_model_named(options.model, hub=False)
    check_new(options.out.resolve())
    check_not_quantized(options.model, read_config(options.model))
    if calibration.calibrate is not None:
        if not calibration.calibrate.exists():
            raise LadderError(f"no such file: {calibration.calibrate}")
        if (known := check_early(str(options.model), calibration.wiring, calibration.seq_len)) is not None:
            refuse_local(known[0])
    from ladder.quantize.write import quantize  # imports for seconds: not for what can be refused at once

    rounder = None
    if calibration.calibrate is not None:
        from ladder.quantize.calibrate import Calibration

        rounder = Calibration(options, calibration)
    with bytes_bar("quantizing") as progress:
        found = quantize(options, progress, rounder, calibration.wiring)
    if options.json:
        given = {"model": str(options.model), "out": str(options.out), "format": options.format}
        typer.echo(
            json.dumps(
                {
                    **given,
                    "group": options.storage.group,
                    "asymmetric": options.asymmetric,
                    "fp8_activations": options.fp8_activations,
                    **asdict(found),
                }
            )
        )
    else:
        before, after = (count / 1e9 for count in (found.bytes_before, found.bytes_after))
        typer.echo(
            f"wrote {options.out}: {found.matrices} matrices as {options.storage}, {before:.2f} GB to {after:.2f} GB "
            f"in {found.seconds:.1f} s; the error is {found.relative_error:.2%} of the weights"
        )


OF_CONTINUATIONS = ("prompt_tokens", "new_tokens", "seed")


@dataclass(frozen=True)
class EvalOptions:
    """Models to compare, and measures to compare them by."""

    model: tuple[str, ...] = argument(
        "Directories or models of the hub, or side networks; the first is what the others are compared with."
    )
    wiring: tuple[str, ...] = option(
        (), "Put every model under this wiring (may be given several times); default: its own."
    )
    backbone: str | None = option(None, "The frozen model of a side network; default: the one it was trained with.")
    task: tuple[str, ...] = option((), "A task of lm-eval, a .yaml task or a .jsonl file (may be given several times).")
    text: Path | None = option(None, "A text file: perplexity, and with --source KL and greedy agreement.")
    source: str | None = option(None, "The model that KL, greedy agreement and continuations are measured against.")
    continuations: int | None = option(
        None, "Continue so many prompts from the text, and compare what is written with what --source writes."
    )
    prompt_tokens: int | None = option(None, f"Tokens of each prompt of --continuations; default: {CONTINUED}.")
    new_tokens: int | None = option(None, f"Tokens of each of --continuations; default: {CONTINUED}.")
    seed: int | None = option(None, "Seed of sampled --continuations; default: 0.")
    batch: int = option(8, "Sequences at a time.")
    tokens: int | None = option(None, "Only this many tokens of the text, from its start.")
    window: int | None = option(None, "Tokens of text at a time; default: the model's context, at most 1024.")
    limit: int | None = option(None, "Only this many items of each task.")
    shots: int | None = option(None, "Examples before each item; default: the task's own number.")
    tasks_dir: Path | None = option(None, "A folder with YAML files of tasks.")
    engine: str = option("transformers", "What computes: transformers, or vllm (tasks only).")
    tp: int = option(1, "Number of tensor-parallel ranks, with --engine vllm.")
    device: str = option("cpu", "cpu, cuda or cuda:N; vLLM finds its device by itself.")
    dtype: str = option(
        "auto",
        "auto (the checkpoint's; float32 for bfloat16 on a CPU without bf16 products), float32, bfloat16 or float16.",
    )
    json: bool = option(False, "One JSON line per model, wiring and measure instead of the table.")

    def __post_init__(self) -> None:
        check_known("engine", self.engine, ("transformers", "vllm"))
        check_least(self, tp=1)
        if self.engine != "vllm" and self.tp > 1:
            raise LadderError(f"--tp {self.tp} is for --engine vllm: transformers computes in one process")
        lone = [name for name in OF_CONTINUATIONS if getattr(self, name) is not None]
        if lone and self.continuations is None:
            raise LadderError(f"--{lone[0].replace('_', '-')} is for --continuations: say how many")


@verb(EvalOptions, name="eval")
def evaluate(options: EvalOptions) -> None:
    """Measure models and wirings side by side: tasks of lm-eval, perplexity, KL, agreement, and what they write."""
    _check(options)
    from ladder.hf.evaluate import evaluate, table  # imports for seconds: not for what can be refused at once

    arms = [_arm(model, wiring, options.backbone) for model in options.model for wiring in options.wiring or (None,)]
    if options.backbone is not None and all(arm.wrap is None for arm in arms):
        raise LadderError(f"--backbone is for side networks, and {' '.join(options.model)} has none")
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    for name in ("model", "wiring", "backbone", "json", "engine", "tp"):
        del given[name]
    given = {name: value for name, value in given.items() if value is not None or name not in OF_CONTINUATIONS}
    if options.engine == "vllm":
        from ladder.vllm.evaluate import on_vllm

        given["engine"] = on_vllm(options.tp, options.dtype)
    with steps_bar("loading") as progress:
        rows = evaluate(
            arms,
            tasks=given.pop("task"),
            progress=progress,
            **given,
        )
    if options.json:
        for row in rows:
            numbers = {key: None if isinstance(it, float) and not isfinite(it) else it for key, it in row.items()}
            typer.echo(json.dumps(numbers, allow_nan=False))
    else:
        console = Console()
        console.print(table(rows, console))
    for row in rows:
        if not isfinite(row["value"]):
            raise LadderError(
                f"{row['model']} under {row['wiring']}: {row['measure']} is {row['value']}: its output is not finite; "
                "look for weights that are not (ladder generate --check names them), or give a wider --dtype"
            )


def _check(options: EvalOptions) -> None:
    """What can be refused before a model's config is read."""
    if not options.task and options.text is None:
        raise LadderError("nothing to measure: name at least one model, and a task or a text file")
    if options.text is not None and not options.text.is_file():
        raise LadderError(f"{options.text} is not a file" if options.text.exists() else f"no such file: {options.text}")
    check_least(options, batch=1, limit=1, shots=0, tokens=1, continuations=1, prompt_tokens=1, new_tokens=1, seed=0)
    here = options.engine == "transformers"
    check_continuations(options.continuations, options.text is not None, options.source is not None, here)
    check_known("dtype", options.dtype, ("auto", *DTYPES))
    check_name(options.device)
    for model in (*options.model, *filter(None, (options.source, options.backbone))):
        check_model_named(model)
        context = getattr(early_config(model), "context", None)
        check_window(options.window, context)
        if options.continuations is not None:
            check_continued(options.prompt_tokens or CONTINUED, options.new_tokens or CONTINUED, context)
    for pattern, model in product(options.wiring, options.model):
        check_pattern(pattern, model)


def _arm(model: str, wiring: str | None, backbone: str | None) -> "Arm":
    """A model, or a side network with its backbone."""
    from ladder.hf.evaluate import Arm
    from ladder.train.side import SideModel, backbone_of

    if (theirs := backbone_of(Path(model))) is None:
        return Arm(model, wiring)
    name, trained, hub = theirs
    if wiring is not None:
        raise LadderError(f"{model} is a side network beside {name} under {trained}: leave out --wiring")
    if backbone is None and not hub and not Path(name).is_dir():
        raise LadderError(f"{model} is a side network beside {name}, which is no directory here: name it by --backbone")
    return Arm(backbone or name, trained, model, lambda host: SideModel.load(model, host))
