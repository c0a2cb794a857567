"""A layer of transformers with its own modules and parameters, computed on a ResidualStream.

transformers' loop hands what one layer returns to the next one. A wired layer returns the stream together with the
all-reduces that no sub-block has waited for (`StreamState`); the last layer returns the stream alone, as the final norm
expects.

Emulated ranks (`LayerSpec.ranks` > 1) have a dimension of their own before the batch, [ranks or 1, batch, tokens,
hidden]; a sub-block sees them as more sequences of the batch. A rank's slice is taken before the output projection
(`RankSlice`): there the inputs of the other ranks are zero.
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
from ladder.hf.families import Branch, LayerLayout, is_parallel
from ladder.residual import ResidualStream
from ladder.wiring import Out, SubBlock


class StreamState(NamedTuple):
    """What goes from layer to layer."""

    stream: Tensor  # everything: what users see as hidden state
    agreed: Tensor  # the stream without the all-reduces in flight
    sums: tuple[Tensor, ...]  # those all-reduces' results, oldest first
    drifts: tuple[Tensor | None, ...] = ()  # the drift in each of them, then the ranks' own; for one rank: empty


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


RankSlices = tuple[RankSlice | None, RankSlice | None]  # of attention and MLP; None: the ranks compute the same


@dataclass(frozen=True)
class LayerSpec:
    """How a layer is wired, and how its class is called."""

    layout: LayerLayout
    wiring: tuple[SubBlock, SubBlock]
    index: int
    config: Any  # transformers'
    names: tuple[str, ...]  # of the layer's arguments after the stream
    accepted: frozenset[str] | None  # the arguments of the attention; None: any
    born_parallel: bool
    ranks: int = 1
    slices: RankSlices = (None, None)

    @classmethod
    def of(
        cls,
        layer: nn.Module,
        layout: LayerLayout,
        wiring: tuple[SubBlock, SubBlock],
        index: int,
        config: Any,
        ranks: int = 1,
        slices: RankSlices = (None, None),
    ) -> "LayerSpec":
        own = next(base for base in type(layer).__mro__ if not issubclass(base, WiredLayer) and "forward" in vars(base))
        names = tuple(inspect.signature(own.forward).parameters)[2:]  # type: ignore[attr-defined]
        attention = inspect.signature(type(layer.get_submodule(layout.attention.block)).forward).parameters.values()
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in attention)
        accepted = None if takes_any else frozenset(parameter.name for parameter in attention)
        return cls(layout, wiring, index, config, names, accepted, is_parallel(config), ranks, slices)


class WiredLayer(nn.Module):
    """A mixin that comes before a layer's own class."""

    spec: LayerSpec
    staleness: Tensor | None  # how much is left out of the all-reduces that the wiring leaves out; None: all

    def __call__(self, hidden: Tensor | StreamState, *arguments: Any, **named: Any) -> Any:
        named.update(zip(self.spec.names, arguments, strict=False))
        state = hidden if isinstance(hidden, StreamState) else self._first(hidden)
        # tensors that gradients flow through are arguments of their own: checkpointing sees only those
        output = super().__call__(state.agreed, *state.sums, *state.drifts, **named)
        stream, agreed, *terms = output[:-1]
        last = self.spec.index + 1 == self.spec.config.num_hidden_layers
        found = stream if last else StreamState(stream, agreed, *self._split_terms(terms))
        return (found, output[-1]) if self.spec.layout.returns_weights else found

    def forward(self, agreed: Tensor, *terms: Tensor, **named: Any) -> tuple[Tensor | None, ...]:
        """The whole stream, the parts that `StreamState` has of it, and the attention weights or None."""
        layout, (attention, mlp) = self.spec.layout, self.spec.wiring
        stream = self._stream(agreed, terms)
        x = self._before(layout.attention, self._fold_ranks(stream.read(attention.lag, self.staleness)))
        if self.spec.accepted is not None:
            named = {name: value for name, value in named.items() if name in self.spec.accepted}
        y, weights, *_ = self._block(layout.attention, x, self._for_all_ranks(x, agreed, named))
        y = self._unfold_ranks(self._after(layout.attention, y), agreed)
        stream.write(y, attention.out)
        # the MLP of a born-parallel layer does not read attention's result: no part of it is given back either
        x = stream.read(mlp.lag, self.staleness, held=not self.spec.born_parallel)
        in_flight = mlp.lag > 0 and attention.out is Out.REDUCE
        if self.staleness is not None and in_flight and self.spec.born_parallel:
            x = x - (1 - self.staleness) * y
        x = self._before(layout.mlp, self._fold_ranks(x))
        y = self._after(layout.mlp, self._block(layout.mlp, x, {}))
        stream.write(self._unfold_ranks(y, agreed), mlp.out)
        agreed, sums, drifts = stream.rest()
        whole = stream.read(lag=0)
        if self.spec.ranks == 1:
            return whole, agreed, *sums, weights if layout.returns_weights else None
        return whole.mean(0), agreed.squeeze(0), *sums, *drifts, weights if layout.returns_weights else None

    def _first(self, hidden: Tensor) -> StreamState:
        """The embedding, the same on all ranks."""
        return StreamState(hidden, hidden, (), () if self.spec.ranks == 1 else (None,))

    def _split_terms(self, terms: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """The all-reduces and the drifts, of which there is one more; one rank has no drifts."""
        sums = len(terms) if self.spec.ranks == 1 else len(terms) // 2
        return tuple(terms[:sums]), tuple(terms[sums:])

    def _stream(self, agreed: Tensor, terms: Sequence[Tensor]) -> ResidualStream:
        if self.spec.ranks == 1:
            return ResidualStream(Solo(), agreed, terms)
        for branch, part in zip((self.spec.layout.attention, self.spec.layout.mlp), self.spec.slices, strict=True):
            if part is not None and part not in output_projection(self, branch)._forward_pre_hooks.values():
                raise LadderError(
                    f"{branch.block}.{branch.out} of layer {self.spec.index} was replaced (by an adapter?) after the "
                    "model was given its ranks: call rewire(model) once more"
                )
        return ResidualStream(Stacked(self.spec.ranks), agreed.unsqueeze(0), *self._split_terms(terms))

    def _fold_ranks(self, x: Tensor) -> Tensor:
        """Ranks as sequences of the batch."""
        return x if self.spec.ranks == 1 else x.flatten(0, 1)

    def _unfold_ranks(self, y: Tensor, agreed: Tensor) -> Tensor:
        """Sequences of the batch as ranks."""
        return y if self.spec.ranks == 1 else y.unflatten(0, (-1, len(agreed)))

    def _for_all_ranks(self, x: Tensor, agreed: Tensor, named: dict[str, Any]) -> dict[str, Any]:
        """The attention's arguments for every rank's sequences: masks, rotary angles and the like repeated."""
        if self.spec.ranks == 1:
            return named
        check_cache(named.get("past_key_values"), self.spec.index, len(x))
        if len(x) == len(agreed):
            return named
        if named.get("cu_seq_lens_q") is not None:
            raise LadderError("emulated ranks cannot run packed sequences (cu_seq_lens_q): give each its own sequence")
        return {name: repeated(value, len(agreed), self.spec.ranks) for name, value in named.items()}

    def _before(self, branch: Branch, x: Tensor) -> Tensor:
        for name in branch.before:
            if hasattr(self, name):
                return getattr(self, name)(x)  # type: ignore[no-any-return]
        return x

    def _block(self, branch: Branch, x: Tensor, named: dict[str, Any]) -> Any:
        block = getattr(self, branch.block)
        if self.spec.layout.adds_residual:
            return block(x, x.new_zeros(()), **named)
        return block(hidden_states=x, **named) if branch is self.spec.layout.attention else block(x)

    def _after(self, branch: Branch, y: Tensor) -> Tensor:
        for name in branch.after:
            y = getattr(self, name)(y)
        if branch.dropout is not None:
            y = F.dropout(y, branch.dropout(self.spec.config), self.training)
        if self.spec.layout.scale is not None:
            y = y * getattr(self, self.spec.layout.scale)
        return y


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
    return layer.get_submodule(f"{branch.block}.{branch.out}")


def set_rank_slice(layer: nn.Module, branch: Branch, part: RankSlice | None) -> None:
    """Divide a sub-block among emulated ranks, or stop doing so."""
    for module in layer.get_submodule(branch.block).modules():
        hooks = (module._forward_pre_hooks, module._forward_hooks)
        for handles in hooks:
            for key in [key for key, hook in handles.items() if isinstance(hook, RankSlice | BiasOnce)]:
                del handles[key]
    if part is not None:
        out = output_projection(layer, branch)
        out.register_forward_pre_hook(part)
        out.register_forward_hook(BiasOnce(part.ranks))


def unwrap_states(base_model: nn.Module, arguments: Any, output: Any) -> Any:
    """A forward hook for models that collect the layers' outputs as hidden states: users see the stream."""
    if isinstance(output, tuple):
        return tuple(_streams(entry) for entry in output)
    if output.hidden_states is not None:
        output.hidden_states = _streams(output.hidden_states)
    return output


def _streams(entry: Any) -> Any:
    if isinstance(entry, StreamState):
        return entry.stream
    return tuple(_streams(part) for part in entry) if type(entry) is tuple else entry


@cache
def wired_class(own: Any) -> Any:
    """A layer's class made wired; it keeps its name, by which other libraries recognize it."""
    return type(own.__name__, (WiredLayer, own), {"__module__": own.__module__, "__qualname__": own.__qualname__})


def wire_layer(layer: nn.Module, spec: LayerSpec) -> None:
    """Wire a layer, or wire a wired one differently."""
    if not isinstance(layer, WiredLayer):
        own: Any = type(layer)
        layer.__class__ = wired_class(own)
        if hasattr(layer, "_old_forward"):  # accelerate has wrapped it
            layer._old_forward = WiredLayer.forward.__get__(layer)
        layer.staleness = None  # type: ignore[assignment]
    layer.spec = spec  # type: ignore[assignment]
    for branch, part in zip((spec.layout.attention, spec.layout.mlp), spec.slices, strict=True):
        set_rank_slice(layer, branch, part)


def set_layer_staleness(layer: nn.Module, value: float) -> None:
    """In place where there is a value already, so that torch.compile does not recompile."""
    assert isinstance(layer, WiredLayer)
    if layer.staleness is not None:
        layer.staleness.fill_(value)
    elif value != 1:
        # no buffer, which a loader would leave empty; a single number may stay on the CPU
        layer.staleness = torch.tensor(value, device="cpu")
