"""Training of models that are called with more than tokens: their losses, and what an evaluation of them says.

loss = kl_weight * KL(teacher || student) of the logits, or the relative squared distance of the features
       + lm_weight * cross-entropy of the labels
       + hidden_weight * |stream - teacher's|^2 / |teacher's|^2 after each layer of every stack
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from ladder.errors import LadderError
from ladder.hf.wire import layers_of
from ladder.scan.inputs import LABELS, Inputs, answers, apart, arguments, rows
from ladder.train.loss import IGNORED, hidden_distance
from ladder.train.options import TrainingOptions
from ladder.train.trainer import LadderTrainer


class Examples(Dataset[dict[str, Tensor]]):
    """Rows of a file of inputs."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rows = {name: tensor[index] for name, tensor in self.inputs.tensors.items()}
        return {name: row.float() if row.is_floating_point() else row for name, row in rows.items()}


@dataclass(frozen=True)
class ExamplesData:
    """Examples to train on and to evaluate on."""

    train: Examples
    valid: Examples

    @classmethod
    def open(cls, options: TrainingOptions, accepted: Any) -> "ExamplesData":
        """Of the options' files; refuses what the model's forward does not take."""
        inputs = Inputs.open(options.data, accepted, labels=True)
        if options.valid is None:
            train, valid = inputs.split(options.batch)
        else:
            valid = Inputs.open(options.valid, accepted, labels=True)
            if valid.tensors.keys() != inputs.tensors.keys():
                raise LadderError(f"{options.valid} must have tensors of the same names as {options.data}")
            train = inputs[slice(0, len(inputs) // options.batch * options.batch)]
            if not len(train):
                raise LadderError(f"{options.data} has {len(inputs)} examples: a batch of {options.batch} is needed")
        return cls(Examples(train), Examples(valid))


class InputsTeacher:
    """The original itself, frozen, beside its student."""

    online = True

    def __init__(self, model: Any, of_logits: bool) -> None:
        self.model, self.of_logits = model.eval().requires_grad_(False), of_logits

    def outputs(self, inputs: Mapping[str, Tensor], streams: bool = False) -> tuple[dict[str, Tensor], list[Tensor]]:
        """What counts of its output, and with `streams` the residual streams after each layer."""
        device = next(iter(inputs.values())).device
        if self.model.device != device:
            self.model.to(device)
        with torch.no_grad(), streams_of(self.model, streams) as found:
            output = called(self.model, self.model, arguments(self.model, inputs))
        return answers(output, inputs), found


def called(model: Any, own: Any, inputs: Mapping[str, Tensor]) -> Any:
    """The output of a model, without a cache. `own`: the model inside what accelerate has put around it."""
    more = {"use_cache": False} if "use_cache" in inspect.signature(own.forward).parameters else {}
    return model(**inputs, **more)


@contextmanager
def streams_of(model: Any, wanted: bool) -> Iterator[list[Tensor]]:
    """Collects the stream after each layer of every stack, wired or not, in passes that are made meanwhile."""
    found: list[Tensor] = []

    def keep(layer: Any, given: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(keep) for layer in layers_of(model)] if wanted else []
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


class InputsTrainer(LadderTrainer):
    """One run of such a model."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        weights, labels, given = self._weights, *_parted(inputs)
        with streams_of(self.model, bool(weights.hidden)) as streams:
            own = answers(self._forward(model, given), given)
        loss = next(iter(own.values())).new_zeros(())
        if self._teacher is not None:
            wanted: Any
            wanted, theirs = self._teacher.outputs(given, bool(weights.hidden))
            if weights.kl:
                loss = loss + weights.kl * apart(own, wanted)
            if weights.hidden:
                loss = loss + weights.hidden * hidden_distance(streams, theirs)
        if weights.lm and labels is not None:
            loss = loss + weights.lm * F.cross_entropy(own["logits"], rows(labels, given, 0), ignore_index=IGNORED)
        return (loss, None) if return_outputs else loss

    def _forward(self, model: Any, inputs: dict[str, Tensor], **more: Any) -> Any:
        with self._computing():
            return called(model, self.model, inputs)

    def _scores(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Sums over a batch: distance from the teacher and agreement with it, times examples; nats, right, labels."""
        labels, given = _parted(inputs)
        own, count = answers(self._forward(model, given), given), len(next(iter(given.values())))
        distance = same = nats = right = counted = next(iter(own.values())).new_zeros((), dtype=torch.float64)
        if self._teacher is not None:
            wanted: Any = self._teacher.outputs(given)[0]
            distance = apart(own, wanted).double() * count
            if "logits" in own:
                same = (own["logits"].argmax(-1) == wanted["logits"].argmax(-1)).double().mean() * count
        if labels is not None and "logits" in own:
            flat = rows(labels, given, 0)
            counted = (flat != IGNORED).sum().double()
            nats = F.cross_entropy(own["logits"], flat, ignore_index=IGNORED, reduction="sum").double()
            right = (own["logits"].argmax(-1) == flat).sum().double()
        return torch.stack([distance, same, nats, right, counted])

    def _figures(self, sums: list[float], sequences: int) -> dict[str, float]:
        distance, same, nats, right, counted = sums
        loss, found = 0.0, dict[str, float]()
        if self._teacher is not None:
            value = distance / sequences
            of_logits = getattr(self._teacher, "of_logits", True)
            found |= {"eval_kl": value, "eval_agreement": same / sequences} if of_logits else {"eval_distance": value}
            loss += (self._weights.kl or float(not self._weights.lm)) * value
        if counted:
            found |= {"eval_cross_entropy": nats / counted, "eval_accuracy": right / counted}
            loss += self._weights.lm * nats / counted
        return {"eval_loss": loss, **found}


def _parted(inputs: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The labels, and what the model is called with."""
    return inputs.get(LABELS), {name: tensor for name, tensor in inputs.items() if name != LABELS}
