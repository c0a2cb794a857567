"""A decoder's forward pass by kernels: the sub-blocks of `model.Layer` around the same stream, in fewer launches."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ladder.comm.signalled import Signalled
from ladder.kernels.ops import Gains, Norm, Ops
from ladder.kernels.place import Steps
from ladder.kernels.stream import settle, source
from ladder.layers.attention import Attention, KVCache, Place
from ladder.layers.linear import RowLinear
from ladder.layers.norm import RMSNorm
from ladder.model import Decoder, Layer
from ladder.residual import ResidualStream
from ladder.wiring import Out, SubBlock

PIECES = 2  # that a prompt's partial sums are sent in: the first travels while the second is computed
# rows; below, a product of half of them is one wave of the chip, which becomes two beside a sum that holds some cores
WORTH_CUTTING = 2048


class Fused:
    """`model`'s passes over `cache`, in the vocabulary of `ops`."""

    def __init__(self, model: Decoder, cache: KVCache, ops: Ops) -> None:
        self.model = model
        self.cache = cache
        self.ops = ops
        frequencies: Tensor = model.frequencies  # type: ignore[assignment]
        self._frequencies = frequencies
        none = torch.zeros(1, dtype=torch.int32, device=frequencies.device)
        blocks = [block for layer in model.layers if isinstance(layer, Layer) for block in layer.wiring]
        self._sums = sum(block.out is Out.REDUCE for block in blocks)
        self._flags = model.comm.flags if isinstance(model.comm, Signalled) else none

    def step(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """One token of each request, [batch] like its slot and position: this rank's logits [batch, block], and
        every rank's best [batch, 2 x size]: value and token in turns.

        Nothing here looks at a value: it can be captured in a CUDA graph and replayed with others.
        """
        model, comm = self.model, self.model.comm
        table = model.embed_tokens
        x, cos, sin = self.ops.start(tokens, positions, self._frequencies, table.weight, table.start, self._flags)
        if isinstance(comm, Signalled):
            comm.begin()
        place = Steps(slots, positions, cos, sin)
        stream = ResidualStream.from_partial(comm, x, self._sums)
        for layer in model.layers:
            assert isinstance(layer, Layer)
            attention, mlp = layer.wiring
            self._attention(stream, attention, layer, place)
            self._mlp(stream, mlp, layer)
        last = source(stream, 0)
        head = model.lm_head
        logits = self.ops.norm_project(last, _norm(model.norm), head.weight, None, "head", torch.float32)[0][0]
        if isinstance(comm, Signalled):
            comm.end()
        best = self.ops.best(logits, head.start, max(0, min(head.step, head.vocab - head.start)))
        return logits, comm.all_gather(best)

    def _attention(self, stream: ResidualStream, wiring: SubBlock, layer: Layer, place: Steps) -> None:
        block = layer.self_attn
        keys, values = self.cache.keys[block.layer], self.cache.values[block.layer]
        proj = block.qkv_proj
        qkv = self._read(stream, wiring, layer.input_layernorm, proj.weight, proj.bias, "qkv")
        y = self.ops.attend(qkv, place, _gains(block), keys, values, _heads(block), block.window)
        self._write(stream, wiring, y, block.o_proj)

    def _mlp(self, stream: ResidualStream, wiring: SubBlock, layer: Layer) -> None:
        proj = layer.mlp.gate_up_proj
        y = self._read(stream, wiring, layer.post_attention_layernorm, proj.weight, proj.bias, "gate_up")[0]
        self._write(stream, wiring, y, layer.mlp.down_proj)

    def _read(
        self,
        stream: ResidualStream,
        wiring: SubBlock,
        norm: RMSNorm,
        weight: Tensor,
        bias: Tensor | None,
        kernel: str,
    ) -> Tensor:
        read = source(stream, wiring.lag)
        y, saved = self.ops.norm_project(read, _norm(norm), weight, bias, kernel)
        settle(stream, read, saved)
        return y

    def _write(self, stream: ResidualStream, wiring: SubBlock, y: Tensor, proj: RowLinear) -> None:
        if wiring.out is Out.LOCAL and self.model.comm.size > 1:
            return stream.write_local(self.ops.project(y, proj.weight, proj.bias, None, 1))
        plus, divisor = stream.addend(wiring.out)
        stream.write_joined(self.ops.project(y, proj.weight, proj.bias, plus, divisor), wiring.out)

    def prompts(self, tokens: Tensor, last: Tensor, slots: list[int]) -> Tensor:
        """Pieces of prompts, [batch, tokens], as in `Decoder.forward`: logits of each line's `last`, [batch, block]."""
        config, dtype = self.model.config, self.model.embed_tokens.weight.dtype
        place = Place.of(tokens.shape, self.cache, slots, config, self._frequencies, dtype)
        return self.prompts_at(tokens, last, place.lines.expand(tokens.shape).flatten(), place)

    def beginnings(self, shape: torch.Size) -> Place:
        """The place of prompts' first pieces, whatever their slots."""
        dtype = self.model.embed_tokens.weight.dtype
        return Place.of(shape, None, None, self.model.config, self._frequencies, dtype)

    def prompts_at(self, tokens: Tensor, last: Tensor, slots: Tensor, seen: Place) -> Tensor:
        """`prompts` in `slots`, one for every token. First pieces can be captured in a CUDA graph: they look only at
        themselves, so nothing of it depends on the slots but where their keys and values go.

        The matrix products are the library's; a sub-block's sum goes out in pieces, so that most of it can travel
        behind what this rank still computes.
        """
        model = self.model
        angles = seen.positions.flatten().unsqueeze(-1).float() * self._frequencies
        # kernels go by addresses: no expanded views
        place = Steps(slots.contiguous(), seen.positions.flatten(), angles.cos(), angles.sin())
        stream = ResidualStream.from_partial(model.comm, model.embed_tokens(tokens).flatten(0, 1), self._sums)
        for layer in model.layers:
            assert isinstance(layer, Layer)
            attention, mlp = layer.wiring
            x = self._normed(stream, attention.lag, layer.input_layernorm)
            self._send(stream, attention.out, self._look(x, layer.self_attn, place, seen), layer.self_attn.o_proj)
            x = self._normed(stream, mlp.lag, layer.post_attention_layernorm)
            proj = layer.mlp.gate_up_proj
            self._send(stream, mlp.out, self.ops.gate(F.linear(x, proj.weight, proj.bias)), layer.mlp.down_proj)
        stream_end = stream.read(lag=0).unflatten(0, tokens.shape)
        x = stream_end[torch.arange(len(last), device=last.device), last]
        logits: Tensor = model.lm_head(model.norm(x))
        return logits

    def _normed(self, stream: ResidualStream, lag: int, norm: RMSNorm) -> Tensor:
        read = source(stream, lag)
        x, saved = self.ops.norm(read, _norm(norm))
        settle(stream, read, saved)
        return x

    def _look(self, x: Tensor, block: Attention, place: Steps, seen: Place) -> Tensor:
        keys, values = self.cache.keys[block.layer], self.cache.values[block.layer]
        qkv = F.linear(x, block.qkv_proj.weight, block.qkv_proj.bias)
        turned = self.ops.rotate_write(qkv, place, _gains(block), keys, values, _heads(block))
        batch, tokens = seen.positions.shape
        heads, kv_heads = _heads(block), keys.shape[2]
        q, k, v = turned.unflatten(0, (batch, tokens)).split((heads, kv_heads, kv_heads), dim=2)
        if seen.seen > tokens:  # what came before is in the cache
            k, v = keys[seen.read, : seen.seen], values[seen.read, : seen.seen]
        return block.look(q, k, v, seen).flatten(0, 1)

    def _send(self, stream: ResidualStream, out: Out, x: Tensor, proj: RowLinear) -> None:
        if out is Out.LOCAL and self.model.comm.size > 1:
            return stream.write_local(F.linear(x, proj.weight, proj.bias))
        plus, _ = stream.addend(out)
        if out is not Out.REDUCE or plus is not None or len(x) < WORTH_CUTTING or self.model.comm.size == 1:
            return stream.write(F.linear(x, proj.weight, proj.bias), out)
        whole = x.new_empty(len(x), proj.weight.shape[0])

        def pieces() -> Iterator[Tensor]:
            for part, target in zip(x.chunk(PIECES), whole.chunk(PIECES), strict=True):
                torch.mm(part, proj.weight.t(), out=target)
                yield target if proj.bias is None else target.add_(proj.bias)

        stream.write_pieces(pieces())


def _norm(norm: RMSNorm) -> Norm:
    return norm.weight, norm.eps


def _gains(block: Attention) -> Gains:
    if not isinstance(block.q_norm, RMSNorm) or not isinstance(block.k_norm, RMSNorm):
        return None
    return block.q_norm.weight, block.k_norm.weight, block.q_norm.eps


def _heads(block: Attention) -> int:
    """Query heads of this rank."""
    return block.o_proj.weight.shape[1] // block.head_dim
