"""The ways in which the layers of a model go to their wiring."""

import itertools

import pytest

from ladder.train.options import STALENESS_WAYS
from ladder.train.stages.staleness import StalenessSchedule

STEPS, COUNT, WIRED = 40, 9, (2, 3, 5, 6, 7, 8)


def schedule(way: str, seed: int = 1) -> StalenessSchedule:
    return StalenessSchedule(STEPS, way, WIRED, COUNT, seed)


def values(way: str, step: int) -> list[float]:
    found = schedule(way).at(step)
    return found if isinstance(found, list) else [found] * COUNT


@pytest.mark.parametrize("way", STALENESS_WAYS)
def test_from_the_original_to_the_wiring(way: str) -> None:
    assert [values(way, 0)[index] for index in WIRED] == [0.0] * len(WIRED)
    assert schedule(way).at(STEPS) == schedule(way).at(10 * STEPS) == 1.0
    rows = [values(way, step) for step in range(STEPS + 1)]
    assert all(len(row) == COUNT and all(0 <= value <= 1 for value in row) for row in rows)
    if way != "together":
        assert {row[index] for row in rows for index in range(COUNT) if index not in WIRED} == {1.0}
    means = [sum(row[index] for index in WIRED) / len(WIRED) for row in rows]
    assert means[STEPS // 2] == pytest.approx(0.5, abs=0.34) and means[-2] > 0.8


@pytest.mark.parametrize("way, order", [("first", WIRED), ("last", WIRED[::-1])])
def test_one_after_the_other(way: str, order: tuple[int, ...]) -> None:
    """None goes back, none is ahead of the one before it, and a layer is on its way while others are at rest."""
    rows = [values(way, step) for step in range(STEPS + 1)]
    for before, after in itertools.pairwise(rows):
        assert all(one <= other for one, other in zip(before, after, strict=True))
    for row in rows:
        assert [row[index] for index in order] == sorted((row[index] for index in order), reverse=True)
    assert any(row[order[0]] == 1 and row[order[-1]] == 0 for row in rows)


def test_by_chance() -> None:
    """Whole or not at all, as often as its share, the same again for a seed and a step and for no other."""
    rows = [[schedule("chance", seed).at(10) for seed in range(300)] for _ in range(2)]
    assert rows[0] == rows[1]
    drawn = [row[index] for row in rows[0] if isinstance(row, list) for index in WIRED]
    assert set(drawn) == {0.0, 1.0} and sum(drawn) / len(drawn) == pytest.approx(0.25, abs=0.05)
    assert len({tuple(values("chance", step)) for step in range(15, 25)}) > 5
