"""transformers' Trainer with distillation, rising staleness, and atomic checkpoints."""

import math
import shutil
import warnings
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ladder.errors import LadderError, install
from ladder.files import writing
from ladder.hf import set_staleness
from ladder.hf.measures import kl_terms, perplexity_of
from ladder.progress import Progress
from ladder.train.folder import complete_checkpoints, mark_complete
from ladder.train.head import Head, Logits, chunks
from ladder.train.log import AlreadyTrained, RunLog
from ladder.train.loss import (
    IGNORED,
    LossWeights,
    distillation_loss,
    hidden_distance,
    loss_chunk,
    next_tokens,
    wide_log_probs,
)
from ladder.train.muon import muon
from ladder.train.options import TrainingOptions
from ladder.train.stages.on_policy import OnPolicy
from ladder.train.stages.staleness import StalenessSchedule
from ladder.train.teacher import Teacher

FINAL_LR = 0.1  # of the learning rate's peak


class Arguments(TrainingArguments):  # type: ignore[misc]
    """One device for a process. On CPUs accelerate names that of several ranks `cpu:0`, from where nothing loads."""

    @property
    def device(self) -> torch.device:
        found: torch.device = super().device
        return torch.device("cpu") if found.type == "cpu" else found

    @property
    def n_gpu(self) -> int:
        return min(1, int(super().n_gpu))  # or transformers takes DataParallel: torchrun has a process for each


def arguments(options: TrainingOptions, folder: Path) -> TrainingArguments:
    """The options as transformers has them. Joins the ranks of torchrun, if torchrun has started this process."""
    if find_spec("accelerate") is None:
        raise LadderError(f"training needs accelerate: {install('train')}")
    on_gpu, steps = options.device_type == "cuda", options.steps
    schedule, details, warmup = lr_schedule(options)
    made = Arguments(
        output_dir=str(folder), max_steps=steps, learning_rate=options.lr, weight_decay=options.weight_decay,
        adam_beta2=options.beta2, max_grad_norm=options.clip, lr_scheduler_type=schedule,
        lr_scheduler_kwargs=details, warmup_steps=warmup, seed=options.seed, data_seed=options.seed,
        bf16=options.precision == "bfloat16", tf32=True if on_gpu else None, use_cpu=not on_gpu,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch", gradient_checkpointing=options.recompute,
        gradient_checkpointing_kwargs={"use_reentrant": False} if options.recompute else None,
        fsdp=options.fsdp or None,
        fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"} if options.fsdp else None,
        logging_steps=options.log_every, logging_nan_inf_filter=False, save_steps=options.save_steps,
        eval_strategy="steps", eval_steps=options.eval_every or max(1, steps // 10), report_to=[], disable_tqdm=True,
        remove_unused_columns=False, dataloader_num_workers=2 if on_gpu else 0, dataloader_pin_memory=on_gpu,
        accelerator_config={"non_blocking": on_gpu},  # or every batch waits for all that the GPU has still to do
        dataloader_drop_last=True, ddp_find_unused_parameters=False,
    )  # fmt: skip
    if options.fsdp and made.world_size == 1:
        raise LadderError("--fsdp shards over ranks, and there is one: start it with torchrun, or leave --fsdp out")
    size, passes = options.micro_batches(made.world_size)
    made.per_device_train_batch_size, made.gradient_accumulation_steps = size, passes
    made.per_device_eval_batch_size = size
    return made


def lr_schedule(options: TrainingOptions) -> tuple[str, dict[str, Any], int]:
    """transformers' name of the learning rate's schedule, its arguments, and the steps of its warm-up."""
    schedules: dict[str, tuple[str, dict[str, Any]]] = {
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": FINAL_LR}),
        "linear": ("polynomial", {"lr_end": FINAL_LR * options.lr, "power": 1.0}),
        "constant": ("constant_with_warmup", {}),
    }
    return *schedules[options.schedule], math.ceil(options.warmup * options.steps)


class LadderTrainer(Trainer):  # type: ignore[misc]
    """One run. Without a teacher the model learns from the text alone."""

    optimizer: Any

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        train: Any,
        valid: Any,
        weights: LossWeights,
        teacher: Teacher | None,
        options: TrainingOptions,
        staleness: StalenessSchedule | None,
        progress: Progress,
        on_policy: OnPolicy | None = None,
    ) -> None:
        self._weights, self._teacher, self._options = weights, teacher, options
        self._on_policy = on_policy
        self._draws: torch.Generator | None = None  # of the step, once it has begun to sample
        cached = getattr(model.config, "use_cache", None)  # which Trainer turns off, also in the config that is saved
        super().__init__(model=model, args=args, train_dataset=train, eval_dataset=valid)
        if cached is None:
            del model.config.use_cache
        else:
            model.config.use_cache = cached
        self.model_accepts_loss_kwargs = False  # sequences are of one length: a mean of means is the mean
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self._head = Head(model, tells=args.process_index == 0)
        self._loss_chunk = torch.compile(loss_chunk, dynamic=False) if options.compiled else loss_chunk
        self._schedule = staleness
        file, beside = Path(args.output_dir).parent / "log.jsonl", None if teacher is None else teacher.model
        self.add_callback(RunLog(options, self.stage, file, progress, beside))
        self.add_callback(_StepCallback(self))

    def create_accelerator_and_postprocess(self) -> None:
        """accelerate has FSDP on accelerators only, and silently ignores it elsewhere; torch has it on CPUs too."""
        super().create_accelerator_and_postprocess()
        # its autocast makes float32 of all logits; ours (`_forward`) does not. FSDP2's own policy stays as it is.
        self.accelerator.native_amp = False
        state = self.accelerator.state
        if self._options.fsdp and getattr(state, "fsdp_plugin", None) is None:
            from accelerate.utils import (  # type: ignore[import-untyped]
                DistributedType,
                FullyShardedDataParallelPlugin,
            )

            state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            if self._options.precision == "bfloat16":
                state.fsdp_plugin.set_mixed_precision("bf16")
            self.is_fsdp_enabled = True
        if (policy := getattr(getattr(state, "fsdp_plugin", None), "mixed_precision_policy", None)) is not None:
            # the head returns the loss, which stays float32, and so does its gradient; all else is bfloat16 anyway
            state.fsdp_plugin.mixed_precision_policy = replace(policy, output_dtype=None)

    def create_optimizer(self, model: Any = None) -> Any:
        if self._options.optimizer == "muon" and self.optimizer is None:
            decayed = set(self.get_decay_parameter_names(self.model))
            self.optimizer = muon(self.model, decayed, self.args)
        return super().create_optimizer(model)

    def run(self, checkpoint: Path | None) -> dict[str, float]:
        """Train to the end, from a checkpoint where there is one; returns the last evaluation."""
        with suppress(AlreadyTrained):
            self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if self._schedule:
            set_staleness(self.model, 1.0)
        last = [line for line in self.state.log_history if "eval_loss" in line and line["step"] == self.state.max_steps]
        return {name: last[-1][name] for name in last[-1] if name.startswith("eval_")} if last else self.evaluate()

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self._on_policy is not None and self.state.global_step >= self._on_policy.first:
            loss = self._on_policy_loss(self._on_policy, model, inputs)
            return (loss, None) if return_outputs else loss
        weights, streams = self._weights, bool(self._weights.hidden)
        more = {"output_hidden_states": True} if streams else {}  # which not every model takes
        teacher: Any = None
        wanted: tuple[Tensor, ...] = ()
        if self._teacher is not None and (weights.kl or streams):
            teacher, wanted = self._teacher.outputs(inputs, streams)
        targets = next_tokens(inputs["labels"]).flatten()
        judged = teacher if weights.kl else None
        outputs, loss = self._distilled(model, inputs["input_ids"], judged, targets, weights, **more)
        if streams:
            loss = loss + weights.hidden * hidden_distance(outputs.hidden_states[1:], wanted)
        return (loss, None) if return_outputs else loss

    def _on_policy_loss(self, stage: OnPolicy, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Of a batch of which the model has sampled all but the prompts."""
        if self._draws is None:
            self._draws = stage.generator(self.state.global_step, self.args.process_index, self.args.device)
        with self._computing():
            tokens = stage.sampled(self.model, inputs["input_ids"], self._draws)
        assert self._teacher is not None
        wanted, _ = self._teacher.outputs({"input_ids": tokens})
        return self._distilled(model, tokens, wanted, stage.targets(tokens).flatten(), stage.weights)[1]

    def _distilled(
        self, model: Any, tokens: Tensor, teacher: Any, targets: Tensor, weights: LossWeights, **more: Any
    ) -> tuple[Any, Tensor]:
        """The output of a pass over [sequences, tokens], and the loss, which is computed in the head's place."""

        def loss_of(logits: Tensor | Logits) -> Tensor:
            return distillation_loss(logits, teacher, targets, weights, self._loss_chunk)

        return self._head.apply(lambda tokens: self._forward(model, {"input_ids": tokens}, **more), tokens, loss_of)

    def stage(self, before: int) -> dict[str, float]:
        """For the log: how far staleness is at this step, and of the steps since `before` the share that are
        on-policy; nothing of what a run does not have.
        """
        step = self.state.global_step
        found = {"staleness": self._schedule.share(step)} if self._schedule else {}
        return found | ({"on_policy": self._on_policy.share(before, step)} if self._on_policy else {})

    def begin_step(self) -> None:
        """Staleness is what the schedule has for this step, and what is sampled begins anew."""
        self._draws = None
        self.set_staleness()

    def set_staleness(self) -> None:
        """To what the schedule has for this step."""
        if self._schedule:
            set_staleness(self.model, self._schedule.at(self.state.global_step))

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        """Nats per token of the text, and with a teacher in memory KL and agreement, over the validation sequences;
        under the wiring itself, whatever the staleness is at this step.
        """
        model, ranks = self.model_wrapped, self.args.world_size
        model.eval()
        if self._schedule:
            set_staleness(self.model, 1.0)
        sums = torch.zeros((), dtype=torch.float64, device=self.args.device)
        size = self.args.per_device_eval_batch_size
        each = len(self.eval_dataset) // ranks  # as many on every rank: a sharded model's passes are made together
        mine = range(self.args.process_index * each, (self.args.process_index + 1) * each)
        for at in range(0, each, size):
            items = [self.eval_dataset[index] for index in mine[at : at + size]]
            inputs = {name: torch.stack([item[name] for item in items]).to(self.args.device) for name in items[0]}
            with torch.no_grad(), self.compute_loss_context_manager():
                sums = sums + self._scores(model, inputs)
        sums = self.accelerator.reduce(sums, "sum")
        found = self._figures(sums.tolist(), ranks * each)
        self.set_staleness()
        self.log(dict(found))
        self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found

    def _figures(self, sums: list[float], sequences: int) -> dict[str, float]:
        """What `_scores` of so many sequences say together."""
        nats, counted, kl, agree = sums
        found = {"eval_loss": nats / counted, "eval_perplexity": perplexity_of(nats / counted)}
        if self._teacher is not None and self._teacher.online:
            tokens = sequences * len(self.eval_dataset[0]["input_ids"])
            found |= {"eval_kl": kl / tokens, "eval_agreement": agree / tokens}
        return found

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "train_runtime" not in logs:  # Trainer's last line, which does not count what was before a resumption
            super().log(logs, start_time)

    def _computing(self) -> Any:
        """In the dtype of the computation."""
        return torch.autocast(self.args.device.type, torch.bfloat16, enabled=self._options.precision == "bfloat16")

    def _forward(self, model: Any, inputs: dict[str, Tensor], **more: Any) -> Any:
        with self._computing():
            return model(input_ids=inputs["input_ids"], use_cache=False, **more)

    def _scores(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Sums over a batch: nats, targets, KL, tokens whose likeliest successor is the teacher's."""
        wanted: Any = None
        if self._teacher is not None and self._teacher.online:
            wanted, _ = self._teacher.outputs(inputs)
        targets = next_tokens(inputs["labels"]).flatten()

        def sums_of(logits: Tensor | Logits) -> Tensor:
            parts = chunks(logits.shape, targets.device)
            return torch.stack(
                [self._chunk_scores(logits[at], None if wanted is None else wanted[at], targets[at]) for at in parts]
            ).sum(0)

        _, sums = self._head.apply(
            lambda tokens: self._forward(model, {"input_ids": tokens}), inputs["input_ids"], sums_of
        )
        return sums

    def _chunk_scores(self, logits: Tensor, wanted: Tensor | None, targets: Tensor) -> Tensor:
        own, real = wide_log_probs(logits), targets != IGNORED
        likelihoods = own.gather(-1, targets.where(real, 0).unsqueeze(-1)).squeeze(-1)
        nats = -likelihoods.where(real, 0).double().sum()
        kl = agree = nats.new_zeros(())
        if wanted is not None:
            kl = kl_terms(wide_log_probs(wanted), own).sum()
            agree = (logits.argmax(-1) == wanted.argmax(-1)).sum()
        return torch.stack([each.double() for each in (nats, real.sum(), kl, agree)])

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """A checkpoint's weights under the names that they are loaded by: `save_pretrained` gives experts names
        of the hub, under which Trainer finds none of them, and refuses generation configs that it holds for invalid.
        """
        if hasattr(self.model, "peft_config"):
            with warnings.catch_warnings():  # peft looks for the config of a model that exists in memory only
                warnings.filterwarnings("ignore", "Could not find a config file", UserWarning)
                super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.model, str(folder / "model.safetensors"))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Older checkpoints go only when all ranks have written all of the new one."""
        with writing(Path(self.args.output_dir)):
            super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            every = Path(self.args.output_dir)
            mark_complete(every / f"checkpoint-{self.state.global_step}")
            for old in complete_checkpoints(every)[: -self._options.keep]:
                shutil.rmtree(old)


class _StepCallback(TrainerCallback):  # type: ignore[misc]
    """Begins every step."""

    def __init__(self, trainer: LadderTrainer) -> None:
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._trainer.begin_step()
