"""The engine with the kernels' vocabulary gives the same tokens as with the decoder's own layers."""

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.checkpoint import Random, load
from ladder.comm.base import Comm
from ladder.comm.emulated import World
from ladder.config import ModelConfig
from ladder.engine import graphs
from ladder.engine.forward import Forward, Schedule
from ladder.engine.graphs import Graphs, bucket
from ladder.engine.model_runner import AbortSequence, AddSequence, ModelRunner
from ladder.engine.options import EngineOptions, SamplingParams
from ladder.engine.scheduler import ScheduledBatch, SequenceSpec
from ladder.engine.setup import Setup
from ladder.errors import LadderError
from ladder.jit import PRESENT
from ladder.kernels import table
from ladder.kernels.launch import Launch, References
from ladder.kernels.sampling.argmax import choose, choose_reference
from ladder.layers.cache import RESERVED
from ladder.model import Decoder
from ladder.wiring import Wiring
from tests.checkpoints import tiny
from tests.test_kernels import DEVICE

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


class Recorded:
    """Stands for a CUDA graph: a replay computes again, from the same inputs into the same results."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        self._results = step()

    def replay(self) -> None:
        for old, new in zip(self.tensors(self._results), self.tensors(self._step()), strict=True):
            old.copy_(new)

    @staticmethod
    def tensors(results: Any) -> tuple[Tensor, ...]:
        return results if isinstance(results, tuple) else (results,)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[ScheduledBatch]:
    """The passes of prompts and sequences that are decoded, from now on."""
    joined: list[ScheduledBatch] = []
    both = ScheduledBatch.joined
    monkeypatch.setattr(ScheduledBatch, "joined", lambda *given: joined.append(both(*given)) or joined[-1])
    return joined


@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_same_tokens_from_graphs(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """Batches filled up with the spare slot, prompts filled up at their end, kernels for longer sequences."""
    made: list[str] = []

    def capture(step: Callable[[], Any], device: torch.device) -> tuple[Recorded, Any]:
        graph = Recorded(step)
        made.append("step" if isinstance(graph._results, tuple) else "prompt")
        return graph, graph._results

    monkeypatch.setattr(graphs, "_capture", capture)
    joined = noted(monkeypatch)
    params = SamplingParams(16, temperature, seed=4)
    monkeypatch.setattr(table, "NEAREST", 64)
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
    assert made.count("step") >= 4 and made.count("prompt") >= 1  # they were used, and others for longer sequences
    assert any(batch.decoded == 2 and len(batch.sequences) == 3 for batch in joined)


def test_a_warm_up_captures_every_size_and_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_capture", lambda step, device: (graph := Recorded(step), graph._results))
    found = []
    for warm in (False, True):
        runner = ModelRunner(load(Decoder(ModelConfig.named("tiny")), Random(5, 0.15)), 5, 512, References(), True)
        captured = runner._passes._graphs
        assert captured is not None
        if warm:
            joined = noted(monkeypatch)
            assert runner.warm_up() == [1, 2, 4, 8] == sorted(size for size, _ in captured._captured)
            assert not runner.busy and runner.free_slots == 5
            assert {bucket(batch.decoded) for batch in joined if batch.decoded} == {1, 2, 4}
            assert sorted(captured._prompts) == [16, 32, 64, 128, 256]
        runner.apply(
            AddSequence(SequenceSpec(id, tuple(prompt), 16, SamplingParams(16, 0.8 * id, seed=id)))
            for id, prompt in enumerate(PROMPTS)
        )
        known = len(captured._captured)
        tokens: dict[int, list[int | None]] = {}
        while runner.busy:
            for token in runner.step():
                tokens.setdefault(token.id, []).append(token.token)
        found.append(tokens)
        assert not warm or len(captured._captured) == known
    assert found[0] == found[1]
    model = load(Decoder(ModelConfig.named("tiny")), Random(5, 0.15))
    assert ModelRunner(model, 5, 64).warm_up() == []
    assert ModelRunner(model, 5, 64, References(), True, RESERVED + 1).warm_up() == []  # no room for such requests
    assert ModelRunner(model, 5, 64, References(), True, RESERVED + 2).warm_up() == [1, 2, 4, 8]


@pytest.mark.parametrize("seed", range(4))
def test_steps_ahead_change_no_token(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Sequences that come and go at any step, and end with end-of-text tokens: a step that was begun before the last
    one's tokens were known gives the tokens that it would have given afterwards, and none to a sequence that is gone.
    """
    monkeypatch.setattr(graphs, "_capture", lambda step, device: (graph := Recorded(step), graph._results))
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
    monkeypatch.setattr(graphs, "_capture", lambda step, device: (None, step()))
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


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    model = tiny(tmp_path / "model")
    (tmp_path / "bad.jsonl").write_text('{"chip": "x"}\n')
    for path, message in ((tmp_path / "bad.jsonl", "no table of tuned kernels"), (tmp_path / "absent", "No such file")):
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
