"""One rank's model runner: its shard, its KV cache, and its scheduler, which decides as on every other rank."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from ladder.engine.blocks import BlockPool
from ladder.engine.graphs.steps import buckets
from ladder.engine.options import SamplingParams
from ladder.engine.passes import Passes
from ladder.engine.requests import TokenLogprobs
from ladder.engine.sampling import Chosen
from ladder.engine.scheduler import RunningSequence, ScheduledBatch, Scheduler, SequenceSpec, finish_reason
from ladder.kernels.launch import Launch
from ladder.layers.cache import BLOCK, RESERVED
from ladder.model import Decoder

logger = logging.getLogger(__name__)
SHORT, TRIED = 20, 6  # tokens of the prompts and outputs of a warm-up


@dataclass(frozen=True)
class AddSequence:
    """Start a sequence."""

    spec: SequenceSpec


@dataclass(frozen=True)
class AbortSequence:
    """End a sequence early."""

    id: int


@dataclass(frozen=True)
class ReadLong:
    """The next step reads a piece of a long prompt, though others are decoded."""


@dataclass(frozen=True)
class Shutdown:
    """No more steps."""


Command = AddSequence | AbortSequence | ReadLong | Shutdown


@dataclass(frozen=True)
class NewToken:
    """A sequence's next token; `finish_reason` is set with its last. The token is None where the logits were not
    finite.
    """

    id: int
    token: int | None
    finish_reason: str | None
    logprobs: TokenLogprobs | None = None  # where the request asks for them


class ModelRunner:
    """Runs the scheduled steps. All ranks apply the same commands before the same steps."""

    def __init__(
        self,
        model: Decoder,
        slots: int,
        chunk: int,
        launch: Launch | None = None,
        graphs: bool = False,
        blocks: int | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """`launch`, `graphs` and `cache_dtype`: see `Passes`. `blocks`: of the cache, the reserved ones too; none: as
        many as all slots can use.
        """
        if blocks is None:
            blocks = RESERVED + slots * -(-model.config.context // BLOCK)
        self._eos, self._vocab, self._context = model.config.eos, model.config.vocab, model.config.context
        self._scheduler = Scheduler(slots, chunk, BlockPool(blocks))
        self._passes = Passes(model, slots, blocks, launch, graphs, cache_dtype)
        self._ahead: list[tuple[ScheduledBatch, Chosen]] = []  # passes of the last step whose tokens were not read yet
        self._reads_long = False
        self.read_long = False  # whether the last step read a piece of a long prompt
        self.stopped = False

    @property
    def holds_back(self) -> bool:
        """Whether a long prompt waits for `ReadLong`."""
        return self._scheduler.holds_back

    @property
    def busy(self) -> bool:
        return self._scheduler.busy or bool(self._ahead)

    @property
    def free_slots(self) -> int:
        return len(self._scheduler.free)

    @property
    def room(self) -> int:
        """Tokens that the cache has room for."""
        return self._scheduler.blocks.count * BLOCK

    def warm_up(self) -> list[int]:
        """Compile and capture what short sequences need, by such requests in batches of every size, which are returned.
        All ranks do it at the same time.
        """
        most = min(self.room, self._context) - TRIED
        if not self._passes.asynchronous or most < SHORT:
            return []
        self._passes.capture(self._scheduler.chunk + len(self._scheduler.free))
        sizes = buckets(len(self._scheduler.free))
        for size in sizes:
            self._try(size, SHORT)
        return sizes

    def _try(self, count: int, length: int) -> None:
        """So many requests of all kinds, each with a prompt of its own. Half of them come while the others are decoded,
        and the last one while all of them are: attention has a configuration for every number of decoded sequences.
        """
        greedy = SamplingParams(TRIED, ignore_eos=True)
        drawn = replace(greedy, temperature=1.0, seed=0)
        kinds = (greedy, drawn, replace(drawn, top_k=20, top_p=0.9))
        for first in range(len(kinds) if count < len(kinds) else 1):
            for id in range(count):
                if id in (count // 2, count - 1) and id > 0:
                    self.step()  # reads the prompts that have come
                    self.step()
                tokens = tuple((first + length + id + number) % self._vocab for number in range(length))
                self._scheduler.add(SequenceSpec(id, tokens, TRIED, kinds[(first + id) % len(kinds)]))
            while self.busy:
                self.step()

    def apply(self, commands: Iterable[Command]) -> None:
        """Carry out commands, in order."""
        for command in commands:
            match command:
                case AddSequence(spec):
                    self._scheduler.add(spec)
                case AbortSequence(id):
                    self._scheduler.drop(id)
                case ReadLong():
                    self._reads_long = True
                case Shutdown():
                    self.stopped = True

    def step(self) -> list[NewToken]:
        """Admit waiting sequences, decode one token of every running one, prefill a chunk of the unread prompts. Where
        passes are asynchronous, the tokens are those of the step before: this one's are computed meanwhile.
        """
        tokens: list[NewToken] = []
        scheduler = self._scheduler
        if scheduler.lacks_blocks():
            tokens += self._take()  # who is preempted must know all its tokens
            while scheduler.lacks_blocks():
                preempted = scheduler.preempt()
                logger.info("sequence %d waits: the KV cache is full", preempted.spec.id)
        for sequence in scheduler.admit():
            self._passes.begin(sequence)
        # both batches are chosen before either is computed: a prompt that ends here is decoded from the next step on
        decoded = scheduler.decode_batch()
        batches = [decoded, prompts := scheduler.prefill_batch(self._reads_long, alone=decoded is None)]
        self._reads_long, self.read_long = False, prompts is not None and prompts.long
        if scheduler.moved:
            self._passes.move(list(scheduler.moved.values()))
            scheduler.moved.clear()
        if prompts is not None and decoded is not None and self._passes.joins:
            batches = [prompts.joined(decoded)]
        launched: list[tuple[ScheduledBatch, Chosen]] = []
        for batch in batches:
            if batch is not None:
                if batch.tokens and self._passes.polls:
                    tokens += self._take()
                    for _, earlier in launched:
                        earlier.wait()
                launched.append((batch, self._passes.compute(batch)))
        if self._passes.asynchronous:
            tokens += self._take()
            self._ahead = launched
        else:
            self._ahead = launched
            tokens += self._take()
        return tokens

    def _take(self) -> list[NewToken]:
        """The tokens of the passes that were launched before."""
        ahead, self._ahead = self._ahead, []
        return [token for batch, chosen in ahead for token in self._read(batch, chosen)]

    def _read(self, batch: ScheduledBatch, chosen: Chosen) -> Iterator[NewToken]:
        sequences = batch.answered
        for number, (sequence, token) in enumerate(zip(sequences, chosen.tokens(), strict=True)):
            id, params = sequence.spec.id, sequence.spec.params
            if self._scheduler.running.get(id) is not sequence:
                continue  # it has ended since
            sequence.pending -= 1
            if token is None:
                self._spoil(sequence)
                yield NewToken(id, None, "error")
            else:
                sequence.new.append(token)
                logprobs = None if params.logprobs is None else chosen.logprobs(number, token, params.logprobs)
                reason = finish_reason(sequence, self._eos)
                yield NewToken(id, token, reason, logprobs)
                if reason is not None:
                    self._scheduler.drop(id)

    def _spoil(self, sequence: RunningSequence) -> None:
        """End a sequence whose logits are not finite: its keys and values may not be, either."""
        self._passes.erase(self._scheduler.blocks.spoil(sequence.blocks))
        self._scheduler.drop(sequence.spec.id)
