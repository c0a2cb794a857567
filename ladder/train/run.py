"""A training run: open its data, resume from a checkpoint where there is one, train, and write the model."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ladder.data.shards import TOKENIZER, EvenSample, Sequences, Shards
from ladder.engine.executors.torchrun import torchrun_rank
from ladder.errors import LadderError
from ladder.files import writing
from ladder.hf.load import quiet
from ladder.hf.wire import layers_of, unwrapped
from ladder.perf.memory import USABLE, TooLarge, check_host, size_text
from ladder.progress import Progress
from ladder.scan.checkpoints import write_model
from ladder.train import folder
from ladder.train.early import SMALLER, training_text
from ladder.train.loss import LossWeights
from ladder.train.options import TrainingOptions
from ladder.train.stages.on_policy import OnPolicy
from ladder.train.stages.staleness import StalenessSchedule
from ladder.train.teacher import Teacher
from ladder.train.trainer import LadderTrainer, arguments


@dataclass(frozen=True)
class TrainingData:
    """Sequences to train on and to evaluate on."""

    shards: Shards
    train: Sequences | EvenSample  # no more of them than the run reads
    valid: Sequences

    @classmethod
    def open(cls, options: TrainingOptions, ranks: int) -> "TrainingData":
        shards = Shards.open(options.data)
        count = max(ranks, options.eval_tokens // options.length)
        whole = len(Sequences(shards, options.length))
        if options.valid is None:
            count = max(ranks, min(count, whole // 100))
            kept = whole - count
            if kept < options.batch:
                raise LadderError(
                    f"{options.data} has {shards.tokens} tokens: a step needs {options.batch * options.length}, and "
                    f"an evaluation {count * options.length} of them; give more data, or a smaller --batch or "
                    "--seq-len"
                )
            valid = Sequences(shards, options.length, skip=kept, limit=count)
        else:
            other = Shards.open(options.valid)
            other.check_tokenizer(shards.fingerprint, str(options.data / TOKENIZER))
            valid = Sequences(other, options.length, limit=count)
            if len(valid) < ranks:
                raise LadderError(f"{options.valid} has {other.tokens} tokens: {ranks * options.length} are needed")
            kept = whole
        if kept < options.batch:
            raise LadderError(
                f"{options.data} has {shards.tokens} tokens, a step needs {options.batch * options.length}: give more "
                "data, or a smaller --batch or --seq-len"
            )
        # whole steps only: an epoch's last one would be a smaller one
        train = Sequences(shards, options.length, limit=kept // options.batch * options.batch)
        wanted = options.steps * options.batch
        return cls(shards, EvenSample(train, wanted) if wanted < len(train) else train, valid)


@dataclass(frozen=True)
class TrainingTask:
    """What is trained, and how it is saved."""

    model: Any
    weights: LossWeights
    teacher: Teacher | None  # of inputs: `InputsTeacher`
    sequences: Callable[[], Any]  # the training set; a teacher's cache is built by this call
    staleness: StalenessSchedule | None  # None: the wiring from the first step on
    finish: Callable[[Any, Path], None]  # writes the trained model into a folder
    on_policy: OnPolicy | None = None  # the last steps, on text that the model samples


def run_training(
    out: Path,
    wanted: dict[str, Any],
    options: TrainingOptions,
    make: Callable[[Any, Any], TrainingTask],
    progress: Progress,
    open_data: Callable[[TrainingOptions, int], Any] = TrainingData.open,
    kind: type[LadderTrainer] = LadderTrainer,
    first: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Train the task that `make(data, arguments)` returns; returns the last evaluation, on how many tokens or examples
    it was trained, and whether this is the main rank. `out` is written to when all checks are made. `open_data`: of the
    options and the number of ranks; what it returns has sequences to evaluate on, `valid`. `first`, of the
    arguments: work that writes into `out`, before the task is made.
    """
    with quiet(), _sharding(), _compiling() if options.compiled else nullcontext():
        args = arguments(options, out / folder.CHECKPOINTS)
        folder.newest_checkpoint(out / folder.CHECKPOINTS)  # a damaged one is refused before a model is read
        data = open_data(options, args.world_size)
        task = make(data, args) if first is None else None
        args.distributed_state.wait_for_everyone()  # until then the other ranks read what is in `out`
        with folder.owned(out, wanted) if args.process_index == 0 else nullcontext():
            args.distributed_state.wait_for_everyone()
            if first is not None:
                first(args)
            task = task or make(data, args)
            last = _trained(out, options, task, data, args, progress, kind)
    name, each = options.counted
    return {"main": args.process_index == 0, name: options.steps * each, **last}


def _trained(
    out: Path,
    options: TrainingOptions,
    task: TrainingTask,
    data: Any,
    args: Any,
    progress: Progress,
    kind: type[LadderTrainer],
) -> dict[str, float]:
    """Trains to the end, and writes the model; returns the last evaluation."""
    train = task.sequences()
    if options.precision == "bfloat16" and isinstance(data, TrainingData):
        unwrapped(task.model).get_input_embeddings().register_forward_hook(_to_bfloat16)
    if options.compiled:  # a side network's own layers: hooks come and go on its backbone's
        compile_layers(getattr(task.model, "network", unwrapped(task.model)))
    parts = (task.weights, task.teacher, options, task.staleness, progress, task.on_policy)
    trainer = kind(task.model, args, train, data.valid, *parts)
    last = trainer.run(folder.newest_checkpoint(out / folder.CHECKPOINTS))
    with writing(out):
        task.finish(trainer, out / folder.FINAL)
    trainer.accelerator.wait_for_everyone()
    if args.process_index == 0:
        folder.finish(out)
    return last


def check_memory(
    what: str, count: int, each: float, options: TrainingOptions, sharers: int = 1, whole: float = 0.0
) -> None:
    """Refuse a training that needs more memory than there is: `each` bytes for each of `count` weights on every rank,
    or on `sharers` together, and with FSDP on all together; `whole` bytes more on every rank in any case. What layers
    keep for their gradients comes on top.
    """
    own = torchrun_rank()
    ranks, here = (1, 1) if own is None else (own.size, own.local_size)
    need = count * (each / (ranks if options.fsdp else sharers) + whole)
    what = training_text(what, count, each + whole)
    if options.device_type == "cpu":
        check_host(what, need * here, SMALLER)
    elif need > (room := USABLE * torch.cuda.mem_get_info()[0]):
        raise TooLarge(f"{what} needs {size_text(need)} on each GPU, which has {size_text(room)} to use: {SMALLER}")


@contextmanager
def _sharding() -> Iterator[None]:
    """FSDP warns of views that layers return, since an in-place operation on them would lose a hook. Nothing is written
    into the stream of a layer: two ranks train as one does (tests/test_train.py).
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
        yield


@contextmanager
def _compiling() -> Iterator[None]:
    """Layers of a class share their compiled code, a variant for each wiring, seam, training and evaluating: torch
    would compile 8 variants, and run the others uncompiled. Dynamo reads `.grad` of all tensors, and torch warns of it.
    """
    with torch._dynamo.config.patch(recompile_limit=64), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
        yield


def compile_layers(model: Any) -> None:
    """One layer at a time: all of a class share the compiled code, and it takes seconds."""
    for layer in layers_of(model):
        layer.compile(dynamic=False)


def _to_bfloat16(embedding: Any, arguments: Any, x: torch.Tensor) -> torch.Tensor:
    """The stream is bfloat16 from the start, as in generation: autocast leaves the embedding, and with it the whole
    stream, in float32.
    """
    return x.bfloat16()


def save_trained(trainer: LadderTrainer, folder: Path, dtype: torch.dtype) -> None:
    """All weights in `dtype`, by rank 0, wherever they are sharded."""
    trained, state = unwrapped(trainer.model), {}
    for name, value in trained.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value  # one at a time, by all ranks together
        if trainer.args.process_index == 0:
            state[name] = whole.to("cpu", dtype if whole.is_floating_point() else whole.dtype)
    if trainer.args.process_index == 0:
        with torch.device("meta"):
            model = type(trained)(trained.config)
        model.load_state_dict(state, assign=True)
        model.tie_weights()
        if model.can_generate():
            model.generation_config = trained.generation_config
        write_model(model, folder)
