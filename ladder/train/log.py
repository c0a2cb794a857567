"""What a run tells: every line in log.jsonl, and its progress; and that there is nothing left to do."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ladder.errors import LadderError
from ladder.train.flops import operations, peak
from ladder.train.options import TrainingOptions

Progress = Callable[[int, int, str], None]  # done, of how many, what


class Done(Exception):
    """The checkpoint to go on from is that of the last step: Trainer would make one step more."""


class Log(TrainerCallback):  # type: ignore[misc]
    """Every line in log.jsonl; a resumed run's file begins with the lines of its checkpoint."""

    def __init__(
        self, options: TrainingOptions, staleness: Callable[[], float | None], file: Path, progress: Progress
    ) -> None:
        self._options, self._staleness, self._file, self._progress = options, staleness, file, progress
        self._last, self._said = (0, 0.0), ""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        self._operations = operations(model, self._options.window)
        self._peak = peak(args.device)
        self._last = (state.global_step, time.perf_counter())
        if args.should_save:
            self._file.write_text("".join(json.dumps(line) + "\n" for line in state.log_history), encoding="utf-8")
        if state.global_step >= state.max_steps:
            raise Done

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
        line = state.log_history[-1]
        if not math.isfinite(loss := line.get("loss", line.get("eval_loss", 0.0))):
            raise LadderError(f"the loss is {loss} at step {state.global_step}: there is no model; try a smaller --lr")
        line["tokens"] = state.global_step * self._options.batch * self._options.window
        if "loss" in line:
            line |= self._speed(state.global_step, args.world_size)
            if (now := self._staleness()) is not None:
                line["staleness"] = round(now, 4)
        if args.should_save:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._said = _told(line)
            self._progress(state.global_step, state.max_steps, self._said)

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        control.should_log |= state.global_step >= state.max_steps
        if args.should_save:
            self._progress(state.global_step, state.max_steps, self._said)

    def on_evaluate(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._last = (state.global_step, time.perf_counter())  # what an evaluation takes is not training

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._last = (state.global_step, time.perf_counter())

    def _speed(self, step: int, ranks: int) -> dict[str, float]:
        before, self._last = self._last, (step, time.perf_counter())
        seconds = max(1e-9, self._last[1] - before[1])
        speed = (step - before[0]) * self._options.batch * self._options.window / seconds
        more = {} if self._peak is None else {"mfu": round(speed * self._operations / (self._peak * ranks), 4)}
        return {"tokens_per_s": round(speed, 1), **more}


def _told(line: dict[str, Any]) -> str:
    """A line of the log as a progress bar shows it."""
    if "loss" not in line:
        return f"valid {line['eval_loss']:.4f}" if "eval_loss" in line else ""
    share = f", MFU {line['mfu']:.0%}" if "mfu" in line else ""
    return f"loss {line['loss']:.4f}, {line['tokens_per_s'] / 1e3:.1f}k tokens/s{share}"
