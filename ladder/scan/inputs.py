"""Inputs of models that do not read text alone: a safetensors file of what the model is called with.

    save_file({"pixel_values": pixels}, "images.safetensors")      # [examples, channels, height, width]

What is compared is what the model gives back: logits by their KL divergence and by how often the likeliest class is the
same, features by their distance.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ladder.errors import LadderError
from ladder.hf.load import reason
from ladder.hf.measures import kl_terms

LABELS = "labels"  # the name of classes to learn in a file of inputs
FEATURES = ("image_embeds", "text_embeds", "pooler_output", "last_hidden_state")


@dataclass(frozen=True)
class Inputs:
    """Named tensors with as many rows each."""

    tensors: Mapping[str, Tensor]

    @classmethod
    def open(cls, path: Path, accepted: Callable[..., Any], labels: bool = False) -> "Inputs":
        """Read a file; refuses what the model's forward does not take. `labels`: it may have classes to learn."""
        if path.is_dir() or not path.exists():
            raise LadderError(
                f"{path} is no file of inputs: this model reads more than text, so give a .safetensors file of tensors "
                "by the names of its arguments, as in pixel_values"
            )
        try:
            tensors = load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise LadderError(f"{path} cannot be read as safetensors: {error}") from None
        known = inspect.signature(accepted).parameters
        for name, tensor in tensors.items():
            if name == LABELS and labels:
                if tensor.is_floating_point() or tensor.dtype == torch.bool or not tensor.dim():
                    raise LadderError(f"{path}: {LABELS} must be whole numbers, [examples] or [examples, tokens]")
                continue
            if name not in known or name == LABELS:
                raise LadderError(f"{path} has {name!r}, which the model is not called with: leave it out")
            if tensor.dim() < 2 or (tensor.is_floating_point() and not bool(tensor.isfinite().all())):
                raise LadderError(f"{path}: {name} must be [examples, ...] of finite numbers")
        if len({len(tensor) for tensor in tensors.values()}) != 1 or tensors.keys() <= {LABELS}:
            raise LadderError(f"{path} must have tensors of one number of examples each")
        return cls({name: tensor if tensor.is_floating_point() else tensor.long() for name, tensor in tensors.items()})

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, rows: slice | Tensor) -> "Inputs":
        return Inputs({name: tensor[rows] for name, tensor in self.tensors.items()})

    @property
    def labels(self) -> Tensor | None:
        """The classes to learn, if the file has them."""
        return self.tensors.get(LABELS)

    def unlabelled(self) -> "Inputs":
        """What the model is called with."""
        return Inputs({name: tensor for name, tensor in self.tensors.items() if name != LABELS})

    def check_fit(self, model: Any) -> None:
        """Refuse inputs that the model cannot be called with: by its vocabulary, and by calling it with the first."""
        part = getattr(model.config, "text_config", model.config)
        for name, tensor in self.tensors.items():
            if name.endswith("input_ids") and (size := getattr(part, "vocab_size", None)) is not None:
                wrong = tensor[(tensor < 0) | (tensor >= size)]
                if len(wrong):
                    raise LadderError(
                        f"{name} must be from 0 to {size - 1}, the model's vocabulary, not {int(wrong[0])}"
                    )
        try:
            with torch.no_grad():
                model(**arguments(model, self[slice(0, 1)].unlabelled().tensors))
        except Exception as error:  # of whatever kind: a model has no other way to say what it wants
            raise LadderError(f"the model cannot be called with these examples: {reason(error)}") from error

    def batches(self, size: int) -> list[dict[str, Tensor]]:
        """As arguments, `size` examples at a time."""
        return [dict(self[slice(at, at + size)].tensors) for at in range(0, len(self), size)]

    def split(self, batch: int) -> tuple["Inputs", "Inputs"]:
        """Whole batches to learn from, and the last tenth to measure on."""
        measured = max(1, len(self) // 10)
        count = (len(self) - measured) // batch * batch
        if not count:
            raise LadderError(f"{len(self)} examples: a batch of {batch} and a tenth to measure on are needed")
        return self[slice(0, count)], self[slice(len(self) - measured, len(self))]


def arguments(model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch on the model's device, in its dtype."""
    return {
        name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in batch.items()
    }


def answers(output: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What counts of a model's output: logits [rows, classes], or features [rows, width]; of tokens that are no
    padding. `given`: what it was called with.
    """
    names = ("logits",) if output.get("logits") is not None else FEATURES
    found = {name: rows(output[name], given).float() for name in names if output.get(name) is not None}
    if not found:
        raise LadderError("the model gives back neither logits nor features that are known: " + ", ".join(FEATURES))
    return found


def rows(values: Tensor, given: Mapping[str, Tensor], inner: int = 1) -> Tensor:
    """[examples, ...] or [examples, tokens, ...] -> [rows, ...], without padding. `inner`: dimensions of a row."""
    mask = given.get("decoder_attention_mask" if "decoder_input_ids" in given else "attention_mask")
    outer = values.shape[: values.dim() - inner]
    return values[mask.bool()] if mask is not None and mask.shape == outer else values.flatten(0, len(outer) - 1)


def apart(own: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Tensor:
    """KL(wanted || own) of logits, nats a row; of features the squared distance relative to the wanted ones."""
    if "logits" in own:
        return kl_terms(wanted["logits"].log_softmax(-1), own["logits"].log_softmax(-1)).sum(-1).mean()
    distances = [
        (own[name] - wanted[name]).square().sum(-1) / wanted[name].square().sum(-1).clamp(min=1e-12) for name in own
    ]
    return torch.stack([each.mean() for each in distances]).mean()


@dataclass(frozen=True)
class OutputDistance:
    """How far a model's outputs are from its original's."""

    value: float
    agreement: float | None  # share of rows whose likeliest class is the same; None: features

    def __str__(self) -> str:
        if self.agreement is None:
            return f"distance {self.value:.4g}"
        return f"KL {self.value:.4g}, agreement {self.agreement:.1%}"


def output_distance(model: Any, original: Any, inputs: Inputs, batch: int) -> OutputDistance:
    """Over all examples."""
    total, same, rows = 0.0, 0.0, 0
    for some in inputs.batches(batch):
        with torch.no_grad():
            given = [arguments(each, some) for each in (model, original)]
            own, wanted = (answers(each(**named), named) for each, named in zip((model, original), given, strict=True))
        count = len(next(iter(some.values())))
        total += float(apart(own, wanted)) * count
        if "logits" in own:
            same += float((own["logits"].argmax(-1) == wanted["logits"].argmax(-1)).double().mean()) * count
        rows += count
    return OutputDistance(total / rows, same / rows if "logits" in own else None)
