"""One rank's model runner: its shard, its KV cache, and its scheduler, which decides as on every other rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ladder.engine.graphs import Decoded
from ladder.engine.passes import Passes
from ladder.engine.requests import TokenLogprobs
from ladder.engine.sampling import Sampler
from ladder.engine.scheduler import RunningSequence, ScheduledBatch, Scheduler, SequenceSpec, finish_reason
from ladder.kernels.launch import Launch
from ladder.model import Decoder


@dataclass(frozen=True)
class AddSequence:
    """Start a sequence."""

    spec: SequenceSpec


@dataclass(frozen=True)
class AbortSequence:
    """End a sequence early."""

    id: int


@dataclass(frozen=True)
class Shutdown:
    """No more steps."""


Command = AddSequence | AbortSequence | Shutdown


@dataclass(frozen=True)
class NewToken:
    """A sequence's next token; `finish_reason` is set with its last. The token is None where the logits were not
    finite.
    """

    id: int
    token: int | None
    finish_reason: str | None
    logprobs: TokenLogprobs | None = None  # where the request asks for them


@dataclass(frozen=True)
class Launched:
    """A forward pass that has been begun."""

    sequences: tuple[RunningSequence, ...]
    logits: Tensor  # this rank's
    decoded: Decoded | None  # None: there are only logits


class ModelRunner:
    """Runs the scheduled steps. All ranks apply the same commands before the same steps."""

    def __init__(
        self, model: Decoder, slots: int, chunk: int, launch: Launch | None = None, graphs: bool = False
    ) -> None:
        """`launch` and `graphs`: see `Passes`."""
        self._model = model
        self._scheduler = Scheduler(slots, chunk)
        self._samplers: dict[int, Sampler] = {}
        self._passes = Passes(model, slots, launch, graphs)
        self._cache = self._passes.cache
        self._ahead: Launched | None = None  # a decode step that was begun before the last one's tokens were read
        self.stopped = False

    @property
    def busy(self) -> bool:
        return self._scheduler.busy

    @property
    def free_slots(self) -> int:
        return len(self._scheduler.free)

    def apply(self, commands: Iterable[Command]) -> None:
        """Carry out commands, in order."""
        for command in commands:
            match command:
                case AddSequence(spec):
                    self._scheduler.add(spec)
                case AbortSequence(id):
                    self._scheduler.drop(id)
                    self._samplers.pop(id, None)
                case Shutdown():
                    self.stopped = True

    def step(self) -> list[NewToken]:
        """Admit waiting sequences, decode one token of every running one, prefill a chunk of the unread prompts."""
        for sequence in self._scheduler.admit():
            if self._ahead is not None and self._ahead.decoded is not None:
                self._ahead.decoded.wait()  # before anything else is launched
            self._cache.clear(sequence.slot)
            self._samplers[sequence.spec.id] = Sampler(sequence.spec.params)
        # both batches are chosen before either is computed: a prompt that ends here is decoded from the next step on
        launched, self._ahead = self._ahead, None
        if launched is None and (decode := self._scheduler.decode_batch()) is not None:
            launched = self._launch(decode)
        prefill = self._scheduler.prefill_batch()
        tokens = []
        if launched is not None:
            if prefill is None and self._may_go_on(launched):
                self._ahead = self._go_on(launched)
            tokens += self._take(launched)
        if prefill is not None:
            tokens += self._take(self._launch(prefill))
        return tokens

    def _launch(self, batch: ScheduledBatch) -> "Launched":
        logits, decoded = self._passes.compute(batch)
        self._cache.advance([len(chunk) for chunk in batch.tokens], batch.slots)
        return Launched(batch.sequences, logits, decoded)

    def _may_go_on(self, launched: "Launched") -> bool:
        """Whether the next step is sure to be of the same sequences, but for those that end with an end-of-text token:
        their rows of it are lost.
        """
        running, sequences = self._scheduler.running, launched.sequences
        same = len(running) == len(sequences) and all(running.get(each.spec.id) is each for each in sequences)
        return (
            same
            and launched.decoded is not None
            and all(each.spec.params.temperature == 0 for each in sequences)
            and all(len(each.new) + 1 < each.spec.limit for each in sequences)
            and self._passes.can_go_on([each.slot for each in sequences])
        )

    def _go_on(self, launched: "Launched") -> "Launched":
        """The next step is given to the GPU before the CPU has looked at the tokens of this one."""
        sequences = launched.sequences
        decoded = self._passes.next_step(len(sequences))
        self._cache.advance([1] * len(sequences), [each.slot for each in sequences])
        return Launched(sequences, decoded.logits, decoded)

    def _take(self, launched: "Launched") -> list[NewToken]:
        choices: list[int | None] | None = None
        logits: Sequence[Tensor] = ()
        if launched.decoded is not None and all(each.spec.params.temperature == 0 for each in launched.sequences):
            choices = launched.decoded.tokens()
        else:
            if launched.decoded is not None:
                launched.decoded.wait()
            vocab = self._model.config.vocab
            logits = list(self._model.comm.all_gather(launched.logits)[:, :vocab].float().cpu())
        tokens = []
        for number, sequence in enumerate(launched.sequences):
            id = sequence.spec.id
            if self._scheduler.running.get(id) is not sequence:
                continue  # it has ended since
            if not sequence.new and sequence.prefilled < len(sequence.spec.tokens):
                continue  # in the middle of its prompt
            token = self._samplers[id].choose(logits[number]) if choices is None else choices[number]
            if token is not None:
                sequence.new.append(token)
            reason = "error" if token is None else finish_reason(sequence, self._model.config.eos)
            tokens.append(NewToken(id, token, reason))
            if reason is not None:
                self.apply([AbortSequence(id)])
        return tokens
