"""Muon: every matrix takes a step of the same size in all of its directions (Jordan et al. 2024), and that size is
AdamW's, so that one learning rate serves both (Liu et al., arXiv 2502.16982). All other parameters are AdamW's.

    m <- b m + (1 - b) g,    u = b m + (1 - b) g
    W <- (1 - lr decay) W - lr size sqrt(max(rows, columns)) orth(u),    orth(U S V^T) = U V^T, nearly

A model has many matrices of few shapes. Those of a shape are updated together, where torch.optim.Muon updates one
after the other and launches some twenty kernels for each. A matrix whose gradient is zero, such as that of an expert
without tokens, is not updated: orth does not depend on the size of the momentum, however small it has become.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95  # b
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's: all singular values come near 1
STEPS = 5  # of Newton and Schulz
SIZE = 0.2  # the root mean square of what AdamW moves a weight by, in learning rates
AT_ONCE = 1 << 28  # weights, at most, that are updated together: some gigabytes beside the model


class Muon(torch.optim.AdamW):
    """Groups with `matrices` are Muon's, each of one shape; the others are AdamW's."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        every = self.param_groups
        for group in every:
            if group.get("matrices"):
                for weights in _chunks([weight for weight in group["params"] if weight.grad is not None]):
                    self._update(weights, group["lr"], group["weight_decay"])
        self.param_groups = [group for group in every if not group.get("matrices")]
        try:
            super().step()
        finally:
            self.param_groups = every
        return loss

    def _update(self, weights: list[Tensor], rate: float, decay: float) -> None:
        slopes: list[Any] = [weight.grad for weight in weights]
        means = [self._momentum(weight) for weight in weights]
        torch._foreach_lerp_(means, slopes, 1 - MOMENTUM)
        kind = torch.bfloat16 if weights[0].is_cuda else weights[0].dtype
        ahead = torch.stack([slope.lerp(mean, MOMENTUM).to(kind) for slope, mean in zip(slopes, means, strict=True)])
        seen = torch.stack([slope.abs().amax((-2, -1), keepdim=True) > 0 for slope in slopes])
        turned = torch.where(seen, orthogonal(ahead), 0).to(weights[0].dtype)
        torch._foreach_mul_(weights, 1 - rate * decay)
        torch._foreach_add_(weights, list(turned), alpha=-rate * SIZE * max(weights[0].shape[-2:]) ** 0.5)

    def _momentum(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros(())  # AdamW expects it in every state
            state["momentum"] = torch.zeros_like(weight)
        found: Tensor = state["momentum"]
        return found


def muon(model: Any, decayed: set[str], args: Any) -> Muon:
    """For a model, with the settings of transformers' TrainingArguments."""
    return Muon(
        groups(model, decayed, args.weight_decay), lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon, fused=args.device.type == "cuda",
    )  # fmt: skip


def groups(model: Any, decayed: set[str], decay: float) -> list[dict[str, Any]]:
    """Of a model's weights: its matrices but embeddings and head by their shape, the rest by whether it decays."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    ids = {id(each.weight) for each in (*embeddings, model.get_output_embeddings()) if each is not None}
    found: dict[tuple[Any, ...], list[Tensor]] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            matrix = weight.ndim > 1 and id(weight) not in ids
            key = (matrix, weight.shape if matrix else (), name in decayed, weight.device, weight.dtype)
            found.setdefault(key, []).append(weight)
    return [
        {"params": weights, "matrices": matrix, "weight_decay": decay if decays else 0.0}
        for (matrix, _, decays, *_), weights in found.items()
    ]


def orthogonal(x: Tensor) -> Tensor:
    """[..., rows, columns] -> the nearest matrices whose singular values are all 1, about."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def _chunks(weights: list[Tensor]) -> Iterator[list[Tensor]]:
    """All are of one shape: as many at a time as AT_ONCE allows."""
    count = max(1, AT_ONCE // weights[0].numel()) if weights else 1
    for at in range(0, len(weights), count):
        yield weights[at : at + count]
