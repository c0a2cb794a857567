"""The operations that layers are written in (`Ops`), and their plain torch backend.

Activations are rows: [tokens of the pass, width]. The other backends are kernels/decode.py and kernels/prefill.py.
"""

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ladder.lanes import Lanes, OneLane
from ladder.layers.activation import activate
from ladder.layers.cache import KVCache, Metadata, PrefillMetadata, places, write
from ladder.layers.norm import Norm
from ladder.layers.rope import rotate
from ladder.layers.weight import Weight
from ladder.residual import ResidualStream
from ladder.wiring import Out

if TYPE_CHECKING:
    from ladder.layers.attention import Attention
    from ladder.layers.embedding import Embedding, Head
    from ladder.layers.experts import ExpertMLP
    from ladder.layers.mlp import MLP


class Ops(Protocol):
    """What a decoder asks of a backend."""

    lanes: Lanes  # where the sub-blocks of a layer are computed

    def embed(self, embedding: "Embedding", tokens: Tensor, metadata: Metadata) -> Tensor:
        """This rank's term of the embedding."""
        ...

    def norm(self, stream: ResidualStream, lag: int, norm: Norm | None) -> Tensor:
        """norm(stream), the stream read with this lag."""
        ...

    def norm_project(
        self,
        stream: ResidualStream,
        lag: int,
        norm: Norm | None,
        weight: Weight,
        kind: str,
        activation: str | None = None,
        gated: bool = False,
    ) -> Tensor:
        """activation( norm(stream) W^T + b ). `kind`: qkv or gate_up; the result of a `qkv` is for `attend` alone."""
        ...

    def norm_project_both(
        self, stream: ResidualStream, lag: int, attention: "Attention", mlp: "MLP"
    ) -> tuple[Tensor, Tensor] | None:
        """`norm_project` of both sub-blocks of a layer in one product, where they read the same stream through the same
        norm; None: this backend, or weights that are stored like this, have one product for each.
        """
        ...

    def attend(
        self, stream: ResidualStream, block: "Attention", qkv: Tensor, metadata: Metadata, cache: KVCache | None
    ) -> Tensor:
        """Norms and rotation of queries and keys, the cache written, attention over it: [rows, heads * d]."""
        ...

    def experts(self, stream: ResidualStream, out: Out, block: "ExpertMLP", x: Tensor) -> None:
        """Write the experts' partial sum for rows `x` that have been through the norm."""
        ...

    def project(
        self, stream: ResidualStream, out: Out, x: Tensor, weight: Weight, scale: float, post: Norm | None
    ) -> None:
        """Write scale * (x W^T + b) to the stream, through the norm `post` where there is one."""
        ...

    def head(self, stream: ResidualStream, norm: Norm, head: "Head", last: Tensor | None) -> Tensor:
        """This rank's block of the logits: of the rows `last`, or of all."""
        ...


class Plain:
    """Plain torch, anywhere; differentiable. The reference implementation."""

    lanes: Lanes = OneLane()

    def embed(self, embedding: "Embedding", tokens: Tensor, metadata: Metadata) -> Tensor:
        x: Tensor = embedding(tokens, metadata.positions)
        return x

    def norm(self, stream: ResidualStream, lag: int, norm: Norm | None) -> Tensor:
        x = stream.read(lag)
        return x if norm is None else norm(x)

    def norm_project(
        self,
        stream: ResidualStream,
        lag: int,
        norm: Norm | None,
        weight: Weight,
        kind: str,
        activation: str | None = None,
        gated: bool = False,
    ) -> Tensor:
        y = weight.multiply(self.norm(stream, lag, norm))
        return y if activation is None else activate(y, activation, gated)

    def norm_project_both(self, stream: ResidualStream, lag: int, attention: "Attention", mlp: "MLP") -> None:
        return None  # the reference implementation has two products

    def attend(
        self, stream: ResidualStream, block: "Attention", qkv: Tensor, metadata: Metadata, cache: KVCache | None
    ) -> Tensor:
        assert isinstance(metadata, PrefillMetadata)
        q, k, v = block.split(qkv)
        q, k = block.norm_qk(stream, q, k)
        cos, sin = metadata.cos[block.rope], metadata.sin[block.rope]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        keys, values = (None, None) if cache is None else (cache.keys[block.layer], cache.values[block.layer])
        if keys is not None and values is not None:
            at = places(metadata.tables, metadata.slots, metadata.positions)
            k, v = write(keys, at, k), write(values, at, v)
        return block.over_pieces(q, k, v, metadata, keys, values)

    def experts(self, stream: ResidualStream, out: Out, block: "ExpertMLP", x: Tensor) -> None:
        y = block.apply_experts(x, *block.choose(x))
        stream.write(y if block.residual_scale == 1 else y * block.residual_scale, out, block.post_norm)

    def project(
        self, stream: ResidualStream, out: Out, x: Tensor, weight: Weight, scale: float, post: Norm | None
    ) -> None:
        y = weight.multiply(x)
        stream.write(y if scale == 1 else y * scale, out, post)

    def head(self, stream: ResidualStream, norm: Norm, head: "Head", last: Tensor | None) -> Tensor:
        x = stream.read(lag=0)
        logits: Tensor = head(norm(x if last is None else x[last]))
        return logits
