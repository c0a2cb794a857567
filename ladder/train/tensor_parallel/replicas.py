"""Weights that several ranks hold: their gradients, the gradient norm, and saving.

Norms' gains are on every rank; projections of keys and values are on several where there are fewer heads of them than
ranks. Any two ranks' parts of a tensor are the same or do not overlap.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ladder.comm.base import RankOnly
from ladder.comm.differentiable import all_reduced
from ladder.layers.shard import Shard
from ladder.model import Decoder

Part = tuple[str, tuple[tuple[int, int], ...]]  # a tensor's name; first and last of each of its dimensions
Views = list[tuple[Shard, Tensor]]


def shard_views(model: Decoder, tensors: Mapping[nn.Parameter, Tensor]) -> Iterator[tuple[Shard, Tensor]]:
    """This rank's shards, each with its part, a view, of the tensor that belongs to its parameter: a gradient, or a
    copy in another dtype. Parameters without such a tensor are left out.
    """
    owners: dict[int, list[nn.Parameter]] = defaultdict(list)  # by their memory, which may be of two (`lay_together`)
    for each in tensors:
        owners[each.untyped_storage().data_ptr()].append(each)
    for shard in model.shards():
        target = shard.target
        inside = (
            each
            for each in owners[target.untyped_storage().data_ptr()]
            if each.storage_offset() <= target.storage_offset() < each.storage_offset() + each.numel()
        )
        parameter = next(inside, None)
        if parameter is None:
            continue
        tensor = tensors[parameter]
        assert tensor.stride() == parameter.stride()  # autograd lays a gradient out as its parameter
        offset = target.storage_offset() - parameter.storage_offset() + tensor.storage_offset()
        yield shard, tensor.as_strided(target.shape, target.stride(), offset)


class Replicas:
    """The ranks that hold each part of a model's tensors, from the layouts of all ranks."""

    def __init__(self, model: Decoder) -> None:
        self._comm = model.comm
        self._holders: dict[Part, list[int]] = defaultdict(list)
        shared: dict[str, tuple[int, ...]] = {}
        for rank in range(model.comm.size):
            for shard in Decoder(model.config, RankOnly(rank, model.comm.size), device="meta").shards():
                if shard.target.numel():
                    holders = self._holders[_part(shard)]
                    holders.append(rank)
                    if len(holders) > 1:
                        shared[shard.name] = shard.shape
        self._shared = dict(sorted(shared.items()))  # in the same order on all ranks

    def sum_gradients(self, gradients: Views) -> None:
        """Give each copy of a part the sum of all copies' gradients, of which a rank finds only its own.

        All ranks must call it, once, when all backward passes of a step are done. Afterwards the copies' gradients are
        the same bits, so that a step of the same optimizer leaves the copies the same.
        """
        if not self._shared:
            return
        shared = [(shard, gradient) for shard, gradient in gradients if shard.name in self._shared]
        wholes = {name: gradients[0][1].new_zeros(shape) for name, shape in self._shared.items()}
        for shard, gradient in shared:  # ranks that hold other parts of a tensor add zeros to this one
            wholes[shard.name][shard.index] = gradient
        sums = dict(zip(wholes, all_reduced(self._comm, list(wholes.values())), strict=True))
        for shard, gradient in shared:
            gradient.copy_(sums[shard.name][shard.index])

    def norm(self, gradients: Views) -> Tensor:
        """The norm of the whole model's gradient, each part counted once; after `sum_gradients`."""
        squares = [g.square().sum() / len(self._holders[_part(s)]) for s, g in gradients if g.numel()]
        return all_reduced(self._comm, [torch.stack(squares).sum()])[0].sqrt()

    def owns(self, shard: Shard) -> bool:
        """Whether this rank is the first of those that hold a part."""
        return self._holders[_part(shard)][:1] == [self._comm.rank]


class Gathered:
    """A source of whole tensors, added up from the ranks' parts, one tensor at a time. All ranks must read the same."""

    def __init__(self, model: Decoder, replicas: Replicas, weights: Mapping[nn.Parameter, Tensor]) -> None:
        self._comm = model.comm
        self._parts: dict[str, Views] = defaultdict(list)
        for shard, part in shard_views(model, weights):
            if replicas.owns(shard):
                self._parts[shard.name].append((shard, part))
        self._like = next(iter(weights.values()))
        self._last: tuple[str, Tensor] | None = None

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        if self._last is None or self._last[0] != name:  # a tensor of several shards is gathered once
            self._last = None
            whole = self._like.new_zeros(shape)
            for shard, part in self._parts[name]:
                whole[shard.index] = part
            self._last = (name, all_reduced(self._comm, [whole])[0])
        return self._last[1][index]


def _part(shard: Shard) -> Part:
    return shard.name, tuple((part.start, part.stop) for part in shard.index)
