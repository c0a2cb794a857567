"""Real processes over gloo, against the oracle. They meet in a file, so no port is taken."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm.distributed import Distributed
from ladder.config import ModelConfig
from tests import oracle
from tests.processes import run_processes
from tests.tolerance import forward
from tests.weights import TINY, answer, draw, tiny

LIMIT = 120.0  # seconds, for processes that would otherwise hang; they need about ten
LAYERS = 3
TOLERANCE = forward(LAYERS, 32, 5)  # of logits of magnitude one; eight heads of four
CASES = (
    *("standard", "parallel", "ladder", "ladder-2", "ladder-3", "ladder-1-2", "ladder-2-1", "ladder-0-1"),
    *("desync-2x", "desync-3x", "desync-4x", "desync-5x", "none"),
    *("parallel-1", "parallel-2", "desync-2x-1", "desync-3x-2", "desync-3x-1:1 parallel-1:2"),
    *("standard:2 ladder:1", "ladder:2 standard:1", "desync-3x:1 ladder:2", "none:1 ladder-2:1 parallel:1"),
)


@pytest.fixture(scope="module", params=(2, 4))
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """What each rank of a world of 2 and of 4 processes computed, by name."""
    size: int = request.param
    directory = tmp_path_factory.mktemp(f"gloo{size}")
    run_processes(work, size, directory, LIMIT)
    return [torch.load(directory / f"{rank}.pt") for rank in range(size)]


def work(rank: int, size: int, directory: str) -> None:
    """One rank: all wirings, then the communicator by itself."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT))
    try:
        config, tokens = model()
        weights = draw(config)
        comm = Distributed()
        found = {text: answer(config.rewired(text), weights, tokens, comm) for text in CASES}
        torch.save(found | sums(comm) | pairs(rank, size), Path(directory) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def model() -> tuple[ModelConfig, Tensor]:
    tokens = torch.randint(TINY["vocab"], (2, 5), generator=torch.Generator().manual_seed(1))
    return tiny(LAYERS), tokens


def mine(rank: int, dtype: torch.dtype) -> Tensor:
    """[2, 3, 4] small integers, which every type adds up exactly; not contiguous, and stored in two different ways."""
    x = (torch.arange(24, dtype=dtype) + rank * 10).view(2, 3, 4)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if rank % 2 else x.repeat_interleave(2, dim=-1)[..., ::2]
    assert not x.is_contiguous()
    return x


def sums(comm: Distributed) -> dict[str, Tensor]:
    """The two operations, on inputs that are not contiguous; three sums are on the wire at once."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        pending = [comm.all_reduce(mine(comm.rank + more, dtype)) for more in (0, 1, 2)]
        for more, sum_ in enumerate(pending):
            found[f"sum {more} {dtype}"] = sum_.wait()
        found[f"gather {dtype}"] = comm.all_gather(mine(comm.rank, dtype))
    return found


def pairs(rank: int, size: int) -> dict[str, Tensor]:
    """A communicator of neighbours: the group's own rank, size and sum."""
    groups = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    comm = Distributed(groups[rank // 2])
    assert (comm.rank, comm.size) == (rank % 2, 2)
    return {"pair": comm.all_reduce(torch.tensor([float(rank)])).wait()}


def rows(text: str) -> list[str]:
    """One row name per layer."""
    if ":" not in text:
        return [text] * LAYERS
    return [name for name, count in (item.split(":") for item in text.split()) for _ in range(int(count))]


@pytest.mark.parametrize("text", CASES)
def test_logits_are_the_oracles(results: list[dict[str, Tensor]], text: str) -> None:
    config, tokens = model()
    expected = oracle.logits(config, draw(config), tokens, rows(text), ranks=len(results))
    assert expected.std() > 0.3
    for found in results:
        assert torch.equal(found[text], results[0][text])
        assert (found[text] - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_sums_and_gathers(results: list[dict[str, Tensor]], dtype: torch.dtype) -> None:
    size = len(results)
    for found in results:
        for more in (0, 1, 2):
            expected = sum((mine(rank + more, dtype) for rank in range(size)), start=torch.zeros((), dtype=dtype))
            assert found[f"sum {more} {dtype}"].dtype == dtype
            assert torch.equal(found[f"sum {more} {dtype}"], expected)
        gathered = torch.cat([mine(rank, dtype) for rank in range(size)], dim=-1)
        assert found[f"gather {dtype}"].dtype == dtype
        assert torch.equal(found[f"gather {dtype}"], gathered)


def test_a_group_of_ranks(results: list[dict[str, Tensor]]) -> None:
    for rank, found in enumerate(results):
        first = rank - rank % 2
        assert found["pair"].item() == 2 * first + 1
