"""What a row of the table of families says: the sub-blocks of a layer, and where a model keeps its layers.

What a sub-block adds to the stream, whatever the family:

    stream  +=  scale * after( block( before(stream) ) )

and in post-norm models, whose norm stands on the stream itself:

    stream  =  norm( stream + after( block(stream) ) )
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any


@dataclass(frozen=True)
class Branch:
    """One sub-block: names of the layer's children, with dots where they are deeper inside."""

    block: str  # empty: its parts are children of the layer itself, and `compute` says how they are called
    before: tuple[str, ...] = ()  # the norm that it reads through: the first of these that the layer has; none: none
    after: tuple[str, ...] = ()  # what its output goes through, in order: norms, dropouts
    dropout: Callable[[Any], float] | None = None  # by the config: a dropout that is no child
    out: str | None = None  # the block's output projection, where what follows it is linear (a norm is not)
    also: str | None = None  # its name in layers that have none of that name
    gain: str | None = None  # a parameter among `after` that multiplies each output: linear, too
    divided: bool = True  # it can be divided among emulated ranks: the n-th part of its inputs is the n-th rank's
    reads: tuple[str, ...] = ()  # the block's parameters that multiply its input; those of them that it has
    takes: Mapping[str, str] | None = None  # the block's arguments, each by the layer's; None: those of that name
    needs: str | None = None  # the layer's argument without which the sub-block is left out
    compute: Callable[[Any, Any], Any] | None = None  # of the layer and its input: sub-blocks that are no module
    inner: str | None = None  # the block's own attention, where the block would also norm and add: it is called alone
    norm: str | None = None  # the norm that stands on the stream behind it (post-norm)
    projection: str | None = None  # the path of its output projection from the layer, where it is not in the block

    def inside(self, name: str) -> str:
        """The path of a part of the block from the layer."""
        return f"{self.block}.{name}" if self.block else name

    @property
    def entry(self) -> str:
        """The path of the module that is called with the sub-block's input."""
        return self.block or self.inside(self.reads[0].rpartition(".")[0])


@dataclass(frozen=True)
class LayerLayout:
    """The parts of a layer of one model_type, or of one of its stacks."""

    attention: Branch
    mlp: Branch
    cross: Branch | None = None  # the attention to an encoder, between the two
    layers: str = "layers"  # the base model's list of them
    scale: str | None = None  # the layer's attribute that multiplies both branches
    adds_residual: bool = False  # its sub-blocks take the residual as their second argument, and add it themselves
    returns: tuple[tuple[int, int] | None, ...] = ()  # behind the stream: (sub-block, part of its output), or nothing
    unsupported: dict[str, str] = field(default_factory=dict)  # settings that leave no residual stream, and why
    layer_class: str | None = None  # the model's stacks are its lists of layers of this class; None: one, `layers`
    chosen: Callable[[Any], bool] | None = None  # of such a layer: whether it is of this stack
    differentiable: tuple[str, ...] = ()  # arguments besides the stream that gradients flow through
    shared: tuple[str, ...] = ()  # arguments that have no dimension of sequences
    configs: tuple[str, ...] = ("",)  # the parts of the config that stacks have their sizes in; empty: the config
    depth: str = "num_hidden_layers"  # there: how many layers a stack has
    heads: str = "num_attention_heads"
    width: Callable[[Any], int] = attrgetter("intermediate_size")  # of the MLP

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The sub-blocks of a layer, in order."""
        return (self.attention, self.mlp) if self.cross is None else (self.attention, self.cross, self.mlp)

    @property
    def post_norm(self) -> bool:
        """Whether norms stand on the stream itself."""
        return any(branch.norm for branch in self.branches)

    @property
    def divisible(self) -> bool:
        """Whether its sub-blocks can be divided among emulated ranks."""
        return all(branch.out is not None and branch.divided for branch in self.branches)

    def parts(self, config: Any) -> list[Any]:
        """The configs of its stacks."""
        return [getattr(config, name) if name else config for name in self.configs]
