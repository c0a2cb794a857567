"""The order of sends, waits and sub-blocks: what a wiring is for, and what the logits do not show."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ladder.comm.base import Comm, Solo
from ladder.comm.emulated import World
from tests.recording import Event, Recording, record_sub_blocks
from tests.weights import decoder, draw, tiny

# S: a sum is sent, C: a sub-block is computed, W: a sum has been waited for. S0 is the embedding's.
SCHEDULES = {
    "standard": "S0 W0  C1 S1 W1  C2 S2 W2  C3 S3 W3  C4 S4 W4",
    "parallel": "S0 W0  C1  C2 S1 W1  C3  C4 S2 W2",
    "parallel-1": "S0 W0  C1  C2 S1  C3  C4 S2 W1  W2",
    "ladder": "S0 W0  C1 S1  C2 S2 W1  C3 S3 W2  C4 S4 W3  W4",
    "ladder-2": "S0 W0  C1 S1  C2 S2  C3 S3 W1  C4 S4 W2  W3 W4",
    "ladder-3": "S0 W0  C1 S1  C2 S2  C3 S3  C4 S4 W1  W2 W3 W4",
    "ladder-4": "S0 W0  C1 S1  C2 S2  C3 S3  C4 S4  W1 W2 W3 W4",
    "ladder-0-1": "S0 W0  C1 S1  C2 S2 W1 W2  C3 S3  C4 S4 W3 W4",
    "ladder-1-0": "S0 W0  C1 S1 W1  C2 S2  C3 S3 W2 W3  C4 S4 W4",
    "ladder-1-2": "S0 W0  C1 S1  C2 S2 W1  C3 S3  C4 S4 W2 W3 W4",
    "ladder-2-1": "S0 W0  C1 S1  C2 S2  C3 S3 W1 W2  C4 S4 W3 W4",
    "desync-2x": "S0 W0  C1  C2 S1 W1  C3  C4 S2 W2",
    "desync-3x": "S0 W0  C1  C2  C3 S1 W1  C4 S2 W2",
    "desync-3x-local": "S0 W0  C1  C2  C3 S1 W1  C4",
    "desync-4x": "S0 W0  C1  C2  C3  C4 S1 W1",
    "desync-5x": "S0 W0  C1  C2  C3  C4 S1 W1",
    "desync-5x-local": "S0 W0  C1  C2  C3  C4",
    "desync-2x-1": "S0 W0  C1  C2 S1  C3  C4 S2 W1  W2",
    "desync-3x-1": "S0 W0  C1  C2  C3 S1  C4 S2 W1  W2",
    "desync-3x-1-local": "S0 W0  C1  C2  C3 S1  C4  W1",
    "none": "S0 W0  C1  C2  C3  C4",
    # seams
    "standard:1 ladder:1": "S0 W0  C1 S1 W1  C2 S2  C3 S3 W2  C4 S4 W3 W4",
    "ladder:1 standard:1": "S0 W0  C1 S1  C2 S2 W1 W2  C3 S3 W3  C4 S4 W4",
    "parallel:1 ladder-2:1": "S0 W0  C1  C2 S1  C3 S2  C4 S3 W1  W2 W3",
    "ladder-2:1 parallel:1": "S0 W0  C1 S1  C2 S2 W1 W2  C3  C4 S3 W3",
    "desync-2x:1 ladder:1": "S0 W0  C1  C2 S1  C3 S2 W1  C4 S3 W2 W3",
    "ladder:1 desync-2x:1": "S0 W0  C1 S1  C2 S2 W1 W2  C3  C4 S3 W3",
    "desync-3x:1 desync-2x:1": "S0 W0  C1  C2  C3  C4 S1 W1",
    "standard:1 desync-3x:2": "S0 W0  C1 S1 W1  C2 S2 W2  C3  C4  C5 S3 W3  C6 S4 W4",
    "desync-3x:1 ladder:1": "S0 W0  C1  C2  C3 S1  C4 S2 W1  W2",  # the run ends with drift: others follow
    "ladder:1 none:1": "S0 W0  C1 S1  C2 S2 W1 W2  C3  C4",
    "none:1 ladder:1": "S0 W0  C1  C2  C3 S1  C4 S2 W1  W2",
    # a second layer of each kind, where the lags have settled
    "parallel-1:3": "S0 W0  C1  C2 S1  C3  C4 S2 W1  C5  C6 S3 W2  W3",
    "parallel-2:4": "S0 W0  C1  C2 S1  C3  C4 S2  C5  C6 S3 W1  C7  C8 S4 W2  W3 W4",
    "desync-2x-1:3": "S0 W0  C1  C2 S1  C3  C4 S2 W1  C5  C6 S3 W2  W3",
    "parallel-1:1 ladder:1 parallel-1:1": "S0 W0  C1  C2 S1  C3 S2 W1  C4 S3 W2  C5  C6 S4 W3  W4",
    "ladder-1-2:3": "S0 W0  C1 S1  C2 S2 W1  C3 S3  C4 S4 W2 W3  C5 S5  C6 S6 W4 W5 W6",
    "standard:1 ladder:1 standard:1": "S0 W0  C1 S1 W1  C2 S2  C3 S3 W2  C4 S4 W3 W4  C5 S5 W5  C6 S6 W6",
}

ALL_REDUCES_OF_SIX_LAYERS = {
    **dict.fromkeys(("standard", "ladder", "ladder-2", "ladder-1-2", "ladder-0-1", "desync-1x", "desync-1x-2"), 12),
    **{"parallel-1": 6, "parallel-7": 6, "desync-2x-1": 6, "desync-5x-3": 3, "desync-5x-3-local": 2},
    **{"parallel": 6, "desync-2x": 6, "desync-3x": 4, "desync-4x": 3, "desync-5x": 3, "desync-12x": 1, "none": 0},
    **{"parallel:3 ladder:3": 9, "none:3 standard:3": 6, "desync-4x:3 desync-5x:3": 3, "desync-5x:3 desync-4x:3": 3},
}


def events(text: str, layers: int, comm: Comm) -> list[Event]:
    """What one forward pass of one rank does, in order."""
    config = tiny(layers).rewired(text)
    log: list[Event] = []
    model = decoder(config, draw(config), Recording(comm, log))
    record_sub_blocks(model, log)
    model(torch.tensor([[1, 12, 3]]))
    return log


def written(schedule: str) -> list[Event]:
    kinds = {"S": "send", "C": "compute", "W": "wait"}
    return [(kinds[word[0]], int(word[1:])) for word in schedule.split()]


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("text", SCHEDULES)
def test_schedule(worlds: dict[int, World], text: str, ranks: int) -> None:
    expected = written(SCHEDULES[text])
    layers = max(number for kind, number in expected if kind == "compute") // 2
    for log in worlds[ranks].run(lambda comm: events(text, layers, comm)):
        assert log == expected


@pytest.mark.parametrize("lag", range(5))
def test_a_ladders_all_reduce_runs_beside_the_next_sub_blocks(lag: int) -> None:
    """All-reduce i is waited for after sub-block i + lag has been computed and sent, before the next one is."""
    log = events(f"ladder-{lag}", 5, Solo())
    for number in range(1, 11):
        waited = log.index(("wait", number))
        assert waited > log.index(("compute", min(number + lag, 10)))
        assert waited > log.index(("send", min(number + lag, 10)))
        if number + lag + 1 <= 10:
            assert waited < log.index(("compute", number + lag + 1))


def test_ladder_1_2_gives_the_mlps_all_reduce_a_whole_layer() -> None:
    """Attention's all-reduce runs beside the MLP; the MLP's beside the next attention and the next MLP."""
    log = events("ladder-1-2", 5, Solo())
    for number in range(1, 8):
        beside = 1 if number % 2 else 2
        waited = log.index(("wait", number))
        assert log.index(("send", number + beside)) < waited < log.index(("compute", number + beside + 1))


@pytest.mark.parametrize("text", ALL_REDUCES_OF_SIX_LAYERS)
def test_number_of_all_reduces(text: str) -> None:
    log = events(text, 6, Solo())
    assert sum(kind == "send" for kind, _ in log) == 1 + ALL_REDUCES_OF_SIX_LAYERS[text]
    config = tiny(6).rewired(text)
    assert config.wiring.all_reduces() == ALL_REDUCES_OF_SIX_LAYERS[text]


ROWS = (
    *("standard", "parallel", "parallel-1", "parallel-2", "ladder", "ladder-2", "ladder-3", "ladder-1-2"),
    *("desync-2x", "desync-3x", "desync-2x-1", "desync-3x-2", "none"),
)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(rows=st.lists(st.sampled_from(ROWS), min_size=1, max_size=5), ranks=st.sampled_from((1, 2)))
def test_every_sum_is_waited_for_once_and_in_order(worlds: dict[int, World], rows: list[str], ranks: int) -> None:
    text = " ".join(f"{name}:1" for name in rows)
    first, *others = worlds[ranks].run(lambda comm: events(text, len(rows), comm))
    assert all(log == first for log in others)
    sent, waited, computed = (
        [number for kind, number in first if kind == wanted] for wanted in ("send", "wait", "compute")
    )
    assert sent == waited == list(range(len(sent)))
    assert computed == list(range(1, 2 * len(rows) + 1))
    assert first[:3] == [("send", 0), ("wait", 0), ("compute", 1)]
    assert len(first) == len(sent) + len(waited) + len(computed)  # nothing else communicates
