"""What every run does: open its data, go on where it was stopped, train, and leave a model behind."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ladder.data.shards import TOKENIZER, Shards, Spread, Windows
from ladder.errors import LadderError
from ladder.hf.load import quiet
from ladder.hf.wire import inside, layers_of
from ladder.train import folder as place
from ladder.train.log import Progress
from ladder.train.loss import Weights
from ladder.train.options import TrainingOptions
from ladder.train.staleness import Moving
from ladder.train.teacher import Teacher
from ladder.train.trainer import Run, arguments


@dataclass(frozen=True)
class Data:
    """Windows to train on and to evaluate on."""

    shards: Shards
    train: Windows | Spread  # no more of them than the run reads
    valid: Windows

    @classmethod
    def open(cls, options: TrainingOptions, ranks: int) -> "Data":
        shards = Shards.open(options.data)
        rows = max(ranks, options.eval_tokens // options.window)
        whole = len(Windows(shards, options.window))
        if options.valid is None:
            rows = max(ranks, min(rows, whole // 100))
            kept = whole - rows
            if kept < options.batch:
                raise LadderError(
                    f"{options.data} has {shards.tokens} tokens: a step needs {options.batch * options.window}, and an "
                    f"evaluation {rows * options.window} of them; give more data, or a smaller --batch or --window"
                )
            valid = Windows(shards, options.window, skip=kept, limit=rows)
        else:
            other = Shards.open(options.valid)
            other.check_tokenizer(shards.fingerprint, str(options.data / TOKENIZER))
            valid = Windows(other, options.window, limit=rows)
            if len(valid) < ranks:
                raise LadderError(f"{options.valid} has {other.tokens} tokens: {ranks * options.window} are needed")
            kept = whole
        if kept < options.batch:
            raise LadderError(
                f"{options.data} has {shards.tokens} tokens, a step needs {options.batch * options.window}: give more "
                "data, or a smaller --batch or --window"
            )
        # whole steps only: an epoch's last one would be a smaller one
        train = Windows(shards, options.window, limit=kept // options.batch * options.batch)
        wanted = options.steps * options.batch
        return cls(shards, Spread(train, wanted) if wanted < len(train) else train, valid)


@dataclass(frozen=True)
class Job:
    """What a verb wants trained."""

    model: Any
    weights: Weights
    teacher: Teacher | None
    windows: Callable[[], Any]  # what it is trained on; what has to be made for that is made then
    moving: Moving | None  # None: the wiring from the first step on
    finish: Callable[[Any, Path], None]  # writes the trained model into a folder


def work(
    out: Path,
    wanted: dict[str, Any],
    options: TrainingOptions,
    make: Callable[[Data, Any], Job],
    progress: Progress,
) -> dict[str, Any]:
    """Train what `make(data, arguments)` answers; returns the last evaluation, how many tokens it was trained on,
    and whether this is the rank that tells it. `out` is begun when there is nothing left to refuse.
    """
    with quiet(), _forms(64) if options.compiled else nullcontext():
        args = arguments(options, out / place.CHECKPOINTS)
        checkpoint = place.newest(out / place.CHECKPOINTS)
        data = Data.open(options, args.world_size)
        job = make(data, args)
        args.distributed_state.wait_for_everyone()  # until then the others look at what is in `out`
        if args.process_index == 0:
            place.begin(out, wanted)
        train = job.windows()
        if options.precision == "bfloat16":
            inside(job.model).get_input_embeddings().register_forward_hook(_halved)
        if options.compiled:  # a side network's own layers: hooks come and go on its backbone's
            compile_layers(getattr(job.model, "network", inside(job.model)))
        run = Run(job.model, args, train, data.valid, job.weights, job.teacher, options, job.moving, progress)
        last = run.go(checkpoint)
        final = out / place.FINAL
        job.finish(run, final)
        run.accelerator.wait_for_everyone()
        if args.process_index == 0:
            place.finish(out)
    return {"main": args.process_index == 0, "tokens": options.steps * options.batch * options.window, **last}


def _forms(most: int) -> Any:
    """Layers of a class share what is compiled, in a form for each wiring, seam, training and evaluating: torch would
    compile 8 of them, and run the rest uncompiled.
    """
    return torch._dynamo.config.patch(recompile_limit=most)


def compile_layers(model: Any) -> None:
    """One layer at a time: all of a kind share what is compiled, and it takes seconds."""
    for layer in layers_of(model):
        layer.compile(dynamic=False)


def _halved(embedding: Any, arguments: Any, x: torch.Tensor) -> torch.Tensor:
    """The stream begins in bfloat16, as where the model will run: autocast leaves an embedding, and with it every sum
    of the stream, in float32.
    """
    return x.bfloat16()


def save(run: Run, folder: Path, dtype: torch.dtype) -> None:
    """All weights in `dtype`, by rank 0, wherever they are sharded."""
    trained, state = inside(run.model), {}
    for name, value in trained.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value  # one at a time, by all ranks together
        if run.args.process_index == 0:
            state[name] = whole.to("cpu", dtype if whole.is_floating_point() else whole.dtype)
    if run.args.process_index == 0:
        with torch.device("meta"):
            model = type(trained)(trained.config)
        model.load_state_dict(state, assign=True)
        model.tie_weights()
        model.generation_config = trained.generation_config
        write(model, folder)


def write(model: Any, folder: Path) -> None:
    """A model's files, readable by all."""
    wishes, model.generation_config = model.generation_config, type(model.generation_config)()
    model.save_pretrained(folder)
    wishes.to_json_file(folder / "generation_config.json")  # as they were, to transformers' taste or not
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors creates it for its owner alone
