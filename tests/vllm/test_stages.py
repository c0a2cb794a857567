"""Pipeline parallelism: two stages compute what one computes, whatever crosses their border."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.vllm.engines import Engine, engine
from tests.vllm.references import CLOSE, apart, checkpoint, native, prompts

# what crosses: nothing, a sum in flight, two of them, a drift that one of them carries, and a drift of its own
WIRINGS = ("standard", "ladder", "ladder-2", "parallel-1", "desync-3x-1", "desync-3x-local:3 standard:1")


@pytest.fixture(scope="module", params=(1, 2), ids=lambda tp: f"tp{tp}")
def staged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    directory = checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama", WIRINGS[-1])
    with engine(directory, request.param, pipeline_parallel_size=2) as found:
        yield found, directory


def test_two_stages_are_one(staged: tuple[Engine, Path], request: pytest.FixtureRequest) -> None:
    found, directory = staged
    tp = 2 if "tp2" in request.node.name else 1
    wrong = {}
    for wiring in WIRINGS:
        found.rewire(wiring)
        if (difference := apart(found.generate(prompts()), prompts(), partial(native, directory, wiring, tp))) > CLOSE:
            wrong[wiring] = difference
    assert not wrong
