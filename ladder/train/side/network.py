"""The side network: a small decoder that adds the model's stream to its own, layer by layer.

    side     <-  start( n(embedding) )
    side     <-  s side + (1 - s) down( n(stream) )      for each layer of the model that is read, the stream after it;
    side     <-  layer( side )                           s = sigmoid(gate / T); attention and MLP, wired
    output    =  rms(stream) up( norm(side) )            to be added to the model's last stream

n(x) = x / rms(x) of each token: streams of some families are a hundred times as large as others'. n has no parameters
(`down` can do all that a gain could), so that of the model's width only one n(stream) per layer that is read is kept
for the backward pass. `up` is initialized with zeros: the output is exactly zero.

A gate scales the side network's own stream, all-reduces in flight included. It waits for none of them: each rank may
scale its partial sum, since the sum of the scaled partial sums is the scaled sum.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from ladder.config import Rope
from ladder.errors import LadderError
from ladder.hf.layer import StreamState
from ladder.hf.wire import wire_layers
from ladder.layers.rope import frequencies
from ladder.wiring import Wiring

TEMPERATURE = 0.1  # of the gates, as in Ladder Side-Tuning (arXiv 2206.06522)
EPSILON = 1e-6


@dataclass(frozen=True)
class SideShape:
    """How large a side network is."""

    hidden: int  # the model's width
    width: int  # its own
    head: int
    layers: int

    def config(self) -> LlamaConfig:
        """transformers' config of its layers."""
        inner = -(-8 * self.width // (3 * self.head)) * self.head  # a gated MLP as large as a plain one of 4 x width
        return LlamaConfig(
            hidden_size=self.width, intermediate_size=inner, num_hidden_layers=self.layers, head_dim=self.head,
            num_attention_heads=self.width // self.head, rms_norm_eps=EPSILON, attn_implementation="sdpa",
        )  # fmt: skip


class SideNetwork(nn.Module):
    """Driven from outside, a step for each layer that is read: `begin`, `step` ..., `output`."""

    def __init__(self, shape: SideShape, wiring: Wiring) -> None:
        super().__init__()
        self.config = shape.config()
        self.start = nn.Linear(shape.hidden, shape.width, bias=False)
        self.down = nn.ModuleList(nn.Linear(shape.hidden, shape.width, bias=False) for _ in range(shape.layers))
        self.gates = nn.Parameter(torch.zeros(shape.layers))
        self.layers = nn.ModuleList(LlamaDecoderLayer(self.config, index) for index in range(shape.layers))
        self.norm = LlamaRMSNorm(shape.width, eps=EPSILON)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        for linear in (self.start, *self.down):
            nn.init.normal_(linear.weight, std=shape.hidden**-0.5)
        nn.init.zeros_(self.up.weight)
        # no buffer, which a change of dtype would round
        self._frequencies = frequencies(Rope(), shape.head)
        wire_layers(self, wiring)

    @property
    def base_model(self) -> "SideNetwork":
        """Where transformers' models keep their layers."""
        return self

    def begin(self, embedding: Tensor) -> StreamState:
        """The side stream, from the model's before its first layer: [batch, tokens, hidden]."""
        side = self.start(normalized(embedding))
        return StreamState(side, side, ())

    def layer_arguments(self, side: StreamState, mask: Tensor | None) -> dict[str, Any]:
        """The layers' arguments besides the stream: the attention mask, and the positions as angles."""
        positions = torch.arange(side.stream.shape[1], device=side.stream.device)[None]
        half = positions.unsqueeze(-1).float() * self._frequencies.to(positions.device)
        both = torch.cat((half, half), dim=-1)
        angles = tuple(each.to(side.stream.dtype) for each in (both.cos(), both.sin()))
        return {"attention_mask": mask, "position_embeddings": angles}

    def step(self, index: int, side: StreamState, stream: Tensor, arguments: dict[str, Any]) -> Any:
        """One layer, which first takes in the model's stream. The last one returns the stream alone."""
        keep = torch.sigmoid(self.gates[index] / TEMPERATURE)
        new = (1 - keep) * self.down[index](normalized(stream))
        sums = tuple(keep * each for each in side.sums)
        mixed = StreamState(keep * side.stream + new, keep * side.agreed + new, sums)
        return self.layers[index](mixed, **arguments)

    def output(self, side: Tensor, stream: Tensor) -> Tensor:
        """To be added to the model's last stream, of its shape and dtype."""
        with torch.no_grad():
            scale = rms(stream)
        found: Tensor = self.up(self.norm(side)) * scale
        return found.to(stream.dtype)


class SidePass:
    """The side network's steps during a pass of the backbone, each where a hook calls it."""

    def __init__(self, network: SideNetwork, backbone_dtype: torch.dtype, grad: bool) -> None:
        self._network, self._grad = network, grad
        self._half = backbone_dtype if backbone_dtype != network.up.weight.dtype else None

    @contextmanager
    def _beside(self, stream: Tensor) -> Iterator[None]:
        """With gradients where the caller has them on; float32 parameters beside a half-precision backbone compute in
        half precision.
        """
        with torch.set_grad_enabled(self._grad):
            if self._half is None:
                yield
            else:
                with torch.autocast(stream.device.type, self._half):
                    yield

    def begin(self, backbone: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        self._present, self._positions = named.get("attention_mask"), named.get("position_ids")
        if self._present is not None and self._present.dim() != 2:
            shape = list(self._present.shape)
            raise LadderError(f"attention_mask must be [batch, tokens] for a side network, not of the shape {shape}")

    def embedded(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        stream = arguments[0]
        self._index = 0
        with self._beside(stream):
            self._side: Any = self._network.begin(stream)
            mask = attention_mask(stream.shape[1], self._present, self._positions)
            self._arguments = self._network.layer_arguments(self._side, mask)

    def layer(self, layer: nn.Module, arguments: Any, output: Any) -> None:
        stream = output[0] if isinstance(output, tuple) else output
        with self._beside(stream):
            self._side = self._network.step(self._index, self._side, stream, self._arguments)
        self._index += 1

    def end(self, norm: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor]:
        """The last stream with the output added. From here on gradients are enabled: norm, head, loss."""
        stream = arguments[0]
        with self._beside(stream):
            side = self._side.stream if isinstance(self._side, StreamState) else self._side
            stream = stream + self._network.output(side, stream)
        self._side = None
        torch.set_grad_enabled(self._grad)
        return (stream,)


def rms(stream: Tensor) -> Tensor:
    """Root mean square of each token, float32 at least: [batch, tokens, 1]."""
    wide = stream.to(torch.promote_types(stream.dtype, torch.float32))
    return (wide.square().mean(-1, keepdim=True) + EPSILON).sqrt()


def normalized(stream: Tensor) -> Tensor:
    """The model's stream as the side network reads it; gradients end here."""
    with torch.no_grad():
        return (stream / rms(stream)).to(stream.dtype)


def attention_mask(tokens: int, present: Tensor | None, positions: Tensor | None) -> Tensor | None:
    """Which tokens each one attends to, [batch, 1, tokens, tokens]; None: all up to itself.

    `present` [batch, tokens] is 0 for padding. Where `positions` [batch, tokens] do not increase by 1, another text
    begins. A token always attends to itself, padding too: softmax over nothing is not defined.
    """
    limits = []
    if present is not None and not bool(present.all()):
        limits.append(present.bool()[:, None, None, :])
    if positions is not None and bool((begins := positions.diff(dim=-1) != 1).any()):
        text = F.pad(begins, (1, 0)).cumsum(-1)
        limits.append(text[:, None, :, None] == text[:, None, None, :])
    if not limits:
        return None
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=limits[0].device).tril()
    for limit in limits:
        mask = mask & limit
    return mask | torch.eye(tokens, dtype=torch.bool, device=mask.device)
