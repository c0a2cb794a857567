"""A layer of transformers, its own children and parameters, driven around a ResidualStream.

transformers' loop hands what one layer returns to the next one. A wired layer returns the stream together with the sums
that no reader has waited for (`Carried`); the last layer returns the stream alone, as the final norm expects.
"""

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ladder.comm.base import Solo
from ladder.hf.families import Branch, Family
from ladder.residual import ResidualStream
from ladder.wiring import SubBlock


class Carried(NamedTuple):
    """What goes from layer to layer."""

    stream: Tensor  # everything: what users see as hidden state
    agreed: Tensor  # the stream without the sums
    sums: tuple[Tensor, ...]  # oldest first


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

    @classmethod
    def of(
        cls, layer: nn.Module, family: Family, wiring: tuple[SubBlock, SubBlock], index: int, config: Any
    ) -> "Place":
        own = next(base for base in type(layer).__mro__ if not issubclass(base, WiredLayer) and "forward" in vars(base))
        names = tuple(inspect.signature(own.forward).parameters)[2:]  # type: ignore[attr-defined]
        attention = inspect.signature(type(layer.get_submodule(family.attention.block)).forward).parameters.values()
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in attention)
        accepted = None if takes_any else frozenset(parameter.name for parameter in attention)
        return cls(family, wiring, index, config, names, accepted, family.parallel(config))


class WiredLayer(nn.Module):
    """Stands before a layer's class in its order of bases."""

    place: Place
    staleness: Tensor | None  # how much of the sums that the wiring leaves out is left out; None: all

    def __call__(self, hidden: Tensor | Carried, *arguments: Any, **named: Any) -> Any:
        named.update(zip(self.place.names, arguments, strict=False))
        carried = hidden if isinstance(hidden, Carried) else Carried(hidden, hidden, ())
        # tensors that gradients flow through are arguments of their own: checkpointing sees only those
        output = super().__call__(carried.agreed, *carried.sums, **named)
        stream, agreed, *sums = output[:-1]
        last = self.place.index + 1 == self.place.config.num_hidden_layers
        found = stream if last else Carried(stream, agreed, tuple(sums))
        return (found, output[-1]) if self.place.family.answers else found

    def forward(self, agreed: Tensor, *sums: Tensor, **named: Any) -> tuple[Tensor | None, ...]:
        """The whole stream, then what `Carried` has of it, then the attention weights where the family answers them."""
        family, (attention, mlp) = self.place.family, self.place.wiring
        stream = ResidualStream(Solo(), agreed, sums)
        x = self._before(family.attention, stream.read(attention.lag, self.staleness))
        if self.place.accepted is not None:
            named = {name: value for name, value in named.items() if name in self.place.accepted}
        y, weights, *_ = self._block(family.attention, x, named)
        y = self._after(family.attention, y)
        stream.write(y, attention.out)
        x = stream.read(mlp.lag, self.staleness)
        if self.staleness is not None and mlp.lag and self.place.parallel:
            x = x - (1 - self.staleness) * y  # which an MLP that was born beside its attention never saw
        x = self._before(family.mlp, x)
        stream.write(self._after(family.mlp, self._block(family.mlp, x, {})), mlp.out)
        agreed, left = stream.rest()
        return stream.read(lag=0), agreed, *left, weights if family.answers else None

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


def set_layer_staleness(layer: nn.Module, value: float) -> None:
    """In place where there is one already, so that nothing is compiled anew."""
    assert isinstance(layer, WiredLayer)
    if layer.staleness is not None:
        layer.staleness.fill_(value)
    elif value != 1:
        # no buffer, which a loader would leave empty; a single number may stay on the CPU
        layer.staleness = torch.tensor(value, device="cpu")
