"""One rank's engine: its shard, its cache, and a scheduler that comes to the same ends as every other rank's."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ladder.engine.sampling import Sampler
from ladder.engine.scheduler import Job, Pass, Scheduler, finish_reason
from ladder.errors import LadderError
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

    def __init__(self, model: Decoder, slots: int, chunk: int) -> None:
        self._model = model
        self._scheduler = Scheduler(slots, chunk)
        self._samplers: dict[int, Sampler] = {}
        self._cache = model.new_cache(slots, min(256, model.config.context))
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
        width = max(map(len, work.tokens))
        self._make_room(max(self._cache.lengths[slot] for slot in work.slots) + width)
        device = self._cache.keys[0].device
        ids = torch.tensor([[*piece, *[0] * (width - len(piece))] for piece in work.tokens], device=device)
        last = torch.tensor([len(piece) - 1 for piece in work.tokens], device=device)
        with torch.inference_mode():
            block = self._model(ids, self._cache, last, work.slots)
            logits = self._model.comm.all_gather(block)[:, 0, : self._model.config.vocab].float().cpu()
        self._cache.advance([len(piece) for piece in work.tokens], work.slots)
        tokens = []
        for line, scores in zip(work.lines, logits, strict=True):
            if not line.new and line.fed < len(line.job.tokens):
                continue  # in the middle of its prompt
            id = line.job.id
            token = self._samplers[id].choose(scores)
            if token is not None:
                line.new.append(token)
            reason = "error" if token is None else finish_reason(line, self._model.config.eos)
            tokens.append(Token(id, token, reason))
            if reason is not None:
                self.tell([Drop(id)])
        return tokens

    def _make_room(self, positions: int) -> None:
        if positions > self._cache.capacity:
            capacity = 1 << (positions - 1).bit_length()
            try:
                self._cache.grow(capacity)
            except RuntimeError:  # torch's word for no memory, on the CPU and on the GPU
                slots = len(self._cache.lengths)
                raise LadderError(
                    f"no memory for a cache of {slots} requests of {capacity} tokens: lower --batch or --max-new-tokens"
                ) from None
