"""Sampling: what is known of every slot's sequence on the device, and how its next token is chosen there."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ladder.engine.options import SamplingParams
from ladder.engine.requests import TokenLogprobs
from ladder.engine.scheduler import RunningSequence
from ladder.kernels.launch import Kernels, Launch
from ladder.kernels.sampling.adjust import ENDS, ONCE, PROMPT
from ladder.kernels.sampling.sample import ARGMAX, CANDIDATES, COLUMNS, DRAW, SKIP, Scratch
from ladder.model import Decoder

COLDEST = 1e-20  # a temperature that is still a number when something is divided by it


@dataclass(frozen=True)
class Chosen:
    """The next tokens of a pass, perhaps not computed yet. The tensors are on the host."""

    _tokens: Tensor  # [sequences]; -1: its logits are not finite
    _logprobs: tuple[Tensor, Tensor, Tensor] | None  # of the tokens; of the likeliest, and which these are
    _rows: Sequence[int] = ()  # the numbers of the sequences that these log-probabilities are of
    _done: torch.cuda.Event | None = None

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()

    def tokens(self) -> list[int | None]:
        """None where the logits are not finite."""
        self.wait()
        return [None if token < 0 else token for token in self._tokens.tolist()]

    def logprobs(self, number: int, token: int, count: int) -> TokenLogprobs:
        """Of sequence `number`, which asks for `count` of the likeliest."""
        assert self._logprobs is not None
        own, top, ids = self._logprobs
        row = self._rows.index(number)
        likeliest = zip(ids[row, :count].tolist(), top[row, :count].tolist(), strict=True)
        return TokenLogprobs(token, float(own[row]), tuple(likeliest))


class Sampler:
    """The sampling parameters and newest tokens of `slots` slots, on the device."""

    def __init__(
        self, slots: int, vocab: int, eos: Sequence[int], device: torch.device, launch: Launch, ranks: int = 1
    ) -> None:
        self._vocab = vocab
        self._ranks = ranks
        self._eos = eos
        self._launch = launch
        self._device = device
        self.last = torch.zeros(slots, dtype=torch.long, device=device)  # the newest tokens
        self._params = torch.zeros(slots, COLUMNS, device=device)
        self._numbers = torch.zeros(2, slots, dtype=torch.long, device=device)  # seeds; positions up to which none ends
        self._known: Tensor | None = None  # [slots, vocab] int32, see `adjust`; made when a request needs it
        self._bias: Tensor | None = None
        self._scratch = Scratch.of(slots, vocab, device) if isinstance(launch, Kernels) else None

    def begin(self, sequence: RunningSequence) -> None:
        """A sequence has got a slot."""
        slot, params = sequence.slot, sequence.spec.params
        until = len(sequence.spec.tokens) + params.min_tokens
        self._params[slot] = torch.tensor([self._mode(params), *_columns(params)]).to(self._device, non_blocking=True)
        numbers = torch.tensor([params.seed or 0, until if params.min_tokens else 0])
        self._numbers[:, slot] = numbers.to(self._device, non_blocking=True)
        if params.adjusts:
            self._begin_adjusting(sequence)
        elif self._bias is not None:
            self._bias[slot] = 0

    def _begin_adjusting(self, sequence: RunningSequence) -> None:
        slot, params, shape = sequence.slot, sequence.spec.params, (len(self.last), self._vocab)
        if self._known is None:
            self._known = torch.zeros(shape, dtype=torch.int32, device=self._device)
        new = torch.tensor(sequence.new, dtype=torch.long)
        known = torch.bincount(new, minlength=self._vocab).int() * ONCE
        known[torch.tensor(sequence.spec.tokens).unique()] |= PROMPT
        ends = [*params.stop_token_ids, *(() if params.ignore_eos else self._eos)]
        known[torch.tensor(ends, dtype=torch.long)] |= ENDS
        self._known[slot] = known.to(self._device, non_blocking=True)
        if params.logit_bias and self._bias is None:
            self._bias = torch.zeros(shape, device=self._device)
        if self._bias is not None:
            bias = torch.zeros(self._vocab)
            for token, value in params.logit_bias:
                bias[token] += value
            self._bias[slot] = bias.to(self._device, non_blocking=True)

    def _mode(self, params: SamplingParams) -> int:
        """It depends on nothing but the request: others of its batch change no result."""
        if params.greedy:
            return SKIP
        if params.temperature == 0:
            return ARGMAX
        whole = params.top_k or params.top_p < 1 or params.adjusts or params.logprobs is not None
        return DRAW if whole or self._ranks == 1 else CANDIDATES

    def exchanges(self, sequences: Sequence[RunningSequence]) -> bool:
        """Whether for one of these sequences the ranks exchange candidates."""
        return any(self._mode(each.spec.params) == CANDIDATES for each in sequences)

    def gathers(self, sequences: Sequence[RunningSequence]) -> Sequence[int]:
        """The numbers of the sequences for which all ranks' logits are needed. A single rank has them: all or none."""
        params = enumerate(each.spec.params for each in sequences)
        rows = [n for n, each in params if self._mode(each) in (ARGMAX, DRAW) or each.logprobs is not None]
        return range(len(sequences)) if rows and self._ranks == 1 else rows

    def draw(
        self,
        model: Decoder,
        logits: Tensor,
        best: Tensor,
        slots: Tensor,
        positions: Tensor,
        tokens: Tensor,
        chosen: Tensor,
    ) -> None:
        """Choose again from every rank's candidates where these are enough. `logits` are this rank's, `best` every
        rank's argmax; for the others, see `redo`.
        """
        params, seeds, head = self._params, self._numbers[0], model.lm_head
        own = self._launch.candidates(logits, best, params, seeds, slots, positions, chosen, head.start, head.count)
        self._launch.choose_candidate(model.comm.all_gather(own), params, slots, chosen, tokens, self.last)

    def redo(
        self,
        logits: Tensor,
        sequences: Sequence[RunningSequence],
        slots: Tensor,
        positions: Tensor,
        tokens: Tensor,
        chosen: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Choose again where the likeliest token is not what a sequence wants: `tokens`, `chosen` [sequences] and
        `last` have been filled with it. `logits` [sequences, all ranks'] are float32; `positions`: the new tokens'.
        Returns the log-probabilities, if a sequence asks for them.
        """
        params = [each.spec.params for each in sequences]
        if any(not each.greedy for each in params):
            seeds, until = self._numbers
            drawn, known = logits, self._known if any(each.adjusts for each in params) else None
            if known is not None:
                drawn = self._launch.adjust(
                    logits, self._params, known, self._bias, until, slots, positions, self._vocab
                )
            searches = any(each.top_k for each in params), any(each.top_p < 1 for each in params)
            self._launch.sample(
                drawn, self._params, seeds, slots, positions, chosen, tokens, self.last, self._scratch, self._vocab,
                searches,
            )  # fmt: skip
            if known is not None:
                self._launch.note(known, slots, chosen)
        wanted = [each.logprobs for each in params if each.logprobs is not None]
        return _logprobs(logits[:, : self._vocab], chosen, max(1, *wanted)) if wanted else None


def _logprobs(logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the chosen tokens; of the `count` likeliest, and which these are."""
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, chosen.clamp(min=0).unsqueeze(1)) - total
    top, ids = logits.topk(count, dim=-1)
    return own[:, 0], top - total, ids


def _columns(params: SamplingParams) -> list[float]:
    filters = (max(params.temperature, COLDEST), params.top_k, params.top_p, params.min_p)
    return [*filters, params.repetition_penalty, params.presence_penalty, params.frequency_penalty]
