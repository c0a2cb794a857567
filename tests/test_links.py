"""Links: names, numbers, and a communicator as slow as one."""

import time

import pytest
import torch
from torch import Tensor

from ladder.comm.base import Comm
from ladder.comm.emulated import World
from ladder.comm.link import LINKS, Link
from ladder.comm.one_rank import OneRank
from ladder.comm.timed import Timed
from ladder.errors import LadderError


def test_names() -> None:
    """The published figures: microseconds, and GB/s of message."""
    figures = {name: (round(link.alpha * 1e6, 3), round(link.beta / 1e9, 3)) for name, link in LINKS.items()}
    assert figures == {
        "nvlink_fused": (5, 250),
        "nvlink_oneshot": (8, 70),
        "nvlink_multimem": (9, 210),
        "nvlink_nccl_graph": (13, 140),
        "nvlink_nccl": (24, 250),
        "pcie_p2p_nccl": (20, 6),
        "pcie_shm_tp2": (20, 6),
        "pcie_shm_tp4": (26, 6),
        "pcie_shm_tp8": (62, 6),
        "ib_2node_nccl": (46, 14),
        "ib_2node_tuned": (20, 25),
        "ethernet_10g": (40, 1.25),
        "ethernet_1g": (100, 0.125),
    }
    assert all(link.what and link.source for link in LINKS.values())


@pytest.mark.parametrize(
    "text, alpha, beta",
    [
        ("50us,10GB/s", 50e-6, 10e9),
        ("1.5ms,200MB/s", 1.5e-3, 200e6),
        ("0us,1KB/s", 0.0, 1e3),
        ("2s, 0.5GB/s", 2.0, 5e8),
        ("pcie_shm_tp8", 62e-6, 6e9),
    ],
)
def test_read(text: str, alpha: float, beta: float) -> None:
    link = Link.parse(text)
    assert (link.alpha, link.beta) == pytest.approx((alpha, beta))
    assert link.seconds(3000) == pytest.approx(alpha + 3000 / beta)


@pytest.mark.parametrize(
    "text", ["", "fast", "50us", "50us,10", "10GB/s,50us", "-1us,1GB/s", "1us,0GB/s", "1us,1GB/s,2"]
)
def test_refused(text: str) -> None:
    with pytest.raises(LadderError, match=r"unknown link .*50us,10GB/s.*nvlink_nccl") as caught:
        Link.parse(text)
    assert "\n" not in str(caught.value)


def test_a_sum_arrives_no_earlier_than_its_time_and_nobody_burns_it() -> None:
    comm = Timed(OneRank(2), Link(0.05, 1e6))  # 50 ms, and 1 us per byte
    begin, burnt = time.monotonic(), time.thread_time()
    comm.all_reduce(torch.zeros(12_500)).wait()  # 50,000 bytes
    assert time.monotonic() - begin >= 0.1
    assert time.thread_time() - burnt < 0.05
    begin = time.monotonic()
    comm.all_gather(torch.zeros(2))
    assert time.monotonic() - begin >= 0.05


def test_a_reader_that_comes_late_does_not_wait() -> None:
    comm = Timed(OneRank(2), Link(0.05, 1e12))
    pending = comm.all_reduce(torch.zeros(2))
    time.sleep(0.06)
    begin = time.monotonic()
    pending.wait()
    assert time.monotonic() - begin < 0.04


def test_one_message_after_another() -> None:
    comm = Timed(OneRank(2), Link(0.05, 1e12))
    begin = time.monotonic()
    first, second = comm.all_reduce(torch.zeros(2)), comm.all_reduce(torch.zeros(2))
    second.wait()
    assert time.monotonic() - begin >= 0.1
    first.wait()


def test_the_sum_is_the_inner_ones() -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor, int, int]:
        timed = Timed(comm, Link(0.001, 1e9))
        x = torch.full((3,), float(comm.rank))
        return timed.all_reduce(x.clone()).wait(), timed.all_gather(x), timed.rank, timed.size

    with World(3) as world:
        for rank, (total, joined, *place) in enumerate(world.run(work)):
            assert total.tolist() == [3.0] * 3 and joined.tolist() == [0.0] * 3 + [1.0] * 3 + [2.0] * 3
            assert place == [rank, 3]
