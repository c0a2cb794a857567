"""A decoder's forward passes by kernels: decode and prefill."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ladder.comm.signalled import Signalled
from ladder.kernels.decode import Decode
from ladder.kernels.launch import Kernels, Launch
from ladder.kernels.prefill import Prefill, can_group
from ladder.lanes import CudaLanes, Lanes
from ladder.layers.cache import KVCache, PrefillMetadata
from ladder.layers.experts import ExpertMLP
from ladder.model import Decoder
from ladder.wiring import SubBlock, independent

ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Schedule:
    """How the kernels of a decode step are launched."""

    lanes: int = 1
    pdl: bool = True  # programmatic dependent launch: a kernel starts while the one before it on its lane ends
    polls: bool = True  # kernels poll the flags of all-reduces; else they are launched when these are complete

    @classmethod
    def worth_trying(cls, blocks: Sequence[SubBlock], pdl: bool, library: bool) -> "tuple[Schedule, ...]":
        """On a GPU: two lanes where some sub-block does not wait for the one before it. `pdl`: the chip has
        programmatic launch. `library`: all-reduces are those of a library, to which kernels that poll leave some of the
        chip.
        """
        found = [cls()]
        if any(independent(blocks)):
            found += [cls(2), *([cls(2, pdl=False)] if pdl else [])]
        return (*found, *(replace(each, polls=False) for each in found if library))

    def __str__(self) -> str:
        name = "1 lane" if self.lanes == 1 else f"{self.lanes} lanes"
        return name + ", no programmatic launch" * (not self.pdl) + ", no flags" * (not self.polls)


class Forward:
    """`model`'s passes over `cache`, by the kernels of `launch`."""

    def __init__(
        self, model: Decoder, cache: KVCache, launch: Launch, lanes: Lanes | None = None, polls: bool = True
    ) -> None:
        """`lanes`: where decode computes the sub-blocks of a layer; none: one after the other. `polls`: see
        `Schedule`.
        """
        self.schedule = Schedule()
        self._streams: list[torch.cuda.Stream] = []  # of lanes after the first, the same for all schedules
        self.model = model
        self.cache = cache
        self.launch = launch
        self._decode = Decode(launch, model.comm, model.ropes, lanes, polls)
        self._prefill = Prefill(launch, model.comm.size)

    def schedules(self) -> tuple[Schedule, ...]:
        """Those that may be the fastest for a decode step. All ranks call it, and get the same."""
        if not isinstance(self.launch, Kernels):
            return (Schedule(),)
        comm, blocks = self.model.comm, [block for layer in self.model.config.sub_blocks() for block in layer]
        device = self.cache.keys[0].device
        everywhere = bool(comm.all_gather(torch.tensor([[float(self.launch.chip_pdl)]], device=device)).all())
        return Schedule.worth_trying(blocks, everywhere, isinstance(comm, Signalled) and comm.library)

    def scheduled(self, schedule: Schedule) -> "Forward":
        """The same passes by another schedule, on a GPU."""
        if schedule == self.schedule:
            return self
        assert isinstance(self.launch, Kernels)
        while len(self._streams) < schedule.lanes - 1:
            self._streams.append(CudaLanes.stream(self.cache.keys[0].device))
        lanes = CudaLanes(self._streams[: schedule.lanes - 1]) if schedule.lanes > 1 else None
        launch = self.launch.scheduled(schedule.lanes, schedule.pdl, isinstance(self.model.comm, Signalled))
        other = Forward(self.model, self.cache, launch, lanes, schedule.polls)
        other.schedule, other._streams = schedule, self._streams
        return other

    @property
    def capturable(self) -> bool:
        """Whether prompts can be part of a CUDA graph: not where experts are computed one after the other."""
        blocks = [layer.mlp for layer in self.model.layers]
        return all(can_group(block, self.model.embed_tokens.weight) for block in blocks if isinstance(block, ExpertMLP))

    def decode(self, tokens: Tensor, slots: Tensor, positions: Tensor, reach: int | None = None) -> Tensor:
        """One token of each sequence, [batch] like its slot and position: this rank's logits [batch, block]. `reach`:
        see `Metadata`; none: what the cache has room for.

        Nothing here looks at a value: it can be captured in a CUDA graph and replayed with others.
        """
        metadata = self._decode.metadata(slots, positions, self.cache, reach or self.cache.capacity)
        return self.model.run(self._decode, tokens, metadata, self.cache, None)

    def advance(self, inputs: Tensor, last: Tensor, reach: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """`decode` of [tokens, slots, positions]: this rank's logits, and what `likeliest` gives. `inputs` and `last`
        become those of the next step.
        """
        tokens, slots, positions = inputs
        logits = self.decode(tokens, slots, positions, reach)
        return logits, *likeliest(self.model, self.launch, logits, tokens, positions, slots, last)

    def prefill(
        self, tokens: Tensor, counts: Sequence[int], slots: Sequence[int], last: Tensor, decoded: int = 0
    ) -> Tensor:
        """`counts[i]` tokens each that follow what `slots[i]` holds, one after the other in `tokens` [rows]: logits of
        the rows `last`, [last, block]. The first `decoded` sequences are being decoded: a token each.
        """
        metadata = PrefillMetadata.of(counts, self.cache, slots, self.model.config, self.model.ropes, decoded)
        return self.prefill_of(tokens, metadata, last)

    def prefill_of(self, tokens: Tensor, metadata: PrefillMetadata, last: Tensor) -> Tensor:
        """`prefill` by its metadata. It can be captured in a CUDA graph where that has tiles in place of prompts."""
        # without cuDNN, which plans attention for every new length, and takes some 50 ms for that
        with sdpa_kernel(ATTENTION) if tokens.is_cuda else nullcontext():
            return self.model.run(self._prefill, tokens, metadata, self.cache, last)


def likeliest(
    model: Decoder, launch: Launch, logits: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """The greedy choice from every rank's logits, -1 where they are not finite, see `choose`; and every argmax."""
    head = model.lm_head
    best = model.comm.all_gather(launch.argmax(logits, head.start, head.count))
    return launch.choose(best, tokens, positions, slots, last), best
