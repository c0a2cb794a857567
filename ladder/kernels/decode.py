"""`Ops` for decode, by kernels: one new token of each sequence."""

from dataclasses import replace

import torch
from torch import Tensor

from ladder.comm.base import Comm
from ladder.comm.signalled import Signalled
from ladder.kernels.launch import Launch
from ladder.kernels.stream import Source
from ladder.lanes import Lanes, OneLane
from ladder.layers.attention import Attention
from ladder.layers.cache import KVCache, Metadata
from ladder.layers.embedding import Embedding, Head
from ladder.layers.experts import ExpertMLP
from ladder.layers.mlp import MLP
from ladder.layers.norm import Norm
from ladder.layers.rope import RopeTable
from ladder.layers.weight import Weight, as_one
from ladder.residual import Post, ResidualStream, Terms
from ladder.wiring import Out


class FusedReader:
    """What all kernels' backends have in common: how they read the stream, and a norm behind a sub-block."""

    def __init__(self, launch: Launch, lanes: Lanes | None = None, polls: bool = True) -> None:
        """`polls`: kernels poll the flags of all-reduces, else they wait for the stream's events."""
        self._polls = polls
        self.launch = launch
        self.lanes = lanes or OneLane()

    def norm(self, stream: ResidualStream, lag: int, norm: Norm | None) -> Tensor:
        terms = stream.begin_read(lag)
        x, total = self.launch.norm(self.source(terms), norm)
        stream.end_read(terms, total)
        return x

    def source(self, terms: Terms) -> Source:
        return Source.of(terms if self._polls else replace(terms, polls=False))

    def post(self, norm: Norm | None) -> Post | None:
        """The norm behind a sub-block, for the stream to apply once the all-reduce is complete."""
        return None if norm is None else lambda x: self.launch.norm(Source(x.contiguous()), norm)[0]

    def norms_of_all_heads(self, stream: ResidualStream, block: Attention, qkv: Tensor) -> Tensor:
        """qkv [rows, width] with the norms that span all heads, where the family has them; those by head are the
        kernels' own.
        """
        if block.qk_norm != "all":
            return qkv
        q, k, v = block.split(qkv)
        q, k = block.norm_qk(stream, q, k)
        return torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)


class Decode(FusedReader):
    """Norms and activations inside the matrix kernels. Nothing here looks at a value: it can be captured in a CUDA
    graph and replayed with others.
    """

    def __init__(
        self, launch: Launch, comm: Comm, ropes: RopeTable, lanes: Lanes | None = None, polls: bool = True
    ) -> None:
        super().__init__(launch, lanes, polls)
        self._signalled = comm if isinstance(comm, Signalled) else None
        self._ropes = ropes
        none = torch.zeros(1, dtype=torch.int32, device=ropes.frequencies.device)
        self._flags = none if self._signalled is None else self._signalled.flags

    def metadata(self, slots: Tensor, positions: Tensor, cache: KVCache, reach: int) -> Metadata:
        """Of rows that stand at `positions` of `slots`; `embed` fills in the angles."""
        ropes, half = self._ropes.frequencies.shape
        cos, sin = (torch.empty(ropes, len(positions), half, device=positions.device) for _ in range(2))
        return Metadata(slots, positions, cos, sin, cache.tables, reach)

    def embed(self, embedding: Embedding, tokens: Tensor, metadata: Metadata) -> Tensor:
        x = self.launch.embed(embedding, tokens, metadata, self._ropes, self._flags)
        if self._signalled is not None:
            self._signalled.begin(self._polls)
        return x

    def norm_project(
        self, stream: ResidualStream, lag: int, norm: Norm | None, weight: Weight, kind: str,
        activation: str | None = None, gated: bool = False,
    ) -> Tensor:  # fmt: skip
        terms = stream.begin_read(lag)
        y, total = self.launch.norm_project(self.source(terms), norm, weight, kind, activation, gated)
        stream.end_read(terms, total)
        return y if kind == "qkv" else y[0]

    def norm_project_both(
        self, stream: ResidualStream, lag: int, attention: Attention, mlp: MLP
    ) -> tuple[Tensor, Tensor] | None:
        both = as_one(attention.qkv_proj, mlp.up_proj)
        if both is None or not self.launch.takes_both(both, stream.rows, mlp.gated):
            return None
        terms = stream.begin_read(lag)
        qkv, y, total = self.launch.norm_project_both(
            self.source(terms), attention.norm, both, mlp.activation, mlp.gated
        )
        stream.end_read(terms, total)
        return qkv.unsqueeze(0), y

    def attend(
        self, stream: ResidualStream, block: Attention, qkv: Tensor, metadata: Metadata, cache: KVCache | None
    ) -> Tensor:
        assert cache is not None
        if block.qk_norm == "all":
            qkv = self.norms_of_all_heads(stream, block, qkv.sum(0)).unsqueeze(0)
        return self.launch.attend(qkv, block, metadata, cache.keys[block.layer], cache.values[block.layer])

    def experts(self, stream: ResidualStream, out: Out, block: ExpertMLP, x: Tensor) -> None:
        stream.write(
            lambda plus, divisor: self.launch.experts(x, block, plus, divisor), out, self.post(block.post_norm)
        )

    def project(
        self, stream: ResidualStream, out: Out, x: Tensor, weight: Weight, scale: float, post: Norm | None
    ) -> None:
        stream.write(lambda plus, divisor: self.launch.project(x, weight, plus, divisor, scale), out, self.post(post))

    def head(self, stream: ResidualStream, norm: Norm, head: Head, last: Tensor | None) -> Tensor:
        terms = stream.begin_read(0)
        product, total = self.launch.norm_project(self.source(terms), norm, head, "head", dtype=torch.float32)
        stream.end_read(terms, total)
        if self._signalled is not None:
            self._signalled.end()
        return head.finish(product[0])
