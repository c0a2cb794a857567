"""How a forward pass is computed: by the decoder's own layers, by kernels, or by a CUDA graph of them; and how the next
tokens are chosen from it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ladder.comm.signalled import Signalled
from ladder.devices import upload
from ladder.engine.forward import Forward, likeliest
from ladder.engine.graphs.prompts import PromptGraphs, sizes
from ladder.engine.graphs.steps import Graphs
from ladder.engine.sampling import Chosen, Sampler
from ladder.engine.scheduler import RunningSequence, ScheduledBatch
from ladder.kernels.launch import Launch, References
from ladder.kernels.table import MOST
from ladder.layers.cache import SPARE, PrefillMetadata
from ladder.layers.ops import Plain
from ladder.model import Decoder


class Passes:
    """A model's passes over a cache of its own."""

    def __init__(
        self,
        model: Decoder,
        slots: int,
        blocks: int,
        launch: Launch | None = None,
        graphs: bool = False,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """With `launch` the passes are the kernels'; with `graphs` decoding steps are replayed from CUDA graphs, which
        the model's communicator must allow. The cache has `blocks` blocks, and the model's dtype where none is given.
        """
        config = model.config
        self._model = model
        self._launch: Launch = launch or References()
        self._slots = slots
        # one slot more, for what fills up a graph's batch
        self.cache = model.new_cache(slots + 1, config.context, blocks, cache_dtype)
        device = self.cache.keys[0].device
        self._sampler = Sampler(slots + 1, config.vocab, config.eos, device, self._launch, model.comm.size)
        self._forward = None if launch is None else Forward(model, self.cache, launch)
        self._graphs: Graphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        if graphs:
            assert self._forward is not None
            self._graphs = Graphs(self._forward, slots, last=self._sampler.last)
            self.prompt_graphs = PromptGraphs(self._forward, slots, self._sampler.last)
        # kernels that poll flags: nothing may have to be loaded while they run, see `Flagged.for_kernel`
        self.polls = isinstance(model.comm, Signalled)

    @property
    def joins(self) -> bool:
        """Whether a decode batch is computed in the same pass as prompts: a GPU reads the weights once for both."""
        return self._graphs is not None

    @property
    def asynchronous(self) -> bool:
        """Whether passes are computed while this process goes on."""
        return self._graphs is not None

    def capture(self, rows: int) -> None:
        """Passes with prompts of up to so many rows become graphs before they are needed."""
        graphs, forward = self.prompt_graphs, self._forward
        if graphs is not None and forward is not None and forward.capturable:
            with self._on_device():
                for size in sizes(rows, self._slots):
                    graphs.captured(size)

    def begin(self, sequence: RunningSequence) -> None:
        """A sequence has got a slot."""
        with self._on_device():
            self.cache.tables[sequence.slot] = SPARE  # what fills up its pieces of a prompt is written there
            self._sampler.begin(sequence)

    def move(self, sequences: Sequence[RunningSequence]) -> None:
        """The blocks of these sequences have changed."""
        tables = self.cache.tables
        slots = [each.slot for each in sequences for _ in each.blocks]
        columns = [number for each in sequences for number in range(len(each.blocks))]
        blocks = [block for each in sequences for block in each.blocks]
        with self._on_device():
            rows = self._given([slots, columns, blocks])
            tables.index_put_((rows[0], rows[1]), rows[2].int())

    def erase(self, blocks: Sequence[int]) -> None:
        """What these blocks hold may not be finite."""
        with self._on_device():
            self.cache.erase(blocks)

    def compute(self, work: ScheduledBatch) -> Chosen:
        """The next token of every sequence, perhaps later; where a prompt has not been read to its end, nothing."""
        with self._on_device():
            for slot, start in zip(work.slots, work.starts, strict=True):
                self.cache.lengths[slot] = start
            return self._prefill(work) if work.tokens else self._decode(work)

    def _decode(self, work: ScheduledBatch) -> Chosen:
        if self._graphs is not None:
            step = self._graphs.step(work.sequences, work.slots, work.starts)
            return self._choose(step.logits, work.sequences, step.inputs, step.chosen, step.best)
        slots, positions = self._given([work.slots, work.starts])
        inputs = torch.stack([self._sampler.last[slots], slots, positions])
        if self._forward is not None and len(slots) <= MOST:
            logits, chosen, best = self._forward.advance(inputs, self._sampler.last)
            return self._choose(logits, work.sequences, inputs, chosen, best)
        return self._choose(
            self._logits(inputs[0], work, torch.arange(len(slots), device=slots.device)), work.sequences, inputs
        )

    def _prefill(self, work: ScheduledBatch) -> Chosen:
        counts = self._counts(work)
        ends = list(accumulate(counts))
        answered = set(work.answered)
        ended = [number for number, each in enumerate(work.sequences) if each in answered]
        newest = [work.starts[number] + counts[number] - 1 for number in ended]
        inputs = self._given([[0] * len(ended), [work.slots[number] for number in ended], newest])
        rows = [ends[number] - 1 for number in ended]
        graphs = self.prompt_graphs
        if graphs is not None and (graph := graphs.find(counts, work.starts, work.decoded)) is not None:
            logits = graph.replay(work.tokens, work.slots, work.starts, work.decoded, rows)
        else:
            ids = self._given([token for piece in work.tokens for token in piece])
            if work.decoded:
                ids = torch.cat([self._sampler.last[inputs[1, : work.decoded]], ids])
            logits = self._logits(ids, work, self._given(rows))
        return self._choose(logits, work.answered, inputs)

    def _logits(self, ids: Tensor, work: ScheduledBatch, last: Tensor) -> Tensor:
        counts = self._counts(work)
        if self._forward is not None:
            return self._forward.prefill(ids, counts, work.slots, last, work.decoded)
        metadata = PrefillMetadata.of(counts, self.cache, work.slots, self._model.config, self._model.ropes)
        return self._model.run(Plain(), ids, metadata, self.cache, last)

    @staticmethod
    def _counts(work: ScheduledBatch) -> list[int]:
        """Rows of each sequence."""
        return [len(piece) or 1 for piece in work.tokens] or [1] * len(work.sequences)

    def _given(self, values: Sequence[Any]) -> Tensor:
        """On the cache's device, without waiting for what that computes."""
        return upload(torch.tensor(values, dtype=torch.long), self.cache.keys[0].device)

    def _choose(
        self,
        logits: Tensor,
        sequences: Sequence[RunningSequence],
        inputs: Tensor,
        chosen: Tensor | None = None,
        best: Tensor | None = None,
    ) -> Chosen:
        """`chosen` and `best`: the likeliest tokens of all ranks and of each, where they are known and `inputs` are
        those of the next step already.
        """
        tokens, slots, positions = inputs
        if not sequences:
            return Chosen(torch.empty(0, dtype=torch.long), None)
        if chosen is None or best is None:
            chosen, best = likeliest(self._model, self._launch, logits, tokens, positions, slots, self._sampler.last)
        if self._sampler.exchanges(sequences):
            self._sampler.draw(self._model, logits, best, slots, positions, tokens, chosen)
        rows = self._sampler.gathers(sequences)
        logprobs = self._redo(rows, logits, sequences, inputs, chosen) if rows else None
        if not chosen.is_cuda:
            return Chosen(chosen.clone(), logprobs, rows)
        host = _to_host(chosen)
        copies = None if logprobs is None else tuple(map(_to_host, logprobs))
        done = torch.cuda.current_stream(chosen.device).record_event()
        return Chosen(host, copies, rows, done)  # type: ignore[arg-type]

    def _redo(
        self, rows: Sequence[int], logits: Tensor, sequences: Sequence[RunningSequence], inputs: Tensor, chosen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """`Sampler.redo` for the sequences with these numbers, whose logits alone are gathered."""
        gather, redo = self._model.comm.all_gather, self._sampler.redo
        if len(rows) == len(sequences):
            tokens, slots, positions = inputs
            return redo(gather(logits).float(), sequences, slots, positions, tokens, chosen)
        index = self._given(rows)
        (tokens, slots, positions), own = inputs[:, index], chosen[index]
        logprobs = redo(gather(logits[index]).float(), [sequences[row] for row in rows], slots, positions, tokens, own)
        inputs[0].index_copy_(0, index, tokens)
        chosen.index_copy_(0, index, own)
        return logprobs

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Kernels are launched on the current device."""
        device = self.cache.keys[0].device
        with torch.inference_mode(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield


def _to_host(x: Tensor) -> Tensor:
    """The values of a tensor once what has been launched so far is complete."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
