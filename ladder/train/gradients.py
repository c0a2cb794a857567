"""Gradients of a decoder that several ranks share."""

import re
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from ladder.comm.base import RankOnly
from ladder.comm.differentiable import summed
from ladder.layers.shard import Shard
from ladder.model import Decoder

Index = tuple[tuple[int, int], ...]  # a shard's place in the whole tensor, first and last of each dimension


def sum_shared_gradients(model: Decoder) -> None:
    """Give each copy of a parameter that several ranks hold the gradient of all of them; call it before a step.

    These are the norms' gains, which every rank has, and the keys' and values' projections where there are fewer heads
    of them than ranks. A rank finds only its own part of their gradients. All ranks must call it, once, when all
    backward passes of a step are done. Afterwards the copies' gradients are the same bits, so that a step of the same
    optimizer leaves the copies the same.
    """
    shared = _shared(model)
    if not shared:
        return
    found = [(shard, gradient) for shard, gradient in shard_gradients(model) if _in_any_layer(shard.name) in shared]
    wholes = [_whole(shard, gradient) for shard, gradient in found]
    for (shard, gradient), whole in zip(found, summed(model.comm, wholes), strict=True):
        gradient.copy_(whole[shard.index])


def shard_gradients(model: Decoder) -> Iterator[tuple[Shard, Tensor]]:
    """This rank's shards by their Hugging Face names, each with its part of the gradient, a view; without a gradient:
    left out.
    """
    owners = {parameter.untyped_storage().data_ptr(): parameter for parameter in model.parameters()}
    for shard in model.shards():
        target = shard.target
        parameter = owners[target.untyped_storage().data_ptr()]
        if parameter.grad is None:
            continue
        assert parameter.grad.stride() == parameter.stride()  # autograd lays a gradient out as its parameter
        offset = target.storage_offset() - parameter.storage_offset() + parameter.grad.storage_offset()
        yield shard, parameter.grad.as_strided(target.shape, target.stride(), offset)


def _whole(shard: Shard, gradient: Tensor) -> Tensor:
    """Zero but for this rank's part: ranks that hold other parts add nothing to it."""
    whole = torch.zeros(shard.shape, dtype=gradient.dtype, device=gradient.device)
    whole[shard.index] = gradient
    return whole


def _shared(model: Decoder) -> set[str]:
    """The tensors of which several ranks hold the same part, from the layouts of all ranks; any layer's are alike."""
    size, one = model.comm.size, model.config.first(1)
    holders: Counter[tuple[str, Index]] = Counter()
    for rank in range(size):
        for shard in Decoder(one, RankOnly(rank, size), device="meta").shards():
            place = tuple((part.start, part.stop) for part in shard.index)
            if shard.target.numel():
                holders[shard.name, place] += 1
    return {name for (name, _), count in holders.items() if count > 1}


def _in_any_layer(name: str) -> str:
    return re.sub(r"layers\.[0-9]+\.", "layers.0.", name)
