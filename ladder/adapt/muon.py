"""Muon: every matrix takes a step of the same size in all of its directions (Jordan et al. 2024), and that size is
AdamW's, so that one learning rate does for both (Liu et al., arXiv 2502.16982). What is no matrix stays with AdamW.

    m <- 0.95 m + 0.05 g,    u = 0.95 m + 0.05 g
    W <- (1 - lr decay) W - lr 0.2 sqrt(max(rows, columns)) orth(u),    orth(U S V^T) = U V^T, nearly

A model has many matrices of few shapes. Those of a shape take their step together: torch.optim.Muon takes one after
the other, and for a small model that launches kernels for longer than the layers compute.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's: all singular values to about 1 in five steps
STEPS = 5
LIKE_ADAMW = 0.2  # the root mean square of what AdamW moves a weight by, in learning rates


class Muon(torch.optim.AdamW):
    """Groups with `matrices` are Muon's, each of one shape; the others AdamW's."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        every = self.param_groups
        for group in every:
            if group.get("matrices"):
                self._turn(group)
        self.param_groups = [group for group in every if not group.get("matrices")]
        try:
            return super().step(closure)
        finally:
            self.param_groups = every

    def _turn(self, group: dict[str, Any]) -> None:
        moved = [weight for weight in group["params"] if weight.grad is not None]
        if not moved:
            return
        slopes = [weight.grad for weight in moved]
        means = [self._mean(weight) for weight in moved]
        torch._foreach_lerp_(means, slopes, 1 - MOMENTUM)
        ahead = torch._foreach_lerp(slopes, means, MOMENTUM)
        turned = orthogonal(torch.stack(ahead))
        size = LIKE_ADAMW * max(moved[0].shape[-2:]) ** 0.5
        torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(moved, list(turned.to(moved[0].dtype)), alpha=-group["lr"] * size)

    def _mean(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if not state:
            state |= {
                "step": torch.zeros(()),
                "momentum": torch.zeros_like(weight),
            }  # AdamW asks every state for a step
        found: Tensor = state["momentum"]
        return found


def muon(model: Any, decayed: set[str], args: Any) -> Muon:
    """For a model, by transformers' TrainingArguments."""
    return Muon(
        groups(model, decayed, args.weight_decay), lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon, fused=args.device.type == "cuda",
    )  # fmt: skip


def groups(model: Any, decayed: set[str], decay: float) -> list[dict[str, Any]]:
    """Of a model's weights: its matrices but embedding and head by their shape, the rest by whether it decays."""
    ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None}
    found: dict[tuple[Any, ...], list[Tensor]] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            matrix = weight.ndim > 1 and id(weight) not in ends
            key = (tuple(weight.shape) if matrix else (), name in decayed)
            found.setdefault(key, []).append(weight)
    return [
        {"params": weights, "matrices": bool(shape), "weight_decay": decay if decays else 0.0}
        for (shape, decays), weights in found.items()
    ]


def orthogonal(x: Tensor) -> Tensor:
    """[..., rows, columns] -> the nearest matrices whose singular values are all 1, about; on a GPU in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[-2] > x.shape[-1]
    x = x.to(torch.bfloat16) if x.is_cuda else x
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
