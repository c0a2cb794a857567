"""Ranks inside one process: exact sums, gradients through them, and failures that end everybody."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from ladder.comm.base import Comm
from ladder.comm.emulated import World

T = TypeVar("T")
LIMIT = 20.0  # seconds until a run counts as hanging


class Oops(Exception):
    """A rank's own error."""


@pytest.fixture(params=(1, 2, 4, 8))
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param) as world:
        yield world


def in_time(world: World, work: Callable[[Comm], T]) -> list[T]:
    """`world.run(work)`, but a run that hangs is released and fails."""
    results: list[list[T]] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(world.run(work))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    if thread.is_alive():
        world.close()
        pytest.fail(f"the ranks were not done after {LIMIT:.0f} s")
    if errors:
        raise errors[0]
    return results[0]


def noise(rank: int, number: int = 0) -> Tensor:
    """Of very different magnitudes, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(3, 5, generator=generator) * 10.0 ** torch.randint(-3, 4, (3, 5), generator=generator)


def in_rank_order(size: int, number: int = 0) -> Tensor:
    total = noise(0, number)
    for rank in range(1, size):
        total = total + noise(rank, number)
    return total


def test_ranks_and_results_are_in_order(world: World) -> None:
    assert in_time(world, lambda comm: (comm.rank, comm.size)) == [(rank, world.size) for rank in range(world.size)]


def test_sums_are_the_same_bits_on_all_ranks(world: World) -> None:
    """Also when the last rank is the first to send."""

    def work(comm: Comm) -> Tensor:
        time.sleep(0.005 * (comm.size - 1 - comm.rank))
        return comm.all_reduce(noise(comm.rank)).wait()

    for total in in_time(world, work):
        assert torch.equal(total, in_rank_order(world.size))


def test_many_sums_on_the_wire(world: World) -> None:
    """Each rank waits in an order of its own."""

    def work(comm: Comm) -> dict[int, Tensor]:
        pending = {number: comm.all_reduce(noise(comm.rank, number)) for number in range(6)}
        order = sorted(pending, reverse=comm.rank % 2 == 1)
        return {number: pending[number].wait() for number in order}

    for totals in in_time(world, work):
        for number, total in totals.items():
            assert torch.equal(total, in_rank_order(world.size, number))


def test_gather(world: World) -> None:
    """In rank order along the last dimension, also between sums."""

    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        pending = comm.all_reduce(noise(comm.rank, 1))
        gathered = comm.all_gather(noise(comm.rank))
        return gathered, pending.wait()

    for gathered, total in in_time(world, work):
        assert torch.equal(gathered, torch.cat([noise(rank) for rank in range(world.size)], dim=-1))
        assert torch.equal(total, in_rank_order(world.size, 1))


def test_gradients_flow_through_sums(world: World) -> None:
    """y_r = (r + 1) * sum(x): every x receives the gradients of all ranks' y."""
    inputs = [noise(rank).requires_grad_() for rank in range(world.size)]
    outputs = in_time(world, lambda comm: comm.all_reduce(inputs[comm.rank] * 2).wait() * (comm.rank + 1))
    torch.stack([output.sum() for output in outputs]).sum().backward()  # type: ignore[no-untyped-call]
    expected = 2.0 * sum(rank + 1 for rank in range(world.size))
    for x in inputs:
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, expected))


def test_gradients_flow_through_gathers(world: World) -> None:
    inputs = [noise(rank).requires_grad_() for rank in range(world.size)]
    outputs = in_time(world, lambda comm: comm.all_gather(inputs[comm.rank]))
    outputs[-1].square().sum().backward()  # type: ignore[no-untyped-call]
    for x in inputs:
        assert x.grad is not None
        assert torch.allclose(x.grad, 2 * x.detach())


@pytest.mark.parametrize("before", (0, 1, 3))
def test_a_rank_that_fails_ends_all_ranks(world: World, before: int) -> None:
    """Its own error is raised, not that of those who waited for it; the world can be used again."""
    broken = world.size - 1
    ended: list[int] = []

    def work(comm: Comm) -> None:
        try:
            for _ in range(before):
                comm.all_reduce(noise(comm.rank)).wait()
            if comm.rank == broken:
                raise Oops("the last rank")
            comm.all_reduce(noise(comm.rank)).wait()
        finally:
            ended.append(comm.rank)

    with pytest.raises(Oops, match="the last rank"):
        in_time(world, work)
    assert sorted(ended) == list(range(world.size))
    test_sums_are_the_same_bits_on_all_ranks(world)
    test_many_sums_on_the_wire(world)


def test_a_rank_that_fails_while_others_gather() -> None:
    def work(comm: Comm) -> Tensor:
        if comm.rank == 0:
            raise Oops("the first rank")
        return comm.all_gather(noise(comm.rank))

    with World(4) as world:
        for _ in range(2):
            with pytest.raises(Oops, match="the first rank"):
                in_time(world, work)


def test_sums_of_a_failed_run_do_not_reach_the_next(world: World) -> None:
    def send_and_fail(comm: Comm) -> None:
        for number in range(comm.rank + 1):  # every rank leaves another number behind
            comm.all_reduce(torch.full((3, 5), 1e9 + number))
        raise Oops

    with pytest.raises(Oops):
        in_time(world, send_and_fail)
    test_many_sums_on_the_wire(world)


def test_a_world_closed_in_the_middle_releases_its_ranks() -> None:
    world = World(2)
    threading.Timer(0.2, world.close).start()

    def work(comm: Comm) -> None:
        if comm.rank == 0:
            comm.all_reduce(noise(0)).wait()  # the other rank never sends

    with pytest.raises(RuntimeError):
        in_time(world, work)


def test_a_rank_that_ends_too_early_is_an_error_not_a_hang() -> None:
    def work(comm: Comm) -> None:
        if comm.rank != 1:
            comm.all_reduce(noise(comm.rank)).wait()

    with World(4) as world, pytest.raises(RuntimeError, match="rank 1 ended without a message"):
        in_time(world, work)
