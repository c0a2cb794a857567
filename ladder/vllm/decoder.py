"""The forward pass of a wired model over vLLM's layers: each sub-block reads and writes the residual stream."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ladder.comm.base import Comm
from ladder.comm.group import Group
from ladder.lanes import CudaLanes, Lanes, OneLane
from ladder.residual import ResidualStream
from ladder.vllm import stages
from ladder.vllm.families import Parts
from ladder.vllm.stages import Border
from ladder.wiring import SubBlock, independent, read_together

Norm = Any  # vLLM's: norm(x), and norm(x, residual) -> (norm(x + residual), x + residual), in place


class WiredLayer:
    """Attention and MLP of one of vLLM's layers. Its modules are looked up in every pass: vLLM replaces some (LoRA)."""

    def __init__(self, layer: nn.Module, parts: Parts, wiring: tuple[SubBlock, SubBlock]) -> None:
        self.layer, self.parts, self.wiring = layer, parts, wiring
        norms = (parts.attention_norm, parts.mlp_norm)
        shares = getattr(layer, norms[0]) is getattr(layer, norms[1])
        self.reads_once = shares and read_together(*wiring)

    def part(self, name: str) -> Any:
        return getattr(self.layer, name) if name else None


class WiredDecoder:
    """One pipeline stage of a wired model: `layers` are its own, `blocks` those of all of the model's layers."""

    def __init__(
        self,
        model: Any,  # vLLM's: layers, and a norm behind them
        parts: Parts,
        blocks: Sequence[tuple[SubBlock, SubBlock]],
        comm: Comm,
        lanes: int = 1,
    ) -> None:
        start, end = int(model.start_layer), int(model.end_layer)
        self.model = model
        self.comm = comm
        self.layers = [WiredLayer(model.layers[index], parts, blocks[index]) for index in range(start, end)]
        flat = [block for pair in blocks for block in pair]
        self.before, self.after = (Border.after(flat[: 2 * at], comm.size) for at in (start, end))
        own = flat[2 * start : 2 * end]
        self.lanes = lanes if any(independent(own)) else 1
        self._streams: list[torch.cuda.Stream] = []

    def forward(self, x: Tensor, positions: Tensor, last: bool, lanes: int = 1) -> Tensor | dict[str, Tensor]:
        """From the embedding `x`, on the first stage. The `last` stage gives what the head reads, others what the next
        one receives.
        """
        on = self._lanes(lanes)
        return self._run(ResidualStream(self.comm, x, lanes=on), on, positions, last)

    def go_on(self, received: Mapping[str, Tensor], positions: Tensor, last: bool) -> Tensor | dict[str, Tensor]:
        """From what the stage before has sent."""
        return self._run(stages.receive(self.comm, received, self.before), OneLane(), positions, last)

    def _lanes(self, count: int) -> Lanes:
        if count == 1:
            return OneLane()
        while len(self._streams) < count - 1:
            self._streams.append(CudaLanes.stream(torch.device("cuda", torch.cuda.current_device())))
        return CudaLanes(self._streams[: count - 1])

    def _run(self, stream: ResidualStream, lanes: Lanes, positions: Tensor, last: bool) -> Tensor | dict[str, Tensor]:
        for layer in self.layers:
            self._layer(layer, stream, lanes, positions)
        lanes.join()
        found = self._read(stream, lanes, 0, self.model.norm) if last else stages.send(stream)
        self.join()
        return found

    def _layer(self, layer: WiredLayer, stream: ResidualStream, lanes: Lanes, positions: Tensor) -> None:
        (attention, mlp), parts = layer.wiring, layer.parts
        with lanes.on(1):  # attention on the second lane, where there are two
            x = self._read(stream, lanes, attention.lag, layer.part(parts.attention_norm))
            y = layer.part(parts.attention)(positions=positions, hidden_states=x)
            stream.write(y, attention.out, layer.part(parts.attention_post_norm))
        with lanes.on(0):
            if lanes.count > 1 or not layer.reads_once:
                x = self._read(stream, lanes, mlp.lag, layer.part(parts.mlp_norm))
            stream.write(layer.part(parts.mlp)(x), mlp.out, layer.part(parts.mlp_post_norm))

    def _read(self, stream: ResidualStream, lanes: Lanes, lag: int, norm: Norm) -> Tensor:
        """The stream through a norm, which adds the newest all-reduce by itself where nothing is added after it. It
        does so in place; lanes may share what it is added to.
        """
        terms = stream.begin_read(lag)
        total, results = terms.base, [pending.wait() for pending in terms.pending]
        fused = bool(results) and not terms.more and lanes.count == 1
        for x in results[:-1] if fused else results:
            total = total + x
        if fused:
            normed, total = norm(results[-1], total)
            stream.end_read(terms, total)
            return normed  # type: ignore[no-any-return]
        stream.end_read(terms, total)
        for drift in terms.more:
            total = total + drift
        return norm(total)  # type: ignore[no-any-return]

    def join(self) -> None:
        """This stream waits for all-reduces that are in flight."""
        if isinstance(self.comm, Group):
            self.comm.join()
