"""Before a run: the endpoint's model, whether it takes token ids, how it counts words; and the warm-up."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ladder.client.endpoint import EndpointError
from ladder.load.arrivals import Arrivals
from ladder.load.exchange import Exchanger, Outcome
from ladder.load.options import LoadOptions
from ladder.load.run import run
from ladder.load.workload import Bodies, Planned, WordRate

logger = logging.getLogger(__name__)

NOT_UNDERSTOOD = ("status 400", "status 422")  # how endpoints refuse prompts that are token ids
PROBE = 4  # token ids
FEW, MANY = 8, 72  # words
WARM_UP_AT_ONCE = 16


@dataclass(frozen=True)
class Prepared:
    """The model's name, and each request's body."""

    model: str
    prompt_kind: str  # of made-up prompts
    bodies: Sequence[bytes]


async def prepare(exchanger: Exchanger, options: LoadOptions, planned: Sequence[Planned]) -> Prepared:
    """Everything that is sent before the clock starts. An endpoint that fails here costs one sentence."""
    model = options.model or exchanger.endpoint.model(await exchanger.get("/models"))
    ids, rate = options.prompt_kind == "tokens", WordRate()
    if any(one.prompt is None and one.messages is None for one in planned):
        if options.prompt_kind == "auto" and options.api == "completions":
            ids = await _takes_ids(exchanger, options, model)
        if not ids:
            rate = await _word_rate(exchanger, options, model)
    kind = "tokens" if ids else "words"
    bodies = Bodies(options, model, ids, rate)
    if options.warm_up:
        warm = [bodies.body(planned[n % len(planned)], -1 - n) for n in range(options.warm_up)]
        made = await run(exchanger, warm, Arrivals(concurrency=WARM_UP_AT_ONCE), options.seed, lambda _run, _one: None)
        if made.interrupted:
            raise KeyboardInterrupt
        for outcome in made.outcomes:
            _check(outcome)
    return Prepared(model, kind, bodies.all(planned))


async def _takes_ids(exchanger: Exchanger, options: LoadOptions, model: str) -> bool:
    outcome = await exchanger.exchange(Bodies(options, model, True, WordRate()).body(Planned(1, PROBE), -1))
    if outcome.error in NOT_UNDERSTOOD:
        logger.warning("prompts are words: %s takes no token ids (%s)", exchanger.endpoint.base, outcome.detail)
        return False
    _check(outcome)
    return True


async def _word_rate(exchanger: Exchanger, options: LoadOptions, model: str) -> WordRate:
    """Tokens for each word, by the endpoint's usage of two prompts; one each where it sends none."""
    bodies = Bodies(options, model, False, WordRate())
    few, many = [await exchanger.exchange(bodies.body(Planned(1, words), -1)) for words in (FEW, MANY)]
    for outcome in (few, many):
        _check(outcome)
    if few.prompt_tokens is None or many.prompt_tokens is None or many.prompt_tokens <= few.prompt_tokens:
        return WordRate()
    each = (many.prompt_tokens - few.prompt_tokens) / (MANY - FEW)
    return WordRate(few.prompt_tokens - each * FEW, each)


def _check(outcome: Outcome) -> None:
    if outcome.error is not None:
        raise EndpointError(outcome.error, outcome.detail)
