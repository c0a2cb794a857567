"""A layer of transformers, its own children and parameters, driven around a ResidualStream.

transformers' loop hands what one layer returns to the next one. A wired layer returns the stream together with the sums
that no reader has waited for (`Carried`); the last layer returns the stream alone, as the final norm expects.

Emulated ranks (`Place.ranks` > 1) have a dimension of their own before the batch, [ranks or 1, batch, tokens, hidden];
a sub-block sees them as more lines of the batch. What is a rank's share is decided before the output projection
(`Share`): there the inputs that other ranks have are zero.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ladder.comm.base import Solo
from ladder.comm.stacked import Stacked
from ladder.errors import LadderError
from ladder.hf.families import Branch, Family
from ladder.residual import ResidualStream
from ladder.wiring import SubBlock


class Carried(NamedTuple):
    """What goes from layer to layer."""

    stream: Tensor  # everything: what users see as hidden state
    agreed: Tensor  # the stream without the sums
    sums: tuple[Tensor, ...]  # oldest first
    drifts: tuple[Tensor | None, ...] = ()  # what each sum carries, then the ranks' own; one rank alone: empty


@dataclass(frozen=True)
class Share:
    """A hook before an output projection: each rank's lines keep its part of the inputs, the rest is zero."""

    ranks: int
    alike: bool  # all ranks have read the same, so that what comes here is one batch, to be divided

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """[batch or ranks * batch, tokens, inputs] -> [ranks * batch, tokens, inputs]."""
        x, *rest = arguments
        lines = x.unsqueeze(0) if self.alike else x.unflatten(0, (self.ranks, -1))
        rank = torch.arange(self.ranks, device=x.device)
        mine = rank.repeat_interleave(x.shape[-1] // self.ranks) == rank.view(-1, 1, 1, 1)
        return lines.where(mine, 0).flatten(0, 1), *rest


@dataclass(frozen=True)
class Once:
    """A hook after an output projection: its bias belongs to the first rank."""

    ranks: int

    def __call__(self, module: nn.Module, arguments: Any, y: Tensor) -> Tensor:
        bias = module.bias
        if bias is None:
            return y
        first = len(y) // self.ranks
        return torch.cat((y[:first], y[first:] - bias))  # type: ignore[operator]


Shares = tuple[Share | None, Share | None]  # of the attention and of the MLP; None: the ranks compute the same


@dataclass(frozen=True)
class Place:
    """What a layer must know besides its children."""

    family: Family
    wiring: tuple[SubBlock, SubBlock]
    index: int
    config: Any  # transformers'
    names: tuple[str, ...]  # of the layer's arguments after the stream
    accepted: frozenset[str] | None  # the arguments of the attention; None: any
    parallel: bool  # by birth
    ranks: int = 1
    shares: Shares = (None, None)

    @classmethod
    def of(
        cls,
        layer: nn.Module,
        family: Family,
        wiring: tuple[SubBlock, SubBlock],
        index: int,
        config: Any,
        ranks: int = 1,
        shares: Shares = (None, None),
    ) -> "Place":
        own = next(base for base in type(layer).__mro__ if not issubclass(base, WiredLayer) and "forward" in vars(base))
        names = tuple(inspect.signature(own.forward).parameters)[2:]  # type: ignore[attr-defined]
        attention = inspect.signature(type(layer.get_submodule(family.attention.block)).forward).parameters.values()
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in attention)
        accepted = None if takes_any else frozenset(parameter.name for parameter in attention)
        return cls(family, wiring, index, config, names, accepted, family.parallel(config), ranks, shares)


class WiredLayer(nn.Module):
    """Stands before a layer's class in its order of bases."""

    place: Place
    staleness: Tensor | None  # how much of the sums that the wiring leaves out is left out; None: all

    def __call__(self, hidden: Tensor | Carried, *arguments: Any, **named: Any) -> Any:
        named.update(zip(self.place.names, arguments, strict=False))
        carried = hidden if isinstance(hidden, Carried) else self._first(hidden)
        # tensors that gradients flow through are arguments of their own: checkpointing sees only those
        output = super().__call__(carried.agreed, *carried.sums, *carried.drifts, **named)
        stream, agreed, *terms = output[:-1]
        last = self.place.index + 1 == self.place.config.num_hidden_layers
        found = stream if last else Carried(stream, agreed, *self._parted(terms))
        return (found, output[-1]) if self.place.family.answers else found

    def forward(self, agreed: Tensor, *terms: Tensor, **named: Any) -> tuple[Tensor | None, ...]:
        """The whole stream, then what `Carried` has of it, then the attention weights where the family answers them."""
        family, (attention, mlp) = self.place.family, self.place.wiring
        stream = self._stream(agreed, terms)
        x = self._before(family.attention, self._lines(stream.read(attention.lag, self.staleness)))
        if self.place.accepted is not None:
            named = {name: value for name, value in named.items() if name in self.place.accepted}
        y, weights, *_ = self._block(family.attention, x, self._for_lines(x, agreed, named))
        y = self._by_rank(self._after(family.attention, y), agreed)
        stream.write(y, attention.out)
        x = stream.read(mlp.lag, self.staleness)
        if self.staleness is not None and mlp.lag and self.place.parallel:
            x = x - (1 - self.staleness) * y  # which an MLP that was born beside its attention never saw
        x = self._before(family.mlp, self._lines(x))
        stream.write(self._by_rank(self._after(family.mlp, self._block(family.mlp, x, {})), agreed), mlp.out)
        agreed, sums, drifts = stream.rest()
        whole = stream.read(lag=0)
        if self.place.ranks == 1:
            return whole, agreed, *sums, weights if family.answers else None
        return whole.mean(0), agreed.squeeze(0), *sums, *drifts, weights if family.answers else None

    def _first(self, hidden: Tensor) -> Carried:
        """The embedding, which all ranks have alike."""
        return Carried(hidden, hidden, (), () if self.place.ranks == 1 else (None,))

    def _parted(self, terms: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """The sums, and the drifts, of which there is one more; alone, one has none."""
        sums = len(terms) if self.place.ranks == 1 else len(terms) // 2
        return tuple(terms[:sums]), tuple(terms[sums:])

    def _stream(self, agreed: Tensor, terms: Sequence[Tensor]) -> ResidualStream:
        if self.place.ranks == 1:
            return ResidualStream(Solo(), agreed, terms)
        for branch, share in zip((self.place.family.attention, self.place.family.mlp), self.place.shares, strict=True):
            if share is not None and share not in out_of(self, branch)._forward_pre_hooks.values():
                raise LadderError(
                    f"{branch.block}.{branch.out} of layer {self.place.index} was replaced (by an adapter?) after the "
                    "model was given its ranks: call rewire(model) once more"
                )
        return ResidualStream(Stacked(self.place.ranks), agreed.unsqueeze(0), *self._parted(terms))

    def _lines(self, x: Tensor) -> Tensor:
        """Ranks as lines of the batch."""
        return x if self.place.ranks == 1 else x.flatten(0, 1)

    def _by_rank(self, y: Tensor, agreed: Tensor) -> Tensor:
        """Lines of the batch as ranks."""
        return y if self.place.ranks == 1 else y.unflatten(0, (-1, len(agreed)))

    def _for_lines(self, x: Tensor, agreed: Tensor, named: dict[str, Any]) -> dict[str, Any]:
        """The attention's arguments for each rank's lines: masks, angles and the like once more for every rank."""
        if self.place.ranks == 1:
            return named
        refuse_rows(named.get("past_key_values"), self.place.index, len(x))
        if len(x) == len(agreed):
            return named
        if named.get("cu_seq_lens_q") is not None:
            raise LadderError("emulated ranks cannot share several texts in one line (cu_seq_lens_q): give each a line")
        return {name: repeated(value, len(agreed), self.place.ranks) for name, value in named.items()}

    def _before(self, branch: Branch, x: Tensor) -> Tensor:
        for name in branch.before:
            if hasattr(self, name):
                return getattr(self, name)(x)  # type: ignore[no-any-return]
        return x

    def _block(self, branch: Branch, x: Tensor, named: dict[str, Any]) -> Any:
        block = getattr(self, branch.block)
        if self.place.family.adds:
            return block(x, x.new_zeros(()), **named)
        return block(hidden_states=x, **named) if branch is self.place.family.attention else block(x)

    def _after(self, branch: Branch, y: Tensor) -> Tensor:
        for name in branch.after:
            y = getattr(self, name)(y)
        if branch.dropout is not None:
            y = F.dropout(y, branch.dropout(self.place.config), self.training)
        if self.place.family.scale is not None:
            y = y * getattr(self, self.place.family.scale)
        return y


def repeated(value: Any, batch: int, ranks: int) -> Any:
    """A tensor with a dimension for the batch, once for each rank; others, and what is no tensor, as they are."""
    if isinstance(value, tuple):
        return tuple(repeated(each, batch, ranks) for each in value)
    if isinstance(value, Tensor) and value.dim() > 1 and len(value) == batch:
        return value.repeat(ranks, *[1] * (value.dim() - 1))
    return value


def refuse_rows(cache: Any, index: int, lines: int) -> None:
    """A cache that somebody has sorted as if there were no ranks in it."""
    layers = getattr(cache, "layers", ())
    keys = getattr(layers[index], "keys", None) if index < len(layers) else None
    if keys is not None and keys.dim() and len(keys) not in (0, lines):
        raise LadderError(f"a cache of {len(keys)} lines for {lines} of the emulated ranks: use use_cache=False")


def out_of(layer: nn.Module, branch: Branch) -> nn.Module:
    """The output projection of a sub-block."""
    return layer.get_submodule(f"{branch.block}.{branch.out}")


def share(layer: nn.Module, branch: Branch, share: Share | None) -> None:
    """Divide a sub-block among ranks, or no longer."""
    for module in layer.get_submodule(branch.block).modules():
        hooks = (module._forward_pre_hooks, module._forward_hooks)
        for handles in hooks:
            for key in [key for key, hook in handles.items() if isinstance(hook, Share | Once)]:
                del handles[key]
    if share is not None:
        out = out_of(layer, branch)
        out.register_forward_pre_hook(share)
        out.register_forward_hook(Once(share.ranks))


def show(base_model: nn.Module, arguments: Any, output: Any) -> Any:
    """A forward hook for models that collect what goes from layer to layer as hidden states: users see the stream."""
    if isinstance(output, tuple):
        return tuple(_shown(entry) for entry in output)
    if output.hidden_states is not None:
        output.hidden_states = _shown(output.hidden_states)
    return output


def _shown(entry: Any) -> Any:
    if isinstance(entry, Carried):
        return entry.stream
    return tuple(_shown(part) for part in entry) if type(entry) is tuple else entry


@cache
def wired_class(own: Any) -> Any:
    """A layer's class made wired; it keeps its name, by which others recognize it."""
    return type(own.__name__, (WiredLayer, own), {"__module__": own.__module__, "__qualname__": own.__qualname__})


def wire(layer: nn.Module, place: Place) -> None:
    """Make a layer a wired one, or give a wired one another place."""
    if not isinstance(layer, WiredLayer):
        own: Any = type(layer)
        layer.__class__ = wired_class(own)
        if hasattr(layer, "_old_forward"):  # accelerate's hooks have put themselves before it
            layer._old_forward = WiredLayer.forward.__get__(layer)
        layer.staleness = None  # type: ignore[assignment]
    layer.place = place  # type: ignore[assignment]
    for branch, part in zip((place.family.attention, place.family.mlp), place.shares, strict=True):
        share(layer, branch, part)


def set_layer_staleness(layer: nn.Module, value: float) -> None:
    """In place where there is one already, so that nothing is compiled anew."""
    assert isinstance(layer, WiredLayer)
    if layer.staleness is not None:
        layer.staleness.fill_(value)
    elif value != 1:
        # no buffer, which a loader would leave empty; a single number may stay on the CPU
        layer.staleness = torch.tensor(value, device="cpu")
