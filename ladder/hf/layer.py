"""A layer of transformers with its own modules and parameters, computed on a ResidualStream.

transformers' loop hands what one layer returns to the next one. A wired layer returns the stream together with the
all-reduces that no sub-block has waited for (`StreamState`); the last layer returns the stream alone, as the final norm
expects.

Emulated ranks (`LayerSpec.ranks` > 1) have a dimension of their own before the batch, [ranks or 1, batch, tokens,
hidden]; a sub-block sees them as more sequences of the batch. A rank's slice is taken before the output projection
(`RankSlice`): there the inputs of the other ranks are zero.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ladder.comm.base import Solo
from ladder.comm.stacked import Stacked
from ladder.errors import LadderError
from ladder.hf.families import is_parallel
from ladder.hf.layouts.layout import Branch, LayerLayout
from ladder.hf.layouts.normed import NormedStream
from ladder.hf.ranks import RankSlices, check_cache, output_projection, repeated, set_rank_slice
from ladder.residual import ResidualStream
from ladder.wiring import Out, Row


class StreamState(NamedTuple):
    """What goes from layer to layer."""

    stream: Tensor  # everything: what users see as hidden state
    agreed: Tensor  # the stream without the all-reduces in flight
    sums: tuple[Tensor, ...]  # those all-reduces' results, oldest first; post-norm: the streams after each of them
    drifts: tuple[Tensor | None, ...] = ()  # the drift in each of them, then the ranks' own; for one rank: empty


@dataclass(frozen=True)
class LayerSpec:
    """How a layer is wired, and how its class is called."""

    layout: LayerLayout
    wiring: Row  # of its sub-blocks
    index: int
    last: bool  # of its stack
    config: Any  # transformers'
    names: tuple[str, ...]  # of the layer's arguments after the stream
    accepted: frozenset[str] | None  # the arguments of the attention; None: any
    born_parallel: bool
    ranks: int = 1
    slices: RankSlices = ()  # empty: none is divided

    @classmethod
    def of(
        cls,
        layer: nn.Module,
        layout: LayerLayout,
        wiring: Row,
        index: int,
        last: bool,
        config: Any,
        ranks: int = 1,
        slices: RankSlices = (),
    ) -> "LayerSpec":
        own = next(base for base in type(layer).__mro__ if not issubclass(base, WiredLayer) and "forward" in vars(base))
        names = tuple(inspect.signature(own.forward).parameters)[2:]  # type: ignore[attr-defined]
        attention = inspect.signature(type(layer.get_submodule(layout.attention.block)).forward).parameters.values()
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in attention)
        accepted = None if takes_any else frozenset(parameter.name for parameter in attention)
        return cls(layout, wiring, index, last, config, names, accepted, is_parallel(config), ranks, slices)

    def call(self, branch: Branch, named: dict[str, Any]) -> dict[str, Any]:
        """A sub-block's arguments besides the stream, from the layer's. What the layer has no name for goes to every
        attention.
        """
        if branch is self.layout.mlp:
            return {}
        if branch.takes is not None:
            own = {name: named.get(source) for name, source in branch.takes.items()}
            return {**{name: value for name, value in named.items() if name not in self.names}, **own}
        return {name: value for name, value in named.items() if self.accepted is None or name in self.accepted}


class WiredLayer(nn.Module):
    """A mixin that comes before a layer's own class."""

    spec: LayerSpec
    staleness: Tensor | None  # how much is left out of the all-reduces that the wiring leaves out; None: all

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduced(self, wired_class, protocol)

    def __call__(self, hidden: Tensor | StreamState, *arguments: Any, **named: Any) -> Any:
        named.update(zip(self.spec.names, arguments, strict=False))
        state = hidden if isinstance(hidden, StreamState) else self._first(hidden)
        # tensors that gradients flow through are arguments of their own: checkpointing sees only those
        given = [named.pop(name, None) for name in self.spec.layout.differentiable]
        output = super().__call__(state.agreed, *given, *state.sums, *state.drifts, **named)
        behind = len(output) - len(self.spec.layout.returns)
        stream, agreed, *terms = output[:behind]
        found = stream if self.spec.last else StreamState(stream, agreed, *self._split_terms(terms))
        return (found, *output[behind:]) if self.spec.layout.returns else found

    def forward(self, agreed: Tensor, *terms: Any, **named: Any) -> tuple[Tensor | None, ...]:
        """The whole stream, the parts that `StreamState` has of it, and what else the layer returns."""
        layout = self.spec.layout
        given = len(layout.differentiable)
        named.update(zip(layout.differentiable, terms[:given], strict=True))
        stream = self._stream(agreed, terms[given:])
        outputs: list[tuple[Any, ...]] = []
        before: tuple[Out, Tensor] | None = None
        for branch, wiring in zip(layout.branches, self.spec.wiring, strict=True):
            if branch.needs is not None and named.get(branch.needs) is None:
                outputs.append(())
                continue
            x = self._read(stream, wiring.lag, before)
            output = self._sub_block(branch, x, agreed, named)
            y = self._unfold_ranks(self._after(branch, output[0]), agreed)
            if isinstance(stream, NormedStream):
                assert branch.norm is not None
                stream.write(y, self.get_submodule(branch.norm))
            else:
                stream.write(y, wiring.out)
            outputs.append(output)
            before = wiring.out, y
        more = [None if at is None else (*outputs[at[0]], None, None)[at[1]] for at in layout.returns]
        if isinstance(stream, NormedStream):
            agreed, sums = stream.rest()
            return stream.read(0), agreed, *sums, *more
        agreed, sums, drifts = stream.rest()
        whole = stream.read(lag=0)
        if self.spec.ranks == 1:
            return whole, agreed, *sums, *more
        return whole.mean(0), agreed.squeeze(0), *sums, *drifts, *more

    def _read(self, stream: ResidualStream | NormedStream, lag: int, before: tuple[Out, Tensor] | None) -> Tensor:
        """What a sub-block reads. `before`: what the one before it in the layer has written, and how."""
        if isinstance(stream, NormedStream):
            return stream.read(lag, self.staleness)
        # the MLP of a born-parallel layer does not read attention's result: no part of it is given back either
        x = stream.read(lag, self.staleness, held=not self.spec.born_parallel)
        if self.staleness is not None and self.spec.born_parallel and before is not None:
            out, y = before
            if lag > 0 and out is Out.REDUCE:
                x = x - (1 - self.staleness) * y
        return x

    def _sub_block(self, branch: Branch, x: Tensor, agreed: Tensor, named: dict[str, Any]) -> tuple[Any, ...]:
        """Its output of [ranks * batch, tokens, hidden], and what else it returns."""
        x = self._before(branch, self._fold_ranks(x))
        call = self._for_all_ranks(branch, x, agreed, self.spec.call(branch, named))
        output = self._block(branch, x, call)
        return output if isinstance(output, tuple) else (output,)

    def _first(self, hidden: Tensor) -> StreamState:
        """The embedding, the same on all ranks."""
        return StreamState(hidden, hidden, (), () if self.spec.ranks == 1 else (None,))

    def _split_terms(self, terms: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """The all-reduces and the drifts, of which there is one more; one rank has no drifts."""
        sums = len(terms) if self.spec.ranks == 1 else len(terms) // 2
        return tuple(terms[:sums]), tuple(terms[sums:])

    def _stream(self, agreed: Tensor, terms: Sequence[Tensor]) -> ResidualStream | NormedStream:
        if self.spec.layout.post_norm:
            return NormedStream(agreed, terms)
        if self.spec.ranks == 1:
            return ResidualStream(Solo(), agreed, terms)
        for branch, part in zip(self.spec.layout.branches, self.spec.slices, strict=True):
            if part is not None and part not in output_projection(self, branch)._forward_pre_hooks.values():
                raise LadderError(
                    f"{branch.inside(str(branch.out))} of layer {self.spec.index} was replaced (by an adapter?) after "
                    "the model was given its ranks: call rewire(model) once more"
                )
        return ResidualStream(Stacked(self.spec.ranks), agreed.unsqueeze(0), *self._split_terms(terms))

    def _fold_ranks(self, x: Tensor) -> Tensor:
        """Ranks as sequences of the batch."""
        return x if self.spec.ranks == 1 else x.flatten(0, 1)

    def _unfold_ranks(self, y: Tensor, agreed: Tensor) -> Tensor:
        """Sequences of the batch as ranks."""
        return y if self.spec.ranks == 1 else y.unflatten(0, (-1, len(agreed)))

    def _for_all_ranks(self, branch: Branch, x: Tensor, agreed: Tensor, named: dict[str, Any]) -> dict[str, Any]:
        """An attention's arguments for every rank's sequences: masks, rotary angles and the like repeated."""
        if self.spec.ranks == 1:
            return named
        cache = named.get("past_key_values")
        own = "cross_attention_cache" if branch is self.spec.layout.cross else "self_attention_cache"
        check_cache(getattr(cache, own, cache), self.spec.index, len(x))
        if len(x) == len(agreed):
            return named
        if named.get("cu_seq_lens_q") is not None:
            raise LadderError("emulated ranks cannot run packed sequences (cu_seq_lens_q): give each its own sequence")
        shared = self.spec.layout.shared
        return {
            name: value if name in shared else repeated(value, len(agreed), self.spec.ranks)
            for name, value in named.items()
        }

    def _before(self, branch: Branch, x: Tensor) -> Tensor:
        for name in branch.before:
            if "." in name or hasattr(self, name):
                return self.get_submodule(name)(x)  # type: ignore[no-any-return]
        return x

    def _block(self, branch: Branch, x: Tensor, named: dict[str, Any]) -> Any:
        if branch.compute is not None:
            return branch.compute(self, x)
        block = self.get_submodule(branch.block)
        if self.spec.layout.adds_residual:
            return block(x, x.new_zeros(()), **named)
        return block(x) if branch is self.spec.layout.mlp else block(hidden_states=x, **named)

    def _after(self, branch: Branch, y: Tensor) -> Tensor:
        for name in branch.after:
            y = self.get_submodule(name)(y)
        if branch.dropout is not None:
            y = F.dropout(y, branch.dropout(self.spec.config), self.training)
        if self.spec.layout.scale is not None:
            y = y * getattr(self, self.spec.layout.scale)
        return y


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


class InnerBlock(nn.Module):
    """A mixin before the class of a block that norms and adds: only its attention is called. Hooks see the weights."""

    inner: str

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduced(self, inner_class, protocol)

    def forward(self, hidden_states: Tensor, **named: Any) -> Any:
        return self.get_submodule(self.inner)(hidden_states, **named)


@cache
def inner_class(own: Any) -> Any:
    """A block's class made one that only calls its attention; it keeps its name."""
    return type(own.__name__, (InnerBlock, own), {"__module__": own.__module__, "__qualname__": own.__qualname__})


@cache
def wired_class(own: Any) -> Any:
    """A layer's class made wired; it keeps its name, by which other libraries recognize it."""
    return type(own.__name__, (WiredLayer, own), {"__module__": own.__module__, "__qualname__": own.__qualname__})


def reduced(module: nn.Module, made: Callable[[Any], Any], protocol: int) -> tuple[Any, ...]:
    """What pickle keeps of a module whose class was `made` of another one of that name."""
    _, _, *rest = cast(tuple[Any, ...], nn.Module.__reduce_ex__(module, max(2, protocol)))
    return _new, (made, type(module).__bases__[-1]), *rest


def _new(made: Callable[[Any], Any], own: Any) -> Any:
    return object.__new__(made(own))


def wire_layer(layer: nn.Module, spec: LayerSpec) -> None:
    """Wire a layer, or wire a wired one differently."""
    if not isinstance(layer, WiredLayer):
        own: Any = type(layer)
        layer.__class__ = wired_class(own)
        if hasattr(layer, "_old_forward"):  # accelerate has wrapped it
            layer._old_forward = WiredLayer.forward.__get__(layer)
        layer.staleness = None  # type: ignore[assignment]
    layer.spec = spec  # type: ignore[assignment]
    for index, branch in enumerate(spec.layout.branches):
        if branch.inner is not None and not isinstance(block := layer.get_submodule(branch.block), InnerBlock):
            own = type(block)
            block.__class__ = inner_class(own)
            block.inner = branch.inner  # type: ignore[assignment]
        set_rank_slice(layer, branch, spec.slices[index] if spec.slices else None)


def set_layer_staleness(layer: nn.Module, value: float) -> None:
    """In place where there is a value already, so that torch.compile does not recompile."""
    assert isinstance(layer, WiredLayer)
    if layer.staleness is not None:
        layer.staleness.fill_(value)
    elif value != 1:
        # no buffer, which a loader would leave empty; a single number may stay on the CPU
        layer.staleness = torch.tensor(value, device="cpu")
