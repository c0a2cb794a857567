"""One rank's model runner: its shard, its KV cache, and its scheduler, which decides as on every other rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ladder.engine.passes import Passes
from ladder.engine.sampling import Sampler, likeliest
from ladder.engine.scheduler import ScheduledBatch, Scheduler, SequenceSpec, finish_reason
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
            self._cache.clear(sequence.slot)
            self._samplers[sequence.spec.id] = Sampler(sequence.spec.params)
        # both batches are chosen before either is computed: a prompt that ends here is decoded from the next step on
        batches = [self._scheduler.decode_batch(), self._scheduler.prefill_batch()]
        return [token for batch in batches if batch is not None for token in self._compute(batch)]

    def _compute(self, batch: ScheduledBatch) -> list[NewToken]:
        block, best = self._passes.compute(batch)
        choices: list[int | None] | None = None
        logits: Sequence[Tensor] = ()
        if best is not None and all(each.spec.params.temperature == 0 for each in batch.sequences):
            choices = likeliest(best.cpu())
        else:
            logits = list(self._model.comm.all_gather(block)[:, : self._model.config.vocab].float().cpu())
        self._cache.advance([len(chunk) for chunk in batch.tokens], batch.slots)
        tokens = []
        for number, sequence in enumerate(batch.sequences):
            if not sequence.new and sequence.prefilled < len(sequence.spec.tokens):
                continue  # in the middle of its prompt
            id = sequence.spec.id
            token = self._samplers[id].choose(logits[number]) if choices is None else choices[number]
            if token is not None:
                sequence.new.append(token)
            reason = "error" if token is None else finish_reason(sequence, self._model.config.eos)
            tokens.append(NewToken(id, token, reason))
            if reason is not None:
                self.apply([AbortSequence(id)])
        return tokens
