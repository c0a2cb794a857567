"""Emulated ranks: what a sub-block is given for each rank, and which inputs of its output projection are a rank's."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ladder.errors import LadderError
from ladder.hf.layouts.layout import Branch


@dataclass(frozen=True)
class RankSlice:
    """A hook before an output projection: each rank's sequences keep its part of the inputs, the rest is zero."""

    ranks: int
    alike: bool  # all ranks have read the same: the input is one batch, to be divided

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """[batch or ranks * batch, tokens, inputs] -> [ranks * batch, tokens, inputs]."""
        x, *rest = arguments
        by_rank = x.unsqueeze(0) if self.alike else x.unflatten(0, (self.ranks, -1))
        rank = torch.arange(self.ranks, device=x.device)
        mine = rank.repeat_interleave(x.shape[-1] // self.ranks) == rank.view(-1, 1, 1, 1)
        return by_rank.where(mine, 0).flatten(0, 1), *rest


@dataclass(frozen=True)
class BiasOnce:
    """A hook after an output projection: its bias belongs to the first rank."""

    ranks: int

    def __call__(self, module: nn.Module, arguments: Any, y: Tensor) -> Tensor:
        bias = getattr(module, "bias", None)  # a quantizer's own class may have none
        if bias is None:
            return y
        first = len(y) // self.ranks
        return torch.cat((y[:first], y[first:] - bias))


RankSlices = tuple[RankSlice | None, ...]  # of the sub-blocks; None: the ranks compute the same


def repeated(value: Any, batch: int, ranks: int) -> Any:
    """A tensor that has a batch dimension, once for each rank; anything else unchanged."""
    if isinstance(value, tuple):
        return tuple(repeated(each, batch, ranks) for each in value)
    if isinstance(value, Tensor) and value.dim() > 1 and len(value) == batch:
        return value.repeat(ranks, *[1] * (value.dim() - 1))
    return value


def check_cache(cache: Any, index: int, sequences: int) -> None:
    """Refuse a cache that was reordered or cut without regard to the ranks in it (beam search does that)."""
    layers = getattr(cache, "layers", ())
    keys = getattr(layers[index], "keys", None) if index < len(layers) else None
    if keys is not None and keys.dim() and len(keys) not in (0, sequences):
        raise LadderError(
            f"the cache has {len(keys)} sequences, the emulated ranks have {sequences}: use use_cache=False"
        )


def output_projection(layer: nn.Module, branch: Branch) -> nn.Module:
    """The output projection of a sub-block."""
    block: Any = layer.get_submodule(branch.block) if branch.block else layer
    out = branch.also if branch.also is not None and not hasattr(block, str(branch.out)) else branch.out
    return block.get_submodule(str(out))  # type: ignore[no-any-return]


def set_rank_slice(layer: nn.Module, branch: Branch, part: RankSlice | None) -> None:
    """Divide a sub-block among emulated ranks, or stop doing so."""
    for module in layer.get_submodule(branch.block).modules() if branch.block else layer.children():
        hooks = (module._forward_pre_hooks, module._forward_hooks)
        for handles in hooks:
            for key in [key for key, hook in handles.items() if isinstance(hook, RankSlice | BiasOnce)]:
                del handles[key]
    if part is not None:
        out = output_projection(layer, branch)
        out.register_forward_pre_hook(part)
        out.register_forward_hook(BiasOnce(part.ranks))
