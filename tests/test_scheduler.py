"""The scheduler by itself, without torch: whoever comes and goes, no slot is shared or lost, nobody is forgotten."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from ladder.engine.options import SamplingParams
from ladder.engine.scheduler import ScheduledBatch, Scheduler, SequenceSpec, finish_reason

END = 7  # the token that ends a job early
PARAMS = SamplingParams()


@dataclass(frozen=True)
class Plan:
    """A job that is added before step `comes`, dropped before step `goes`, and ends itself at token `ends`."""

    comes: int
    length: int
    limit: int
    goes: int | None
    ends: int | None


PLANS = st.builds(
    Plan, st.integers(0, 30), st.integers(1, 50), st.integers(1, 8), st.none() | st.integers(0, 40),
    st.none() | st.integers(1, 8),
)  # fmt: skip


@dataclass
class History:
    """What became of the jobs, by id, and who got slots in which order."""

    pieces: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    new: dict[int, list[int]] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)
    finished: dict[int, str] = field(default_factory=dict)
    steps: int = 0
    passed_over: bool = False  # in the last step, the oldest of those who read


def prompt(id: int, length: int) -> tuple[int, ...]:
    """No two tokens of all prompts are the same."""
    return tuple(100 * id + 1000 + at for at in range(length))


def live(slots: int, chunk: int, plans: list[Plan]) -> History:
    """Carry out the plans as an engine would, and check every step."""
    scheduler, history = Scheduler(slots, chunk), History()
    here: set[int] = set()  # added, and neither finished nor dropped
    while history.steps <= max(plan.comes for plan in plans) or scheduler.busy:
        for id, plan in enumerate(plans):
            if plan.comes == history.steps:
                scheduler.add(SequenceSpec(id, prompt(id, plan.length), plan.limit, PARAMS))
                here.add(id)
            if plan.goes == history.steps:
                scheduler.drop(id)  # too early, in time, or too late
                here.discard(id)
                check_slots(scheduler, slots)
        step(scheduler, history, here, plans)
        check_slots(scheduler, slots)
        assert {job.id for job in scheduler.waiting} | scheduler.running.keys() == here
        history.steps += 1
        assert history.steps < 31 + sum(plan.length + plan.limit for plan in plans), "somebody starves"
    assert not here and scheduler.decode_batch() is None and scheduler.prefill_batch() is None
    assert sorted(scheduler.free) == list(range(slots))
    return history


def check_slots(scheduler: Scheduler, slots: int) -> None:
    used = [sequence.slot for sequence in scheduler.running.values()]
    assert sorted(used + scheduler.free) == list(range(slots))


def step(scheduler: Scheduler, history: History, here: set[int], plans: list[Plan]) -> None:
    for sequence in scheduler.admit():
        assert (sequence.prefilled, sequence.new) == (0, [])
        history.admitted.append(sequence.spec.id)
        history.pieces[sequence.spec.id], history.new[sequence.spec.id] = [], []
    assert not (scheduler.waiting and scheduler.free)
    reading = [sequence.spec.id for sequence in scheduler.running.values() if not sequence.new]
    going_on = {sequence.spec.id for sequence in scheduler.running.values() if sequence.new}
    fed = {sequence.spec.id: sequence.prefilled for sequence in scheduler.running.values()}
    later, first = scheduler.decode_batch(), scheduler.prefill_batch()
    # who has a token gets the next one in every step; of those who read, the oldest or the one of whom least was read
    assert {sequence.spec.id for sequence in (later.sequences if later else ())} == going_on
    assert bool(reading) == (first is not None)
    if first is not None:
        chosen = [sequence.spec.id for sequence in first.sequences]
        oldest_first = chosen == reading[: len(chosen)]
        assert oldest_first or chosen == sorted(reading, key=fed.__getitem__)[: len(chosen)]
        assert oldest_first or not history.passed_over, "the oldest was passed over twice"
        history.passed_over = not oldest_first
    if first is not None:
        assert len(first.sequences) * max(map(len, first.tokens)) <= scheduler.chunk
        for sequence, piece in zip(first.sequences, first.tokens, strict=True):
            history.pieces[sequence.spec.id].append(piece)
    for work in (later, first):
        if work is not None:
            answer(scheduler, history, here, plans, work)


def answer(scheduler: Scheduler, history: History, here: set[int], plans: list[Plan], work: ScheduledBatch) -> None:
    """A token for every sequence whose prompt has been read."""
    assert work.slots == [sequence.slot for sequence in work.sequences] and len(set(work.slots)) == len(work.slots)
    for sequence, tokens in zip(work.sequences, work.tokens, strict=True):
        id, own = sequence.spec.id, history.new[sequence.spec.id]
        if own:
            assert tokens == (own[-1],)
        elif sequence.prefilled < len(sequence.spec.tokens):
            continue
        own.append(END if len(own) + 1 == plans[id].ends else 10 + len(own))
        sequence.new.append(own[-1])
        if reason := finish_reason(sequence, (END,)):
            history.finished[id] = reason
            scheduler.drop(id)
            here.discard(id)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 5), st.integers(1, 16), st.lists(PLANS, min_size=1, max_size=20))
def test_whatever_comes_and_goes(slots: int, chunk: int, plans: list[Plan]) -> None:
    history = live(slots, chunk, plans)
    # who came first got a slot first
    assert history.admitted == sorted(history.admitted, key=lambda id: (plans[id].comes, id))
    assert len(set(history.admitted)) == len(history.admitted)
    for id, plan in enumerate(plans):
        cut = [prompt(id, plan.length)[at : at + chunk] for at in range(0, plan.length, chunk)]
        pieces, new = history.pieces.get(id, []), history.new.get(id, [])
        assert pieces == cut[: len(pieces)]  # in order, and as they would be alone
        if new:
            assert pieces == cut
        if plan.goes is None or id in history.finished:
            ends = plan.ends if plan.ends is not None and plan.ends <= plan.limit else None
            assert len(new) == (ends or plan.limit)
            assert history.finished[id] == ("stop" if ends else "length")


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 16), st.integers(1, 50), st.integers(1, 8))
def test_alone(chunk: int, length: int, limit: int) -> None:
    """A step per piece, then a step per token, the first of which comes with the last piece."""
    history = live(3, chunk, [Plan(0, length, limit, None, None)])
    assert history.steps == -(-length // chunk) + limit - 1


def test_short_prompts_share_a_pass() -> None:
    scheduler = Scheduler(slots=8, chunk=12)
    for id, length in enumerate((4, 3, 4, 1, 30, 2)):
        scheduler.add(SequenceSpec(id, prompt(id, length), 1, PARAMS))
    scheduler.admit()
    first = scheduler.prefill_batch()
    assert first is not None and [len(piece) for piece in first.tokens] == [4, 3, 4]


def test_a_short_prompt_need_not_wait_for_a_long_one() -> None:
    scheduler = Scheduler(slots=2, chunk=4)
    for id, length in enumerate((400, 3)):
        scheduler.add(SequenceSpec(id, prompt(id, length), 1, PARAMS))
        scheduler.admit()
    passes = [scheduler.prefill_batch(), scheduler.prefill_batch()]
    assert [[sequence.spec.id for sequence in work.sequences] for work in passes if work is not None] == [[0], [1]]


def test_the_lowest_slot_is_taken_first_and_unknown_jobs_are_no_error() -> None:
    scheduler = Scheduler(slots=3, chunk=4)
    scheduler.drop(5)
    for id in range(3):
        scheduler.add(SequenceSpec(id, prompt(id, 1), 1, PARAMS))
    assert [sequence.slot for sequence in scheduler.admit()] == [0, 1, 2]
    for id in (2, 0, 0):
        scheduler.drop(id)
    scheduler.add(SequenceSpec(3, prompt(3, 1), 1, PARAMS))
    assert [sequence.slot for sequence in scheduler.admit()] == [0] and scheduler.free == [2]
