"""One rank's engine: its shard, its cache, and a scheduler that comes to the same ends as every other rank's."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ladder.engine.passes import Passes
from ladder.engine.sampling import Sampler, likeliest
from ladder.engine.scheduler import Job, Pass, Scheduler, finish_reason
from ladder.kernels.launch import Launch
from ladder.model import Decoder


@dataclass(frozen=True)
class Add:
    """A job joins."""

    job: Job


@dataclass(frozen=True)
class Drop:
    """A job leaves before its end."""

    id: int


@dataclass(frozen=True)
class Stop:
    """No more steps."""


Command = Add | Drop | Stop


@dataclass(frozen=True)
class Token:
    """A job's next token; `finish_reason` comes with its last. None: there is none, the logits were not finite."""

    id: int
    token: int | None
    finish_reason: str | None


class Core:
    """Steps through the jobs under way. All ranks are told the same commands before the same steps."""

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

    def tell(self, commands: Iterable[Command]) -> None:
        """Take commands, in the order they were given."""
        for command in commands:
            match command:
                case Add(job):
                    self._scheduler.add(job)
                case Drop(id):
                    self._scheduler.drop(id)
                    self._samplers.pop(id, None)
                case Stop():
                    self.stopped = True

    def step(self) -> list[Token]:
        """Admit who can be admitted, continue every job by a token, read a piece of the prompts that wait."""
        for line in self._scheduler.admit():
            self._cache.clear(line.slot)
            self._samplers[line.job.id] = Sampler(line.job.params)
        # both passes are chosen before either is computed: a prompt that ends here is continued from the next step on
        passes = [self._scheduler.continuing(), self._scheduler.beginning()]
        return [token for work in passes if work is not None for token in self._compute(work)]

    def _compute(self, work: Pass) -> list[Token]:
        block, best = self._passes.compute(work)
        choices: list[int | None] | None = None
        scores: Sequence[Tensor] = ()
        if best is not None and all(line.job.params.temperature == 0 for line in work.lines):
            choices = likeliest(best.cpu())
        else:
            scores = list(self._model.comm.all_gather(block)[:, : self._model.config.vocab].float().cpu())
        self._cache.advance([len(piece) for piece in work.tokens], work.slots)
        tokens = []
        for number, line in enumerate(work.lines):
            if not line.new and line.fed < len(line.job.tokens):
                continue  # in the middle of its prompt
            id = line.job.id
            token = self._samplers[id].choose(scores[number]) if choices is None else choices[number]
            if token is not None:
                line.new.append(token)
            reason = "error" if token is None else finish_reason(line, self._model.config.eos)
            tokens.append(Token(id, token, reason))
            if reason is not None:
                self.tell([Drop(id)])
        return tokens
