"""One rank's model as benchmarks use it: random weights, any wiring, any emulated link, and its passes by our kernels.

This is the only module of `bench` that knows how the engine's fused passes and their CUDA graphs are built.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ladder.comm.base import Comm, Solo
from ladder.comm.link import Link
from ladder.comm.one_rank import OneRank
from ladder.comm.signalled import Signalled
from ladder.config import ModelConfig
from ladder.config.quantization import named_format
from ladder.engine.forward import Forward, Schedule
from ladder.engine.graphs.prompts import LONGEST, PromptGraphs, rows_of
from ladder.engine.graphs.steps import Graphs
from ladder.kernels.launch import Launch
from ladder.kernels.table import reach
from ladder.layers.cache import KVCache
from ladder.layers.quantized import Quantized
from ladder.model import Decoder

CAPTURED_PROMPT = LONGEST  # tokens of the longest prompt that is computed by a CUDA graph
STD = 0.02  # of random weights
SPREAD = {"fp8": 100.0, "int8": 74.0, "int4": 4.6}  # the standard deviation of codes that are drawn alike
SUB_BLOCKS = {"attention": "attention", "MLP": "mlp"}  # kinds, and a layer's modules


@dataclass(frozen=True)
class Case:
    """One model on one rank of `tp`; `layers` of it where not all fit."""

    size: str
    tp: int
    batch: int = 1
    layers: int | None = None
    weights: str = "bf16"  # the format of the layers' matrices
    shared_norm: bool = False  # one norm a layer

    def config(self) -> ModelConfig:
        named = ModelConfig.named(self.size)
        config = replace(named, weights=named_format(self.weights), shared_norm=self.shared_norm)
        return config if self.layers is None else config.first(self.layers)


def random_model(case: Case, comm: Comm, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """This rank's model with normal weights, drawn on its device: a step's time does not depend on their values."""
    model = Decoder(case.config(), comm, device, dtype)
    torch.manual_seed(0)
    fill(model)
    return model


def fill(model: Decoder) -> None:
    """Random weights."""
    for module in model.modules():
        if isinstance(module, Quantized):
            _draw_codes(module)
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 1:
                parameter.data.fill_(1.0)
            else:
                parameter.data.normal_(std=STD)


def _draw_codes(weight: Quantized) -> None:
    """Every code that is a number, equally often, with scales that make the weights about as large as dense ones."""
    codes = weight.codes.data.view(torch.uint8)
    codes.random_(0, 256)
    if weight.storage.kind == "fp8":
        codes.masked_fill_((codes & 127) == 127, 0)  # these two are no numbers
    scales, alike = weight.scales.data.uniform_(0.5, 1.5).mul_(STD / SPREAD[weight.storage.kind]), weight.rows_alike
    if alike > 1:
        scales.copy_(scales[::alike].repeat_interleave(alike, dim=0)[: len(scales)])
    if weight.zeros is not None:
        weight.zeros.data.random_(0, 16)
    if weight.bias is not None:
        weight.bias.data.fill_(1.0)


def configure(
    model: Decoder, pattern: str, link: Link | None, concurrent: int = 1, rank: Callable[..., Comm] = OneRank
) -> None:
    """Give a rank that is measured alone its wiring and its emulated link, on which `concurrent` all-reduces may run at
    a time; neither changes a tensor. `rank` makes its communicator of the number of ranks and a link.
    """
    model.rewire(pattern)
    size = model.comm.size
    if size == 1:
        model.comm = Solo()
    elif link is None:
        model.comm = rank(size)
    else:
        comms = [rank(size, link) for _ in range(concurrent)]
        model.comm = Signalled(comms, model.embed_tokens.weight.device, model.config.most_all_reduces + 1)


def watch_sub_blocks(model: Decoder, begin: Callable[[str], None], end: Callable[[str], None]) -> list[RemovableHandle]:
    """Call `begin` and `end` around what every sub-block computes, its norm included and its wait for the stream not,
    with its kind and its layer, as in "attention 3"; layers may share their modules. Returns the hooks, to be removed.
    """
    hooks: dict[nn.Module, list[RemovableHandle]] = {}
    for number, layer in enumerate(model.layers):
        for kind, module in SUB_BLOCKS.items():
            block, name = layer.get_submodule(module), f"{kind} {number}"
            if block not in hooks:
                norm = block.norm  # called when the stream has been read
                shared = layer.attention.norm is layer.mlp.norm  # then it does not say whose it is
                first = norm if isinstance(norm, nn.Module) and not shared else block
                before = first.register_forward_pre_hook(lambda *_, name=name: begin(name))
                after = block.register_forward_hook(lambda *_, name=name: end(name))
                hooks[block] = [before, after]
    return [hook for pair in hooks.values() for hook in pair]


class FusedModel:
    """`model` by our kernels, over a cache whose last slot is no sequence's. A graph keeps the wiring and the
    communicator that the model has when it is captured. `schedule`: of decode steps; none: the fastest, as in the
    engine. `without`: "attention" or "mlp", left out of decode steps.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        launch: Launch,
        schedule: Schedule | None = None,
        without: str | None = None,
    ) -> None:
        self._forward, self._without = Forward(model, cache, launch), without
        self._device, spare = cache.keys[0].device, len(cache.lengths) - 1
        self._graphs = Graphs(self._forward, spare, () if schedule is None else (schedule,))
        self._prompts = PromptGraphs(
            self._forward, spare, torch.zeros(spare + 1, dtype=torch.long, device=self._device)
        )

    def decode_step(self, batch: int, context: int) -> Callable[[], Tensor]:
        """A decode step of `batch` sequences, each of them at position `context` - 1, captured as a CUDA graph. A call
        replays it and gives the logits, which the next call overwrites.
        """
        blocks = (
            [] if self._without is None else [getattr(layer, self._without) for layer in self._forward.model.layers]
        )
        for block in blocks:
            block.forward = lambda *_: None
        graph = self._graphs.captured(batch)
        for block in blocks:
            del block.forward  # the class has its own
        # different tokens, which choose different experts
        inputs = torch.tensor([list(range(batch)), list(range(batch)), [context - 1] * batch], device=self._device)
        return lambda: graph.replay(inputs)[0]

    def lanes(self, batch: int) -> int:
        """That a decode step of `batch` sequences runs on."""
        return self._graphs.captured(batch).forward.schedule.lanes

    def prompt(self, tokens: Sequence[int]) -> Tensor:
        """The logits after a prompt of up to CAPTURED_PROMPT tokens in the first slot, by a CUDA graph."""
        graph = self._prompts.captured((rows_of(len(tokens)), 0, reach(1)))
        return graph.replay([tokens], [0], [0], 0, [len(tokens) - 1])

    def prompts(self, tokens: Tensor, last: Tensor, slots: list[int]) -> Tensor:
        """The logits after each of several prompts, [batch, tokens], launch by launch."""
        batch, count = tokens.shape
        rows = torch.arange(batch, device=last.device) * count + last
        return self._forward.prefill(tokens.flatten(), [count] * batch, slots, rows)
