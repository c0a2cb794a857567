"""The log of a run: log.jsonl, progress, and speed, also as a share of the chip's peak (MFU)."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ladder.errors import LadderError
from ladder.files import write_text
from ladder.hf.wire import layers_of, unwrapped
from ladder.perf.chips import Chip
from ladder.progress import Progress
from ladder.train.options import TrainingOptions


class AlreadyTrained(Exception):
    """The checkpoint to resume from is that of the last step: Trainer would make one step more."""


class RunLog(TrainerCallback):  # type: ignore[misc]
    """Writes log.jsonl; a resumed run's file begins with the lines of its checkpoint. `stage`: what a line says of the
    steps since an earlier one.
    """

    def __init__(
        self,
        options: TrainingOptions,
        stage: Callable[[int], dict[str, float]],
        file: Path,
        progress: Progress,
        teacher: Any = None,
    ) -> None:
        """`teacher`: the model that runs in every step beside the one that is trained."""
        self._options, self._stage, self._file, self._progress = options, stage, file, progress
        self._teacher = teacher
        self._last, self._summary = (0, 0.0), ""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        of_tokens = self._options.counted[0] == "tokens"
        every = [each for each in (model, self._teacher) if each is not None and of_tokens]
        self._operations = sum(operations(each, self._options.length) for each in every)
        self._peak = peak(args.device) if of_tokens else None
        self._last = (state.global_step, time.perf_counter())
        if args.should_save:
            write_text(self._file, "".join(json.dumps(line) + "\n" for line in state.log_history))
        if state.global_step >= state.max_steps:
            raise AlreadyTrained

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
        line = state.log_history[-1]
        if not math.isfinite(loss := line.get("loss", line.get("eval_loss", 0.0))):
            raise LadderError(
                f"the loss is {loss} at step {state.global_step}: there is no model; try a smaller --lr in a new folder"
            )
        name, each = self._options.counted
        line[name] = state.global_step * each
        if "loss" in line:
            line |= self._speed(state.global_step, args.world_size)
            before = max((each["step"] for each in state.log_history[:-1] if "loss" in each), default=0)
            line |= {name: round(value, 4) for name, value in self._stage(before).items()}
        if args.should_save:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._summary = _summary(line)
            self._progress(state.global_step, state.max_steps, self._summary)

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        control.should_log |= state.global_step >= state.max_steps
        if args.should_save:
            self._progress(state.global_step, state.max_steps, self._summary)

    def on_evaluate(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._last = (state.global_step, time.perf_counter())  # the time of an evaluation is not training

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._last = (state.global_step, time.perf_counter())

    def _speed(self, step: int, ranks: int) -> dict[str, float]:
        before, self._last = self._last, (step, time.perf_counter())
        seconds = max(1e-9, self._last[1] - before[1])
        name, each = self._options.counted
        speed = (step - before[0]) * each / seconds
        more = {} if self._peak is None else {"mfu": round(speed * self._operations / (self._peak * ranks), 4)}
        return {f"{name}_per_s": round(speed, 1), **more}


def _summary(line: dict[str, Any]) -> str:
    """A line of the log as a progress bar shows it."""
    if "loss" not in line:
        return f"valid {line['eval_loss']:.4f}" if "eval_loss" in line else ""
    share = f", MFU {line['mfu']:.0%}" if "mfu" in line else ""
    if "examples_per_s" in line:
        return f"loss {line['loss']:.4f}, {line['examples_per_s']:.1f} examples/s"
    return f"loss {line['loss']:.4f}, {line['tokens_per_s'] / 1e3:.1f}k tokens/s{share}"


def operations(model: Any, seq_len: int) -> float:
    """Floating-point operations of training on one token: 2 for every weight that it is multiplied with, as many again
    for the gradient of the input and, where the weight is trained, for its own; and attention over the half of the
    sequence that a token sees on average. Gradients end at the first layer that is trained; those of a side network
    pass the model's last norm and its head alone; a model of which nothing is trained, a teacher, has none.
    """
    own = unwrapped(model)
    layers = layers_of(own)
    learns = any(weight.requires_grad for weight in model.parameters())
    trained = (any(weight.requires_grad for weight in layer.parameters()) for layer in layers)
    frozen = next((index for index, first in enumerate(trained) if first), len(layers))  # layers without a gradient
    unreached = {id(weight) for layer in layers[:frozen] for weight in layer.parameters()}
    embedding, head, config = own.get_input_embeddings(), own.get_output_embeddings(), own.config
    weights = {id(weight): (name, weight) for part in (own, model) for name, weight in part.named_parameters()}
    if head.weight is not embedding.weight:
        del weights[id(embedding.weight)]  # looked up, not multiplied with
    found: float = 2.0 * (frozen + 3 * (len(layers) - frozen)) * _heads_width(config) * seq_len
    for name, weight in weights.values():
        passes = 3 if weight.requires_grad else 2 if learns and id(weight) not in unreached else 1
        found += 2.0 * passes * weight.numel() * (_experts_share(config) if ".experts." in name else 1.0)
    return found


def _heads_width(config: Any) -> int:
    """Of all heads together."""
    heads: int = config.num_attention_heads
    return heads * int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def _experts_share(config: Any) -> float:
    """The share of a layer's experts that a token uses."""
    names = ("num_local_experts", "num_experts")
    return float(config.num_experts_per_tok / next(getattr(config, name) for name in names if hasattr(config, name)))


def peak(device: torch.device) -> float | None:
    """The chip's bfloat16 operations a second, by its data sheet; None: not in the table."""
    chip = Chip.of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if chip is None else chip.bf16_tflop_s * 1e12
