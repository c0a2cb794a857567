"""One rank's part of a training step of the native decoder."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ladder.checkpoint import Random
from ladder.comm.differentiable import all_reduced
from ladder.model import Decoder
from ladder.train.loss import next_tokens
from ladder.train.options import TrainingOptions
from ladder.train.tensor_parallel.loss import cross_entropy
from ladder.train.tensor_parallel.mesh import Mesh
from ladder.train.tensor_parallel.replicas import Replicas, Views, shard_views


class Initial(Random):
    """Weights drawn as `ladder train` does elsewhere: norms one, biases zero, and what a sub-block adds to the stream
    smaller by the square root of how many there are.
    """

    def __init__(self, seed: int, layers: int) -> None:
        super().__init__(seed)
        self._less = (2 * layers) ** -0.5

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)[index]
        if name.endswith("bias"):
            return torch.zeros(shape)[index]
        piece = super().read(name, shape, index)
        return piece * self._less if name.endswith(("o_proj.weight", "down_proj.weight")) else piece


class Masters:
    """The weights that the optimizer moves, in float32 at least. Where the model computes in bfloat16 they are copies:
    they take its gradients after every backward pass, and it is rounded from them after every step.
    """

    def __init__(self, model: Decoder) -> None:
        self.of: dict[nn.Parameter, nn.Parameter] = {
            own: own if own.dtype.itemsize >= 4 else nn.Parameter(own.detach().float()) for own in model.parameters()
        }

    def take_gradients(self) -> None:
        for own, master in self.of.items():
            if master is not own and own.grad is not None:
                gradient = own.grad.to(master.dtype)
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                own.grad = None

    @torch.no_grad()
    def round(self) -> None:
        for own, master in self.of.items():
            if master is not own:
                own.copy_(master)

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        return {own: master.grad for own, master in self.of.items() if master.grad is not None}


class Step:
    """Backward passes, then `update`: AdamW on this rank's part of the weights. `model` must have been built on a
    `Differentiable` communicator of the mesh's TP ranks.

    All-reduces of the stream and of its gradient run beside sub-blocks as the wiring has it; the gradients of what
    several ranks hold, and those of the copies of the model, are added up once per step.
    """

    def __init__(self, model: Decoder, mesh: Mesh, options: TrainingOptions) -> None:
        self.model = model.requires_grad_(True)
        self.masters = Masters(model)
        self.replicas = Replicas(model)
        self._mesh, self._clip = mesh, options.clip
        weights = list(self.masters.of.values())
        groups: list[dict[str, Any]] = [  # as transformers' Trainer: norms and biases do not decay
            {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
        ]
        betas, fused = (0.9, options.beta2), mesh.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=betas, fused=fused)

    def loss(self, tokens: Tensor) -> Tensor:
        """Nats per token of [batch, tokens], the same on all TP ranks."""
        return cross_entropy(self.model.comm, self.model(tokens), next_tokens(tokens), self.model.config.vocab)

    def backward(self, tokens: Tensor, share: float = 1.0) -> Tensor:
        """Add `share` of the loss, which is returned, to the gradient."""
        loss = self.loss(tokens) * share
        loss.backward()
        self.masters.take_gradients()
        return loss.detach()

    def update(self) -> Tensor:
        """One step with the gradient so far; returns its norm before it was clipped."""
        views = self._views(self.masters.gradients())
        self.replicas.sum_gradients(views)
        weights = [master for master in self.masters.of.values() if master.grad is not None]
        if self._mesh.data.size > 1:
            sums = all_reduced(self._mesh.data, [weight.grad for weight in weights if weight.grad is not None])
            for weight, total in zip(weights, sums, strict=True):
                weight.grad = total.div_(self._mesh.data.size)
            views = self._views(self.masters.gradients())
        norm = self.replicas.norm(views)
        torch.nn.utils.clip_grads_with_norm_(weights, self._clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.masters.round()
        return norm

    def _views(self, tensors: Mapping[nn.Parameter, Tensor]) -> Views:
        return list(shard_views(self.model, tensors))
