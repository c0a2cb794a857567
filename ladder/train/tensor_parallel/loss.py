"""The loss of a model whose ranks have a block of the logits each; no rank ever has them all."""

import torch
from torch import Tensor

from ladder.comm.base import Comm
from ladder.comm.differentiable import all_gathered
from ladder.errors import LadderError
from ladder.train.loss import IGNORED


def cross_entropy(comm: Comm, block_logits: Tensor, targets: Tensor, vocab: int) -> Tensor:
    """mean over tokens of ( log sum exp (logits) - logits[target] ), the same on every rank; float32 at least.

    `block_logits` [..., step] are this rank's columns of the logits, `targets` [...] ids below `vocab`, or IGNORED.
    Two numbers a token are gathered from each rank: log sum exp of its block, and the target's logit where the rank
    has it, else 0. For gradients `comm` must be a `Differentiable`, or emulated.
    """
    step = block_logits.shape[-1]
    start = min(comm.rank * step, vocab)
    if block_logits.shape[:-1] != targets.shape:
        raise LadderError(
            f"targets of shape {list(targets.shape)} do not fit logits of shape {list(block_logits.shape)}: "
            "one target a token"
        )
    block = block_logits[..., : max(0, min(step, vocab - start))]  # beyond the vocabulary there is nothing to predict
    block = block.to(torch.promote_types(block.dtype, torch.float32))
    counts = targets != IGNORED
    local = targets - start
    mine = counts & (local >= 0) & (local < block.shape[-1])
    own = _picked(block, local.where(mine, 0)).where(mine, 0)
    everyone = all_gathered(comm, torch.stack((torch.logsumexp(block, dim=-1), own), dim=-1))
    losses = torch.logsumexp(everyone[..., 0], dim=-1) - everyone[..., 1].sum(-1)
    return losses.where(counts, 0).sum() / counts.sum()


def _picked(block: Tensor, index: Tensor) -> Tensor:
    """block[..., index]; zeros where the block is empty, as the last rank's may be."""
    if block.shape[-1] == 0:
        return block.sum(-1)
    return block.gather(-1, index.unsqueeze(-1)).squeeze(-1)
