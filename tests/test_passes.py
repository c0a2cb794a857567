"""The engine with the kernels' vocabulary gives the same tokens as with the decoder's own layers."""

import gc
import random
import weakref
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ladder.checkpoint import Directory, Random, load
from ladder.comm.base import Comm
from ladder.comm.emulated import World
from ladder.config import ModelConfig
from ladder.engine.forward import Forward, Schedule
from ladder.engine.graphs import prompts as prompt_graphs
from ladder.engine.graphs import steps as graphs
from ladder.engine.graphs.prompts import LONGEST, PromptGraphs, rows_of, sizes
from ladder.engine.graphs.steps import Graphs, bucket
from ladder.engine.model_runner import AbortSequence, AddSequence, ModelRunner
from ladder.engine.options import EngineOptions, SamplingParams
from ladder.engine.sampling import Chosen
from ladder.engine.scheduler import LONG, ScheduledBatch, SequenceSpec
from ladder.engine.setup import Setup
from ladder.errors import LadderError
from ladder.jit import PRESENT
from ladder.kernels import table
from ladder.kernels.launch import Launch, References
from ladder.kernels.sampling.argmax import choose, choose_reference
from ladder.kernels.table import beside
from ladder.layers.cache import RESERVED, PrefillMetadata
from ladder.model import Decoder
from ladder.wiring import Wiring
from tests.checkpoints import tiny
from tests.families import make
from tests.graphs import recorded
from tests.test_kernels import DEVICE, assert_close

PROMPTS = [[1], list(range(2, 40)), [7] * 100, [5, 17, 9], list(range(300, 200, -1))]


def tokens(comm: Comm, launch: Launch | None, params: SamplingParams, wiring: str) -> dict[int, list[int | None]]:
    """What each of the prompts is answered with; three slots, so that some wait, and a cache that grows."""
    config = ModelConfig.named("tiny").rewired(wiring)
    runner = ModelRunner(load(Decoder(config, comm), Random(5, 0.15)), slots=3, chunk=64, launch=launch)
    runner.apply(AddSequence(SequenceSpec(id, tuple(prompt), 16, params)) for id, prompt in enumerate(PROMPTS * 2))
    found: dict[int, list[int | None]] = {}
    while runner.busy:
        for token in runner.step():
            found.setdefault(token.id, []).append(token.token)
    return found


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("wiring", ("ladder", "standard:2 ladder-1-2:2", "desync-2x"))
@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_same_tokens(wiring: str, temperature: float, size: int) -> None:
    params = SamplingParams(16, temperature, seed=4)
    with World(size) as world:
        plain = world.run(lambda comm: tokens(comm, None, params, wiring))
        by_references = world.run(lambda comm: tokens(comm, References(), params, wiring))
    assert plain == by_references and len(plain[0]) == 2 * len(PROMPTS)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[ScheduledBatch]:
    """The passes of prompts and sequences that are decoded, from now on."""
    joined: list[ScheduledBatch] = []
    both = ScheduledBatch.joined
    monkeypatch.setattr(ScheduledBatch, "joined", lambda *given: joined.append(both(*given)) or joined[-1])
    return joined


@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_same_tokens_from_graphs(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """Batches filled up with the spare slot, passes with prompts filled up at their end, some of them beside sequences
    that are decoded, kernels for longer sequences.
    """
    made = recorded(monkeypatch)
    joined = noted(monkeypatch)
    params = SamplingParams(16, temperature, seed=4)
    monkeypatch.setattr(table, "NEAREST", 64)
    monkeypatch.setattr(prompt_graphs, "USES", 1)
    long = [[9] * 250, [3] * 20]
    found = []
    for launch, captured in ((None, False), (References(), True)):
        runner = ModelRunner(load(Decoder(ModelConfig.named("tiny")), Random(5, 0.15)), 3, 512, launch, captured)
        coming = [
            AddSequence(SequenceSpec(id, tuple(prompt), 16, params)) for id, prompt in enumerate([*PROMPTS, *long])
        ]
        tokens: dict[int, list[int | None]] = {}
        while coming or runner.busy:
            runner.apply([coming.pop(0)] if coming else [])  # prompts that come together are read together
            for token in runner.step():
                tokens.setdefault(token.id, []).append(token.token)
        found.append(tokens)
    assert found[0] == found[1]
    kinds = [each.kind for each in made if each.replays]
    assert kinds.count("step") >= 4  # they were used, and others for longer sequences
    passes = runner._passes.prompt_graphs
    assert passes is not None and kinds.count("prompts") == len(passes._captured)
    assert {(decoded, reach) for _, decoded, reach in passes._captured} >= {(0, 64), (8, 64), (8, 256)}
    assert any(batch.decoded == 2 and len(batch.sequences) == 3 for batch in joined)


def test_a_warm_up_captures_every_size_and_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch)
    found = []
    for warm in (False, True):
        runner = ModelRunner(load(Decoder(ModelConfig.named("tiny")), Random(5, 0.15)), 5, 100, References(), True)
        captured, passes = runner._passes._graphs, runner._passes.prompt_graphs
        assert captured is not None and passes is not None
        if warm:
            joined = noted(monkeypatch)
            assert runner.warm_up() == [1, 2, 4, 8] == sorted(size for size, _ in captured._captured)
            assert not runner.busy and runner.free_slots == 5
            assert {bucket(batch.decoded) for batch in joined if batch.decoded} == {1, 2, 4}
            assert sorted(passes._captured) == sorted(
                (rows, decoded, table.NEAREST) for rows in (16, 32, 64, 128) for decoded in (0, 8)
            )
        runner.apply(
            AddSequence(SequenceSpec(id, tuple(prompt), 16, SamplingParams(16, 0.8 * id, seed=id)))
            for id, prompt in enumerate(PROMPTS)
        )
        known = len(captured._captured), len(passes._captured)
        tokens: dict[int, list[int | None]] = {}
        while runner.busy:
            for token in runner.step():
                tokens.setdefault(token.id, []).append(token.token)
        found.append(tokens)
        assert not warm or (len(captured._captured), len(passes._captured)) == known
    assert found[0] == found[1]
    model = load(Decoder(ModelConfig.named("tiny")), Random(5, 0.15))
    assert ModelRunner(model, 5, 8).warm_up() == []
    assert ModelRunner(model, 5, 8, References(), True, RESERVED + 1).warm_up() == []  # no room for such requests
    assert ModelRunner(model, 5, 8, References(), True, RESERVED + 2).warm_up() == [1, 2, 4, 8]


def test_sizes_of_passes_with_prompts() -> None:
    """What a pass is filled up to is known before, and never less than it has."""
    assert [rows_of(count) for count in (1, 16, 17, 256, 257, 1024, 1025, 2048)] == [
        16, 16, 32, 256, 384, 1024, 1280, 2048,
    ]  # fmt: skip
    assert [beside(count) for count in (0, 1, 8, 9, 200, 256, 257, 600)] == [0, 8, 8, 32, 256, 256, 512, 768]
    known = {(rows, decoded) for rows, decoded, _ in sizes(4096, 256)}
    chance = random.Random(1)
    for _ in range(500):
        decoded = chance.randrange(257)
        rows = decoded + chance.randrange(1, 2049 - decoded)
        found = (max(rows_of(rows), rows_of(beside(decoded))), beside(decoded))
        assert found in known and found[0] >= rows and found[1] >= decoded and found[0] - rows < 256
    assert len(known) < 90


def test_a_pass_with_prompts_is_captured_when_it_comes_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not where it is long or has many prompts, or where the model's experts are computed one after the other: each is
    logged once.
    """
    made = recorded(monkeypatch)
    caplog.set_level("INFO", "ladder")
    model = load(Decoder(ModelConfig.named("tiny")), Random(5, 0.15))
    passes = PromptGraphs(forward := Forward(model, model.new_cache(4, 64), References()), 3, torch.zeros(4).long())
    assert passes.find([1, 20], [9, 0], 1) is None and passes.find([1, 30], [9, 0], 1) is not None
    assert passes.find([3, 20], [9, 0], 0) is None and [each.kind for each in made] == ["prompts"]
    for counts in ([LONGEST + 1], [1] * (prompt_graphs.MOST + 1)):
        assert all(passes.find(counts, [0] * len(counts), 0) is None for _ in range(3))
    monkeypatch.setattr(type(forward), "capturable", False)
    assert passes.find([1, 30], [9, 0], 1) is None
    said = [record.getMessage() for record in caplog.records]
    assert [("2048 tokens" in each, "16 prompts" in each, "no graph can be" in each) for each in said] == [
        (True, False, False), (False, True, False), (False, False, True),
    ]  # fmt: skip


@pytest.mark.parametrize("family", ("llama-3", "gemma2", "olmo2", "gpt2", "qwen3-moe"))
@pytest.mark.parametrize("size", (1, 2))
def test_a_captured_pass_has_the_logits_of_its_sequences(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, size: int
) -> None:
    """Prompts that begin and that go on, of every length, beside sequences that are decoded."""
    recorded(monkeypatch)
    monkeypatch.setattr(Forward, "capturable", True)
    make(family, tmp_path)
    source = Directory(tmp_path)

    def check(comm: Comm) -> None:
        model = load(Decoder(source.config, comm), source)
        vocab, chance = source.config.vocab, random.Random(1)
        texts = [[chance.randrange(vocab) for _ in range(length)] for length in (60, 40, 9, 33, 70)]
        forward = Forward(model, model.new_cache(6, 80), References())
        last = torch.zeros(6, dtype=torch.long)
        passes = PromptGraphs(forward, 5, last)
        done = [0] * 5

        def read(counts: dict[int, int], decoded: int = 0) -> None:
            """So many tokens of each text; the first ones are decoded."""
            given = list(counts.items())
            pieces = [texts[n][done[n] : done[n] + count] for n, count in given]
            starts, ends = [done[n] for n, _ in given], list(accumulate(counts.values()))
            for n, _ in given[:decoded]:
                last[4 - n] = texts[n][done[n]]
            graph = passes.captured((rows_of(max(ends[-1], 8 * (decoded > 0))), beside(decoded), table.NEAREST))
            pieces = [piece if number >= decoded else [] for number, piece in enumerate(pieces)]
            found = graph.replay(pieces, [4 - n for n, _ in given], starts, decoded, [end - 1 for end in ends])
            assert found.isfinite().all()
            for (n, count), logits in zip(given, comm.all_gather(found), strict=True):
                done[n] += count
                expected = comm.all_gather(model(torch.tensor([texts[n][: done[n]]]))[0, -1:])[0]
                assert_close(logits, expected, torch.float32)

        with torch.inference_mode():
            read({0: 7, 1: 1, 2: 8})
            read({2: 1, 0: 17, 3: 20}, 1)
            read({1: 1, 0: 1, 3: 1, 4: 64}, 3)
            read({4: 1, 3: 1, 1: 1, 0: 30}, 2)

    with World(size) as world:
        world.run(check)


@pytest.mark.parametrize("seed", range(4))
def test_steps_ahead_change_no_token(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Sequences that come and go at any step, and end with end-of-text tokens: a step that was begun before the last
    one's tokens were known gives the tokens that it would have given afterwards, and none to a sequence that is gone.
    """
    recorded(monkeypatch)
    made: list[str] = []  # steps that follow the last one, and others
    for name in ("fill", "step"):
        original = getattr(graphs._Captured, name)

        def called(self: Any, *given: Any, name: str = name, original: Any = original) -> Any:
            made.append(name)
            return original(self, *given)

        monkeypatch.setattr(graphs._Captured, name, called)
    chance = random.Random(seed)
    config = replace(ModelConfig.named("tiny"), eos=tuple(range(0, 320, 29)))
    comes = {id: (chance.randrange(25), [chance.randrange(320) for _ in range(chance.choice([1, 4, 30]))])
             for id in range(12)}  # fmt: skip
    goes = {id: chance.randrange(80) for id in range(0, 12, 3)}
    drawn = SamplingParams(60, temperature=0.9, top_p=0.9, seed=3)
    params = [SamplingParams(60), drawn, SamplingParams(60, repetition_penalty=1.3, logprobs=2)]
    limits = {id: chance.choice([1, 2, 9, 60]) for id in comes}
    found: list[dict[int, list[tuple[int | None, str | None]]]] = []
    for launch, captured in ((References(), False), (References(), True)):
        runner = ModelRunner(load(Decoder(config), Random(5, 0.15)), 3, 512, launch, captured)
        tokens: dict[int, list[tuple[int | None, str | None]]] = {id: [] for id in comes}
        for step in range(300):
            gone = [id for id, at in goes.items() if at == step]
            runner.apply(AbortSequence(id) for id in gone)
            runner.apply(
                AddSequence(SequenceSpec(id, tuple(prompt), limits[id], params[id % 3]))
                for id, (at, prompt) in comes.items() if at == step and goes.get(id, step + 1) > step
            )  # fmt: skip
            for token in runner.step() if runner.busy else []:
                assert not (tokens[token.id] and tokens[token.id][-1][1]) and goes.get(token.id, step + 1) > step
                tokens[token.id].append((token.token, token.finish_reason))
        assert not runner.busy
        found.append(tokens)
    for id, at_once in found[0].items():  # who was cancelled did not get the token that was not known yet
        assert found[1][id] == at_once[: len(found[1][id])] and (id in goes or found[1][id] == at_once)
    reasons = [tokens[-1][1] for tokens in found[0].values() if tokens]
    assert {"stop", "length"} <= set(reasons) and made.count("step") > made.count("fill") + 10 and "fill" in made


def test_a_graph_keeps_what_its_kernels_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scratch memory of the kernels of its schedule: a graph has its address, and nobody else has it."""
    monkeypatch.setattr(graphs, "capture", lambda step, device: (None, step()))
    made: list[weakref.ref[Forward]] = []

    class Scheduled(Forward):
        def scheduled(self, schedule: Schedule) -> Forward:
            other = Forward(self.model, self.cache, References())
            made.append(weakref.ref(other))
            return other

    model = load(Decoder(ModelConfig.named("tiny")), Random())
    captured = Graphs(Scheduled(model, model.new_cache(2, 16), References()), 1).captured(1)
    gc.collect()
    assert made[0]() is captured.forward


def test_the_choice_from_several_ranks() -> None:
    nan, inf = float("nan"), float("inf")
    best = torch.tensor([[1.0, 3, 2.0, 700], [2.0, 5, 2.0, 9], [nan, 1, 5.0, 9], [-inf, 0, -inf, 4], [0.5, 7, inf, 9]])
    best = best.to(DEVICE)
    kernels = [choose_reference, *([lambda *given: choose(*given, pdl=False)] if PRESENT else [])]
    for each in kernels:
        inputs, slots, last = (
            torch.tensor([[1] * 5, [4, 5, 6, 7, 8]], device=DEVICE),
            torch.tensor([2, 0, 1, 5, 4], device=DEVICE),
            torch.full((6,), 3, device=DEVICE),
        )
        assert each(best, *inputs, slots, last).tolist() == [700, 5, -1, -1, -1]
        assert inputs.tolist() == [[700, 5, 0, 0, 0], [5, 6, 7, 8, 9]] and last.tolist() == [5, 0, 700, 3, 0, 0]


@pytest.mark.parametrize("joins", (False, True))
def test_last_tokens_do_not_wait_for_a_long_prompt(joins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the step of the last token of those that are decoded, no piece of a long prompt is read: it would be a whole
    chunk if nothing but the next step were looked at.
    """
    seen: list[tuple[int, int]] = []  # sequences that are decoded in a step, and the long prompt's tokens

    class Passes:
        polls = asynchronous = False

        def begin(self, sequence: object) -> None: ...
        def move(self, sequences: object) -> None: ...

        def compute(self, work: ScheduledBatch) -> Chosen:
            long = sum(len(piece) for piece, each in zip(work.tokens, work.sequences, strict=False) if each.long)
            decoded = work.decoded if work.tokens else len(work.sequences)
            seen.append((decoded, long))
            return Chosen(torch.zeros(len(work.answered), dtype=torch.long), None)

    monkeypatch.setattr(Passes, "joins", joins, raising=False)
    model = Decoder(replace(ModelConfig.named("tiny"), context=LONG + 4096))
    runner = ModelRunner(model, 4, 512, blocks=3000)
    runner._passes = Passes()  # type: ignore[assignment]
    runner.apply([AddSequence(SequenceSpec(0, tuple(range(9)) * 2000, 4, SamplingParams()))])
    for id in range(1, 5):
        runner.apply([AddSequence(SequenceSpec(id, (id, 2, 3), 6, SamplingParams()))])
    for _ in range(30):
        runner.step()
    assert (0, 512) in seen and sum(decoded > 0 for decoded, _ in seen) >= 10
    assert all(long == 0 for decoded, long in seen if decoded)


def test_kernels_get_addresses_of_one_kind() -> None:
    """Whatever the number of rows: Triton compiles a kernel once more for an address that 16 does not divide."""
    model = Decoder(ModelConfig.named("tiny"))
    for counts in ([1, 4], [1, 5], [7]):
        metadata = PrefillMetadata.of(counts, model.new_cache(2, 16), None, model.config, model.ropes, decoded=1)
        found = [metadata.slots, metadata.positions, metadata.tables, metadata.tiles(4)]
        found += [each[0] for each in (metadata.cos, metadata.sin)]
        assert metadata.newest is not None
        found += [metadata.newest.slots, metadata.newest.positions, metadata.newest.cos[0], metadata.newest.sin[0]]
        assert all(each.data_ptr() % 16 == 0 for each in found)


def test_long_sequences_have_the_schedule_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their steps are not timed: with positions to the end of a long context that takes seconds."""
    timed: list[int] = []

    class Captured:
        def __init__(self, forward: Any, bucket: int, reach: int, *_: object) -> None:
            self.forward, self.reach = forward, reach

        def milliseconds(self, position: int) -> float:
            timed.append(self.reach)
            return 1.0 if self.forward.schedule.lanes == 2 else 2.0

    monkeypatch.setattr(graphs, "_Captured", Captured)

    class Scheduled(Forward):
        def scheduled(self, schedule: Schedule) -> Any:
            return SimpleNamespace(schedule=schedule)

    model = Decoder(ModelConfig.named("tiny"))
    passes = Graphs(Scheduled(model, model.new_cache(2, 16), References()), 1, (Schedule(), Schedule(2)))
    found: Any = passes._for(1, 4 * table.NEAREST)
    assert found.reach == 4 * table.NEAREST and found.forward.schedule == Schedule(2)
    assert set(timed) == {table.NEAREST} and passes._for(1, 4 * table.NEAREST) is found


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    model = tiny(tmp_path / "model")
    (tmp_path / "bad.jsonl").write_text('{"chip": "x"}\n')
    for path, message in ((tmp_path / "bad.jsonl", "no table of tuned kernels"), (tmp_path / "absent", "no such file")):
        with pytest.raises(LadderError, match=message):
            Setup(EngineOptions(model, tuned=path))
    (tmp_path / "good.jsonl").write_text("")
    with pytest.raises(LadderError, match="are for GPUs"):
        Setup(EngineOptions(model, tuned=tmp_path / "good.jsonl"))


def test_what_is_worth_trying() -> None:
    """Two lanes where something may run beside something; a library's all-reduces with and without flags."""
    for wiring, count in (
        ("standard", 1),
        ("ladder", 3),
        ("parallel", 3),
        ("desync-2x", 1),
        ("standard:1 ladder:1", 3),
    ):
        blocks = [block for layer in Wiring.parse(wiring, 2).sub_blocks() for block in layer]
        found = Schedule.worth_trying(blocks, pdl=True, library=False)
        assert len(found) == count and found[0] == Schedule()
        without = Schedule.worth_trying(blocks, pdl=False, library=False)
        assert without == tuple(each for each in found if each.pdl)
        both = Schedule.worth_trying(blocks, pdl=True, library=True)
        assert both == (*found, *(replace(each, polls=False) for each in found))
    assert str(Schedule(2, False, False)) == "2 lanes, no programmatic launch, no flags"


def test_the_fastest_schedule_is_kept_and_all_ranks_keep_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the slowest rank: the second schedule is the first one's best, the third is the best of both together."""
    schedules = (Schedule(), Schedule(2), Schedule(2, pdl=False))
    times = {0: (5.0, 1.0, 4.0), 1: (5.0, 6.0, 3.0)}

    class Captured:
        def __init__(self, forward: Any, *_: object) -> None:
            self.schedule, self.rank = forward.schedule, forward.rank

        def milliseconds(self, position: int) -> float:
            return times[self.rank][schedules.index(self.schedule)]

    monkeypatch.setattr(graphs, "_Captured", Captured)

    class Scheduled(Forward):
        def scheduled(self, schedule: Schedule) -> Any:
            return SimpleNamespace(schedule=schedule, rank=self.model.comm.rank)

    def chosen(comm: Comm) -> list[Any]:
        model = Decoder(ModelConfig.named("tiny"), comm)
        forward = Scheduled(model, model.new_cache(2, 16), References())
        few = (schedules, schedules[:2], schedules[:1])
        return [Graphs(forward, 1, some).captured(1).schedule for some in few]  # type: ignore[attr-defined]

    one, two, three = schedules
    for size, expected in ((1, [two, two, one]), (2, [three, one, one])):
        with World(size) as world, caplog.at_level("INFO"):
            assert world.run(chosen) == [expected] * size
    assert (
        "decode steps of 1 sequences at position 8: 2 lanes, the fastest of 1 lane 5.000 ms; 2 lanes 1.000 ms; 2 lanes"
        in caplog.text
    )
