"""How a forward pass is computed: by the decoder's own layers, by kernels, or by a CUDA graph of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from ladder.engine.forward import Forward, Schedule
from ladder.engine.graphs import LONGEST, Decoded, Graphs
from ladder.engine.scheduler import ScheduledBatch
from ladder.errors import LadderError
from ladder.kernels.launch import Launch
from ladder.kernels.table import MOST
from ladder.model import Decoder


class Passes:
    """A model's passes over a cache of its own, which grows with the longest request."""

    def __init__(self, model: Decoder, slots: int, launch: Launch | None = None, graphs: bool = False) -> None:
        """With `launch` the passes are the kernels'; with `graphs` decoding steps are replayed from CUDA graphs, which
        the model's communicator must allow.
        """
        self._model = model
        self._slots = slots
        self._with_graphs = graphs
        # one slot more, for what fills up a graph's batch
        self.cache = model.new_cache(slots + graphs, min(256, model.config.context))
        self._forward = None if launch is None else Forward(model, self.cache, launch)
        self._graphs: Graphs | None = None
        self._chosen: dict[int, Schedule] = {}  # the fastest schedules, by the size of a batch

    def can_go_on(self, slots: Sequence[int]) -> bool:
        """Whether `next_step` can follow a decode step of `slots`, which `cache` already counts."""
        room = all(self.cache.lengths[slot] < self.cache.capacity for slot in slots)
        return self._graphs is not None and room

    def next_step(self, count: int) -> Decoded:
        """The step after a decode step of `count` sequences, begun before that one's tokens are known here."""
        assert self._graphs is not None
        with self._on_device():
            return self._graphs.next_step(count)

    def compute(self, work: ScheduledBatch) -> tuple[Tensor, Decoded | None]:
        """This rank's logits of every sequence's last token, [sequences, block]; for a decode step by kernels also
        the likeliest tokens.
        """
        width = max(map(len, work.tokens))
        starts = [self.cache.lengths[slot] for slot in work.slots]
        alone = self._with_graphs and starts == [0] and width <= LONGEST
        self._make_room(Graphs.width(width) if alone else max(starts) + width)
        device = self.cache.keys[0].device
        with self._on_device():
            if self._forward is not None and width == 1 and len(work.sequences) <= MOST:
                return self._step(self._forward, work)
            if self._forward is not None and alone and self._forward.capturable:
                return self._captured(self._forward).prompt(work.tokens[0], work.slots[0]), None
            ids = torch.tensor([[*piece, *[0] * (width - len(piece))] for piece in work.tokens], device=device)
            last = torch.tensor([len(piece) - 1 for piece in work.tokens], device=device)
            if self._forward is not None:
                return self._forward.prefill(ids, last, work.slots), None
            return self._model(ids, self.cache, last, work.slots)[:, 0], None

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Kernels are launched on the current device."""
        device = self.cache.keys[0].device
        with torch.inference_mode(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield

    def _step(self, forward: Forward, work: ScheduledBatch) -> tuple[Tensor, Decoded]:
        tokens = [piece[0] for piece in work.tokens]
        positions = [self.cache.lengths[slot] for slot in work.slots]
        if not self._with_graphs:
            inputs = torch.tensor([tokens, work.slots, positions], device=self.cache.keys[0].device)
            logits, chosen = forward.advance(inputs)
            return logits, Decoded(logits, chosen.cpu())
        decoded = self._captured(forward).step(tokens, work.slots, positions)
        return decoded.logits, decoded

    def _captured(self, forward: Forward) -> Graphs:
        self._graphs = self._graphs or Graphs(forward, self._slots, chosen=self._chosen)
        return self._graphs

    def _make_room(self, positions: int) -> None:
        if positions <= self.cache.capacity:
            return
        capacity = 1 << (positions - 1).bit_length()
        self._graphs = None  # they have the old cache's addresses
        try:
            self.cache.grow(capacity)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):  # the CPU's word for it
                raise  # another fault of the GPU
            raise LadderError(
                f"no memory for a cache of {self._slots} requests of {capacity} tokens: "
                "lower --max-num-seqs or --max-new-tokens"
            ) from None
