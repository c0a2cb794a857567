"""The scheduler by itself, without torch: whoever comes and goes, no slot or block is lost, nobody is forgotten, and a
sequence finds its own tokens in its blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ladder.engine.scheduler as scheduler_module
from ladder.engine.blocks import BlockPool, names_of
from ladder.engine.executors.pace import MOST, SHARE, Pace
from ladder.engine.model_runner import NewToken
from ladder.engine.options import SamplingParams
from ladder.engine.scheduler import LONG, SMALL, RunningSequence, ScheduledBatch, Scheduler, SequenceSpec, finish_reason
from ladder.layers.cache import BLOCK, RESERVED

END = 7  # the token that ends a sequence early
PARAMS = SamplingParams()


@dataclass(frozen=True)
class Plan:
    """A sequence that is added before step `comes`, dropped before step `goes`, and ends itself at token `ends`; the
    first `common` tokens of its prompt are those of others, too.
    """

    comes: int
    length: int
    limit: int
    goes: int | None
    ends: int | None
    common: int


PLANS = st.builds(
    Plan, st.integers(0, 30), st.integers(1, 60), st.integers(1, 40), st.none() | st.integers(0, 60),
    st.none() | st.integers(1, 40), st.integers(0, 60),
)  # fmt: skip


def prompt(id: int, plan: Plan) -> tuple[int, ...]:
    return tuple(100 + at if at < plan.common else 1000 * (id + 1) + at for at in range(plan.length))


@dataclass
class Engine:
    """A scheduler and what its passes would do; with `late` the tokens of a step are known one step later."""

    scheduler: Scheduler
    plans: list[Plan]
    late: bool
    content: dict[tuple[int, int], int] = field(default_factory=dict)  # the cache: token by block and place
    given: dict[int, list[int]] = field(default_factory=dict)  # tokens that passes have chosen, known or not
    finished: dict[int, str] = field(default_factory=dict)
    ahead: list[ScheduledBatch] = field(default_factory=list)
    here: set[int] = field(default_factory=set)  # added, and neither finished nor dropped
    reused: int = 0
    steps: int = 0

    def tokens(self, sequence: RunningSequence) -> list[int]:
        """All of a sequence, also what is not known to the scheduler yet."""
        id = sequence.spec.id
        known = sequence.spec.tokens + tuple(sequence.new)
        return [*known, *self.given[id][len(sequence.new) :]]

    def compute(self, batch: ScheduledBatch) -> None:
        """Check that every sequence finds what it has read, and write what the pass computes."""
        assert len(set(batch.slots)) == len(batch.slots)
        for number, (sequence, start) in enumerate(zip(batch.sequences, batch.starts, strict=True)):
            text = self.tokens(sequence)
            fed = batch.tokens[number] if batch.tokens else (text[start],)
            assert list(fed) == text[start : start + len(fed)] and len(fed) >= 1
            for at in range(start):
                assert self.content[sequence.blocks[at // BLOCK], at % BLOCK] == text[at], "not its own tokens"
            for at, token in enumerate(fed, start):
                self.content[sequence.blocks[at // BLOCK], at % BLOCK] = token
        for sequence in batch.answered:
            own = self.given[sequence.spec.id]
            ends = self.plans[sequence.spec.id].ends
            own.append(END if len(own) + 1 == ends else 10 + len(own))

    def read(self, batches: list[ScheduledBatch]) -> None:
        for batch in batches:
            for sequence in batch.answered:
                id = sequence.spec.id
                if self.scheduler.running.get(id) is not sequence:
                    continue
                sequence.pending -= 1
                sequence.new.append(self.given[id][len(sequence.new)])
                if reason := finish_reason(sequence, (END,)):
                    self.finished[id] = reason
                    self.scheduler.drop(id)
                    self.here.discard(id)

    def step(self) -> None:
        scheduler = self.scheduler
        if scheduler.lacks_blocks():
            self.read(self.ahead)
            self.ahead = []
            while scheduler.lacks_blocks():
                scheduler.preempt()
        for sequence in scheduler.admit():
            self.given[sequence.spec.id] = list(sequence.new)
            self.reused += sequence.computed
        self.steps += 1
        long = scheduler.holds_back and self.steps % 5 == 0
        decoded = scheduler.decode_batch()
        given = (decoded, scheduler.prefill_batch(long, alone=decoded is None))
        batches = [batch for batch in given if batch is not None]
        for batch in batches:
            if batch.tokens:
                short = [len(piece) for piece, each in zip(batch.tokens, batch.sequences, strict=True) if not each.long]
                assert sum(short) <= scheduler.chunk and len(batch.sequences) - len(short) <= 1
            self.compute(batch)
        if self.late:
            batches, self.ahead = self.ahead, batches
        self.read(batches)

    def check(self, slots: int) -> None:
        scheduler = self.scheduler
        used = [sequence.slot for sequence in scheduler.running.values()]
        assert sorted(used + scheduler.free) == list(range(slots))
        taken = {block for sequence in scheduler.running.values() for block in sequence.blocks}
        assert len(taken) + scheduler.blocks.free == scheduler.blocks.count and min(taken, default=RESERVED) >= RESERVED
        assert {each.spec.id for each in scheduler.waiting} | scheduler.running.keys() == self.here


def live(slots: int, chunk: int, blocks: int, plans: list[Plan], late: bool, long: int = LONG) -> Engine:
    engine = Engine(Scheduler(slots, chunk, BlockPool(blocks + RESERVED), long), plans, late)
    steps = 0
    while steps <= max(plan.comes for plan in plans) or engine.scheduler.busy or engine.ahead:
        for id, plan in enumerate(plans):
            if plan.comes == steps:
                engine.scheduler.add(SequenceSpec(id, prompt(id, plan), plan.limit, PARAMS))
                engine.here.add(id)
            if plan.goes == steps:
                engine.scheduler.drop(id)  # too early, in time, or too late
                engine.here.discard(id)
        engine.step()
        engine.check(slots)
        steps += 1
        assert steps < 100 + 4 * sum(plan.length + plan.limit for plan in plans), "somebody starves"
    assert not engine.here
    return engine


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(7, 40),
    st.lists(PLANS, min_size=1, max_size=20),
    st.booleans(),
    st.sampled_from((20, LONG)),
)
def test_whatever_comes_and_goes(slots: int, chunk: int, blocks: int, plans: list[Plan], late: bool, long: int) -> None:
    engine = live(slots, chunk, blocks, plans, late, long)
    for id, plan in enumerate(plans):
        if plan.goes is None or id in engine.finished:
            ends = plan.ends if plan.ends is not None and plan.ends <= plan.limit else None
            count = ends or plan.limit
            assert engine.given[id][:count] == [END if at + 1 == ends else 10 + at for at in range(count)]
            assert engine.finished[id] == ("stop" if ends else "length")


def test_a_full_cache_preempts_the_last_and_loses_nothing() -> None:
    plans = [Plan(0, 10, 80, None, None, 0) for _ in range(4)]
    engine = live(4, 64, 12, plans, late=True)
    assert engine.scheduler.preemptions > 0 and all(len(engine.given[id]) == 80 for id in range(4))
    roomy = live(4, 64, 40, plans, late=True)
    assert roomy.scheduler.preemptions == 0


def test_who_waits_for_blocks_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of a long prompt's blocks take longer than a step: they are made once, not in every step."""
    named: list[int] = []

    def noted(tokens: Sequence[int]) -> Iterator[bytes]:
        named.append(len(tokens))
        return names_of(tokens)

    monkeypatch.setattr(scheduler_module, "names_of", noted)
    scheduler = Scheduler(4, 64, BlockPool(RESERVED + 4))
    for id, length in ((1, 2 * BLOCK), (2, 3 * BLOCK)):
        scheduler.add(SequenceSpec(id, tuple(range(id, id + length)), 2, SamplingParams()))
    for _ in range(5):
        assert [each.spec.id for each in scheduler.admit()] in ([1], [])
    assert named == [2 * BLOCK, 3 * BLOCK] and not scheduler.blocks.kept_of(range(99))
    scheduler.drop(1)
    assert [each.spec.id for each in scheduler.admit()] == [2] and len(named) == 2
    scheduler.prefill_batch(alone=True)  # read, and preempted when one of its tokens is known: another beginning
    scheduler.running[2].new.append(7)
    scheduler.running[2].pending = 0
    scheduler.preempt()
    (again,) = scheduler.admit()
    assert named[2:] == [3 * BLOCK + 1] and again.unread == (*range(2, 2 + 3 * BLOCK), 7)


def test_equal_beginnings_are_read_once() -> None:
    plans = [Plan(5 * id, 50, 2, None, None, 48) for id in range(3)]
    engine = live(3, 64, 40, plans, late=False)
    assert engine.reused == 2 * 48
    whole = live(3, 64, 40, [Plan(5 * id, 48, 2, None, None, 48) for id in range(3)], late=False)
    assert whole.reused == 2 * 32  # the last token is read in any case: its logits are needed


def test_what_is_spoilt_is_not_shared() -> None:
    pool = BlockPool(RESERVED + 4)
    (name,) = names_of(range(BLOCK))
    block = pool.take()
    pool.name(block, name)
    pool.share([block])
    assert pool.find([name]) == [block] and pool.spoil([block]) == [] and pool.find([name]) == []
    pool.give_back([block])
    assert pool.spoil([block]) == [block] and pool.free == 3
    pool.give_back([block])
    assert pool.free == 4


def test_names_depend_on_all_that_came_before() -> None:
    one, two = list(names_of(range(3 * BLOCK))), list(names_of([1, *range(1, 3 * BLOCK)]))
    assert len(one) == 3 and not set(one) & set(two)
    assert list(names_of(range(2 * BLOCK + 5))) == one[:2]


def test_unused_blocks_keep_what_they_hold_until_others_are_gone() -> None:
    pool = BlockPool(RESERVED + 2)
    first, second = pool.take(), pool.take()
    names = list(names_of(range(2 * BLOCK)))
    for block, name in zip((first, second), names, strict=True):
        pool.name(block, name)
    pool.give_back([first, second])
    assert pool.free == 2 and pool.find(names) == [first, second]
    assert pool.take() == second and pool.find(names) == [first]  # the end of a text goes before its beginning


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 16), st.integers(1, 50), st.integers(1, 8))
def test_alone(chunk: int, length: int, limit: int) -> None:
    """A step per piece, then a step per token, the first of which comes with the last piece."""
    scheduler = Scheduler(3, chunk, BlockPool(RESERVED + 8))
    engine = Engine(scheduler, [Plan(0, length, limit, None, None, 0)], late=False)
    scheduler.add(SequenceSpec(0, tuple(range(100, 100 + length)), limit, PARAMS))
    steps = 0
    while scheduler.busy:
        engine.step()
        steps += 1
    assert steps == -(-length // chunk) + limit - 1


def started(*lengths: int, slots: int = 8, chunk: int = 12) -> Scheduler:
    scheduler = Scheduler(slots, chunk, BlockPool(200))
    for id, length in enumerate(lengths):
        scheduler.add(SequenceSpec(id, tuple(1000 * id + at for at in range(length)), 1, PARAMS))
    scheduler.admit()
    return scheduler


def test_short_prompts_share_a_pass() -> None:
    first = started(4, 3, 4, 1, 30, 2).prefill_batch()
    assert first is not None and [len(piece) for piece in first.tokens] == [4, 3, 4, 1]


def test_a_short_prompt_need_not_wait_for_a_long_one() -> None:
    scheduler = started(400, 3, slots=2, chunk=4)
    passes = [scheduler.prefill_batch(), scheduler.prefill_batch()]
    assert [[sequence.spec.id for sequence in work.sequences] for work in passes if work is not None] == [[0], [1]]


def test_a_long_prompt_waits_for_those_that_are_decoded() -> None:
    scheduler = Scheduler(4, 512, BlockPool(9000))
    for id, length in enumerate((LONG + 512 + 1, 5)):
        scheduler.add(SequenceSpec(id, tuple(range(length)), 10, PARAMS))
    scheduler.admit()

    def read(long: bool = False, alone: bool = False) -> list[int]:
        batch = scheduler.prefill_batch(long, alone)
        return [] if batch is None else [len(piece) for piece in batch.tokens]

    assert read(alone=True) == [5, SMALL] and scheduler.holds_back  # nothing was decoded yet
    assert read() == [] and read(long=True) == [SMALL] and read() == []
    scheduler.drop(1)
    assert not scheduler.holds_back and read(alone=True) == [512]
    scheduler.chunk = 4096
    scheduler.add(SequenceSpec(2, tuple(range(7, 1007)), 10, PARAMS))
    scheduler.admit()
    assert read(alone=True) == [1000, 4096 // 8] and read(long=True) == [4096 // 8]


@dataclass
class Clocked:
    """A runner with a clock: a step takes `usual`, a piece of a long prompt `cost` more; with `late`, the next step."""

    late: bool
    usual: float = 0.1
    cost: float = 1.0
    now: float = 0.0
    pieces: int = 0
    holds_back: bool = True
    read_long: bool = False
    before: float = 0.0

    def step(self) -> list[NewToken]:
        extra = self.cost * self.read_long
        self.now += self.usual + (self.before if self.late else extra)
        self.pieces += self.read_long
        self.before = extra
        return []


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Callable[[Clocked, int], None]:
    """Run so many steps; `pieces` and the clock begin anew."""
    paces: dict[int, Pace] = {}

    def run(runner: Clocked, steps: int) -> None:
        monkeypatch.setattr("ladder.engine.executors.pace.time.perf_counter", lambda: runner.now)
        pace = paces.setdefault(id(runner), Pace(runner))  # type: ignore[arg-type]
        runner.now, runner.pieces = 0.0, 0
        for _ in range(steps):
            runner.read_long = bool(pace.due) or not runner.holds_back
            pace.step()

    return run


@pytest.mark.parametrize("late", (False, True))
@pytest.mark.parametrize("usual", (0.1, 2.0))
def test_pieces_of_long_prompts_cost_a_share_of_the_time(
    paced: Callable[[Clocked, int], None], late: bool, usual: float
) -> None:
    runner = Clocked(late, usual)
    paced(runner, 1)
    assert runner.pieces == 0  # it is not known yet what a step takes
    paced(runner, 3000)
    assert 0.8 * SHARE < runner.now / (3000 * usual) - 1 < 1.1 * SHARE and runner.pieces > 20


def test_steps_that_read_other_prompts_are_not_taken_for_usual(paced: Callable[[Clocked, int], None]) -> None:
    times = cycle((0.1, 0.3, 0.3))

    class Prompts(Clocked):
        def step(self) -> list[NewToken]:
            self.usual = next(times)
            return super().step()

    runner = Prompts(late=False)
    paced(runner, 3000)
    assert 0.5 * SHARE < runner.pieces * runner.cost / (3000 * 0.1) < 1.1 * SHARE


def test_what_costs_nobody_anything_is_not_paid_back(paced: Callable[[Clocked, int], None]) -> None:
    """Pieces that were read alone. A debt is left to those who are decoded next: else each time that all of them end at
    once would give the long prompt a piece for nothing.
    """
    runner = Clocked(late=False)
    paced(runner, 20)
    assert runner.pieces == 1
    runner.holds_back = False
    paced(runner, 400)
    assert runner.pieces == 400
    runner.holds_back = True
    paced(runner, 40)
    assert runner.pieces == 0
    paced(runner, 20)
    assert runner.pieces == 1


def test_steps_that_became_slower_are_no_cost_of_pieces(paced: Callable[[Clocked, int], None]) -> None:
    runner = Clocked(late=False, usual=0.03)
    paced(runner, 1000)
    runner.usual = 0.3
    paced(runner, 1000)
    assert runner.pieces > 0.7 * 1000 * 0.3 * SHARE


def test_a_piece_comes_in_the_end(paced: Callable[[Clocked, int], None]) -> None:
    """However long the last one took, because kernels were compiled for one."""
    runner = Clocked(late=False, usual=0.01, cost=1000.0)
    paced(runner, 2 + int(MOST / SHARE / 0.01) + 2)
    assert runner.pieces == 2


def test_the_lowest_slot_is_taken_first_and_unknown_sequences_are_no_error() -> None:
    scheduler = started(1, 1, 1, slots=3, chunk=4)
    scheduler.drop(5)
    assert [sequence.slot for sequence in scheduler.running.values()] == [0, 1, 2]
    for id in (2, 0, 0):
        scheduler.drop(id)
    scheduler.add(SequenceSpec(3, (1,), 1, PARAMS))
    assert [sequence.slot for sequence in scheduler.admit()] == [0] and scheduler.free == [2]


@pytest.mark.parametrize(
    "params, new, reason",
    [
        (SamplingParams(), [3, END], "stop"),
        (SamplingParams(ignore_eos=True), [3, END], None),
        (SamplingParams(stop_token_ids=(3,)), [3], "stop"),
        (SamplingParams(stop_token_ids=(3,), ignore_eos=True), [3], "stop"),
        (SamplingParams(min_tokens=3), [3, END], None),
        (SamplingParams(min_tokens=2), [3, END], "stop"),
        (SamplingParams(ignore_eos=True), [END] * 9, "length"),
    ],
)
def test_why_a_sequence_ends(params: SamplingParams, new: list[int], reason: str | None) -> None:
    sequence = RunningSequence(SequenceSpec(0, (1, 2), 9, params), new=new)
    assert finish_reason(sequence, (END,)) == reason
