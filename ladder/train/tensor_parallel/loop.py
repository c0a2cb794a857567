"""ladder train --tp: the run, from its start or its newest checkpoint to the finished model."""

import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, TrainerControl, TrainerState
from transformers.optimization import get_scheduler

from ladder.checkpoint import load, save
from ladder.comm.base import Solo
from ladder.comm.differentiable import Differentiable, all_reduced
from ladder.config import ModelConfig
from ladder.files import writing
from ladder.model import Decoder
from ladder.progress import Progress
from ladder.train import folder
from ladder.train.log import AlreadyTrained, RunLog
from ladder.train.options import ScratchOptions, TrainingOptions
from ladder.train.run import TrainingData
from ladder.train.tensor_parallel.mesh import Mesh, checked_world, joined
from ladder.train.tensor_parallel.replicas import Gathered
from ladder.train.tensor_parallel.step import Initial, Step
from ladder.train.trainer import lr_schedule

STATE = "trainer_state.json"  # the step, and the lines of the log so far


@dataclass(frozen=True)
class Ranks:
    """What the log needs of the ranks, under transformers' names."""

    device: torch.device
    world_size: int
    should_save: bool


def train(
    config: ModelConfig,
    plain: LlamaConfig,
    options: ScratchOptions,
    training: TrainingOptions,
    wanted: dict[str, Any],
    finish: Callable[[Path], None],
    progress: Progress,
) -> dict[str, Any]:
    """Train a model of `config`, which transformers knows as `plain`; returns what `train.run.run_training` does.
    `finish` adds to the folder of the finished model what is not its weights or its config.
    """
    world, out = checked_world(config, options, training), options.out
    folder.newest_checkpoint(out / folder.CHECKPOINTS)  # a damaged one is refused before the ranks meet
    data = TrainingData.open(training, world.size // options.tp)
    with joined(world, options.tp, training.device_type) as mesh, ExitStack() as stack:
        comm, dtype = Differentiable(mesh.tp), getattr(torch, training.precision)
        model = load(Decoder(config, comm, mesh.device, dtype), Initial(training.seed, config.layers))
        mesh.barrier()  # until then the other ranks read what is in `out`
        if mesh.first:
            stack.enter_context(folder.owned(out, wanted))
        mesh.barrier()
        checkpoint = folder.newest_checkpoint(out / folder.CHECKPOINTS)
        run = Run(Step(model, mesh, training), data, mesh, training, out, progress)
        last = run.go(checkpoint, plain)
        whole = Decoder(config, Solo(), "cpu" if mesh.first else "meta", getattr(torch, config.dtype))
        load(whole, Gathered(model, run.step.replicas, run.step.masters.of))
        if mesh.first:
            with writing(out):
                save(whole, out / folder.FINAL)
            GenerationConfig.from_model_config(plain).save_pretrained(out / folder.FINAL)
            finish(out / folder.FINAL)
            folder.finish(out)
        mesh.barrier()
    return {"main": mesh.first, "tokens": training.steps * training.batch * training.length, **last}


class Run:
    """Steps, log lines, evaluations and checkpoints, in the order and at the steps of transformers' Trainer."""

    def __init__(
        self, step: Step, data: TrainingData, mesh: Mesh, options: TrainingOptions, out: Path, progress: Progress
    ) -> None:
        self.step, self._data, self._mesh, self._options = step, data, mesh, options
        self._checkpoints = out / folder.CHECKPOINTS
        name, details, warmup = lr_schedule(options)
        self._schedule = get_scheduler(name, step.optimizer, warmup, options.steps, details)
        self._state = TrainerState(max_steps=options.steps)
        self._ranks = Ranks(mesh.device, mesh.size, mesh.first)
        self._log = RunLog(options, lambda before: {}, out / "log.jsonl", progress)
        self._micro, self._times = options.micro_batches(mesh.data.size)
        self._order = (-1, torch.empty(0))  # of an epoch's sequences

    def go(self, checkpoint: Path | None, plain: LlamaConfig) -> dict[str, float]:
        """Train to the end; returns the last evaluation."""
        if checkpoint is not None:
            self._load(checkpoint)
        with torch.device("meta"):
            counted = AutoModelForCausalLM.from_config(plain)  # only to count its operations
        options, state, steps = self._options, self._state, self._options.steps
        with suppress(AlreadyTrained):
            self._log.on_train_begin(self._ranks, state, None, model=counted)
            losses = torch.zeros((), device=self._mesh.device)
            since = state.global_step
            while state.global_step < steps:
                losses += self._train(state.global_step)
                state.global_step += 1
                now, end = state.global_step, state.global_step == steps
                control = TrainerControl(should_log=now % options.log_every == 0)
                self._log.on_step_end(self._ranks, state, control)
                if control.should_log:
                    self._line(loss=self._mean(losses) / (now - since), **self._last)
                    losses.zero_()
                    since = now
                if end or now % (options.eval_every or max(1, steps // 10)) == 0:
                    self._evaluate()
                if end or now % options.save_steps == 0:
                    self._save()
        last = [line for line in state.log_history if "eval_loss" in line][-1]
        return {name: last[name] for name in last if name.startswith("eval_")}

    def _train(self, step: int) -> Tensor:
        """One step; returns this rank's loss."""
        loss = torch.zeros((), device=self._mesh.device)
        numbers = self._sequences(step)
        for at in range(0, len(numbers), self._micro):
            loss += self.step.backward(self._tokens(self._data.train, numbers[at : at + self._micro]), 1 / self._times)
        self._last = {"learning_rate": self._schedule.get_last_lr()[0], "grad_norm": self.step.update()}
        self._schedule.step()
        return loss

    def _sequences(self, step: int) -> list[int]:
        """The numbers of this rank's sequences of a step. Each epoch has an order of its own."""
        options, count = self._options, len(self._data.train)
        epoch, start = divmod(step * options.batch, count)
        if self._order[0] != epoch:
            draw = torch.Generator().manual_seed(options.seed * 1_000_003 + epoch)
            self._order = (epoch, torch.randperm(count, generator=draw))
        share = options.batch // self._mesh.data.size
        start += share * self._mesh.data.rank
        numbers: list[int] = self._order[1][start : start + share].tolist()
        return numbers

    def _tokens(self, sequences: Any, numbers: list[int]) -> Tensor:
        return torch.stack([sequences[number]["input_ids"] for number in numbers]).to(self._mesh.device)

    def _mean(self, value: Tensor) -> Tensor:
        """Over the copies of the model."""
        return all_reduced(self._mesh.data, [value.clone()])[0] / self._mesh.data.size

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Nats per token of the validation sequences, as many of them on every copy of the model."""
        each = len(self._data.valid) // self._mesh.data.size
        numbers = list(range(each * self._mesh.data.rank, each * (self._mesh.data.rank + 1)))
        nats = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for at in range(0, each, self._micro):
            some = numbers[at : at + self._micro]
            nats += self.step.loss(self._tokens(self._data.valid, some)) * (len(some) / each)
        found = float(self._mean(nats))
        self._line(eval_loss=found, eval_perplexity=math.exp(min(found, 700)))
        self._log.on_evaluate(self._ranks, self._state, None)

    def _line(self, **values: float | Tensor) -> None:
        epoch = self._state.global_step * self._options.batch / len(self._data.train)
        line = {name: float(value) for name, value in values.items()}
        self._state.log_history.append({**line, "epoch": epoch, "step": self._state.global_step})
        self._log.on_log(self._ranks, self._state, None)

    def _save(self) -> None:
        """Each part of the model by one of the ranks that hold it; complete when all are written."""
        checkpoint = self._checkpoints / f"checkpoint-{self._state.global_step}"
        if self._mesh.data.rank == 0:
            checkpoint.mkdir(parents=True, exist_ok=True)
            weights = [master.detach() for master in self.step.masters.of.values()]
            state = {"weights": weights, "optimizer": self.step.optimizer.state_dict()}
            with writing(checkpoint):
                torch.save({**state, "schedule": self._schedule.state_dict()}, self._file(checkpoint))
        if self._mesh.first:
            self._state.save_to_json(str(checkpoint / STATE))
        self._mesh.barrier()
        if self._mesh.first:
            folder.mark_complete(checkpoint)
            for old in folder.complete_checkpoints(self._checkpoints)[: -self._options.keep]:
                shutil.rmtree(old)
        self._log.on_save(self._ranks, self._state, None)

    def _load(self, checkpoint: Path) -> None:
        found = torch.load(self._file(checkpoint), map_location=self._mesh.device, weights_only=True)
        with torch.no_grad():
            for master, weight in zip(self.step.masters.of.values(), found["weights"], strict=True):
                master.copy_(weight)
        self.step.masters.round()
        self.step.optimizer.load_state_dict(found["optimizer"])
        self._schedule.load_state_dict(found["schedule"])
        self._state = TrainerState.load_from_json(str(checkpoint / STATE))

    def _file(self, checkpoint: Path) -> Path:
        return checkpoint / f"rank-{self._mesh.tp.rank}-of-{self._mesh.tp.size}.pt"
