"""Sums over symmetric memory: which kernel for which message, and who falls back when.

What needs a GPU is at the end; its ranks share one, which torch allows when it is told to.
"""

import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ladder import LLM, SamplingParams
from ladder.comm import symmetric
from ladder.comm.base import Comm
from ladder.comm.distributed import Distributed
from ladder.comm.symmetric import MULTICAST, ONE_SHOT, TWO_SHOTS, Symmetric, add, choose
from ladder.errors import LadderError
from tests.checkpoints import tiny
from tests.processes import run_processes

LIMIT = 60.0  # seconds, for processes that would otherwise hang; they need about ten
KIB, MIB = 1 << 10, 1 << 20
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("size", "count", "multicast", "kernel"),
    [
        (2, 4, True, ONE_SHOT),
        (2, 8 * MIB, True, ONE_SHOT),  # for two ranks it is never more traffic
        (3, 256 * KIB, True, ONE_SHOT),
        (3, 256 * KIB + 4, True, MULTICAST),
        (4, 256 * KIB + 4, False, TWO_SHOTS),
        (8, 256 * KIB, False, ONE_SHOT),
        (8, 8 * MIB, True, MULTICAST),
        (8, 8 * MIB, False, TWO_SHOTS),
        (8, 8 * MIB + 4, True, None),  # no room
        (8, 0, True, None),
    ],
)
def test_the_kernel_by_size_and_support(size: int, count: int, multicast: bool, kernel: str | None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert choose(size, count, dtype, multicast) == kernel
    assert choose(size, count, torch.float16, multicast) is None
    assert choose(size, count, torch.float64, multicast) is None
    assert choose(size, count, torch.float32, multicast, room=3) is None


def doubled(kernel: str) -> Callable[..., Tensor]:
    """A kernel of two ranks that send the same, as strict as torch's: whole grains only, from and to where they fit."""

    def one_shot(slot: Tensor, what: str, group: str, out: Tensor) -> Tensor:
        assert out.shape == slot.shape and out.data_ptr() % 16 == 0
        return out.copy_(slot * 2)

    def in_place(slot: Tensor, what: str, group: str) -> Tensor:
        return slot.mul_(2)

    def run(slot: Tensor, what: str, group: str, *out: Tensor) -> Tensor:
        assert (what, group) == ("sum", "a group") and slot.is_contiguous()
        assert slot.data_ptr() % 16 == 0 and slot.numel() * slot.element_size() % 16 == 0
        return (one_shot if kernel == ONE_SHOT else in_place)(slot, what, group, *out)

    return run


@pytest.mark.parametrize("kernel", [ONE_SHOT, TWO_SHOTS, MULTICAST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3, 4, 7, 8, 64, 65])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_message_is_padded_and_comes_back_whole(
    monkeypatch: pytest.MonkeyPatch, kernel: str, dtype: torch.dtype, count: int, shift: int
) -> None:
    monkeypatch.setattr(symmetric, "_kernel", doubled)
    memory = torch.full((2, 272), 255, dtype=torch.uint8)  # not a number, in both types
    around = torch.arange(count + 3, dtype=dtype)
    x = around[shift : shift + count]  # shifted, it begins where no grain does
    expected = 2 * x
    add(x, memory[1], kernel, "a group")
    assert torch.equal(x, expected)
    assert torch.equal(around[shift + count :], torch.arange(shift + count, count + 3, dtype=dtype))
    assert (memory[0] == 255).all()


class Library:
    """Stands for torch's module, on a machine whose ranks fail where they are told to."""

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fails == name:
            raise RuntimeError(f"no {name}\nand where that was")

    def empty(self, shape: tuple[int, int], **_: object) -> Tensor:
        self._call("memory")
        return torch.full(shape, 255, dtype=torch.uint8)

    def rendezvous(self, *_: object) -> Any:
        self._call("meeting")
        return type("Handle", (), {"multicast_ptr": 0, "offset": 0})


def in_processes(work: Callable[..., None], size: int, directory: Path) -> list[dict[str, Any]]:
    """What each rank saved."""
    run_processes(work, size, directory, LIMIT)
    return [torch.load(directory / f"{rank}.pt") for rank in range(size)]


def decide(rank: int, size: int, directory: str) -> None:
    """One rank of a world where symmetric memory fails in several places, on one rank or on all."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT))
    group = dist.new_group(backend="gloo")
    inner = Distributed()
    found: dict[str, Any] = {}

    def attempt(name: str, device: str) -> None:
        built = Symmetric.build(inner, group, torch.device(device))
        found[name] = [built is inner]
        try:
            Symmetric.build(inner, group, torch.device(device), required=True)
        except LadderError as error:
            found[name].append(str(error))

    attempt("on a CPU", "cpu")
    found["after"] = inner.all_reduce(torch.ones(1)).wait().item()  # the group is as good as before
    for where in ("memory", "meeting"):
        library = Library(where if rank == 1 else "")
        symmetric._library = lambda device, library=library: library  # type: ignore[misc]
        attempt(f"no {where} on one rank", "cuda:0")
        found[f"calls without {where}"] = library.calls
    symmetric._machine = lambda: f"machine {rank}"
    attempt("two machines", "cuda:0")
    torch.save(found, Path(directory) / f"{rank}.pt")
    dist.destroy_process_group()


def test_all_ranks_fall_back_together(tmp_path: Path) -> None:
    reasons = {
        "on a CPU": "rank 0: it connects GPUs, the device is cpu",
        "no memory on one rank": "rank 1: no memory",
        "no meeting on one rank": "rank 1: no meeting",
        "two machines": "rank 0: the ranks are on 2 machines",
    }
    for found in in_processes(decide, 2, tmp_path):
        for name, reason in reasons.items():
            assert found[name] == [True, f"symmetric memory cannot be had, {reason}: leave --comm-backend to auto"]
        assert found["after"] == 2.0
        assert found["calls without memory"] == ["memory"] * 2  # nobody went on to a meeting that could not be
        assert found["calls without meeting"] == ["memory", "meeting"] * 2


class Instant:
    """Stands for a stream, an event and the context that a stream is current in: the CPU does everything at once."""

    def __init__(self, *_: object, **__: object) -> None:
        self.wait_stream = self.wait_event = lambda _: None

    def record_event(self) -> "Instant":
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def whole(rank: int, size: int, directory: str) -> None:
    """One rank of the whole way from `build` to a sum, with the CPU in the GPU's place and gloo inside the kernels."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT))
    for name in ("Stream", "stream", "current_stream"):
        setattr(torch.cuda, name, Instant)
    library, used, wrong = Library(""), set(), {""}
    symmetric._library = lambda device: library

    def kernel(name: str) -> Callable[..., Tensor]:
        def run(slot: Tensor, what: str, group: str, *out: Tensor) -> Tensor:
            used.add((name, slot.storage_offset() > 0))
            dist.all_reduce(slot)
            slot += name in wrong and rank == 0
            return out[0].copy_(slot) if out else slot

        return run

    symmetric._kernel = kernel
    symmetric.PRESENT = False  # a kernel of our own needs memory that is really mapped
    inner, group = Distributed(), dist.new_group(backend="gloo")
    found: dict[str, Any] = {}
    for dtype in symmetric.DTYPES:
        comm = Symmetric.build(inner, group, torch.device("cpu"), max_bytes=2 * MIB)
        found[f"built {dtype}"] = isinstance(comm, Symmetric)
        used.clear()
        sent = [(torch.arange(count) % 31 + rank).to(dtype) for count in (5, 64, 200_000, 1_000_000, 0)]
        pending = [comm.all_reduce(x) for x in sent]
        found[f"sums {dtype}"] = [sum_.wait() for sum_ in reversed(pending)][::-1]
        found[f"used {dtype}"] = sorted(used)
    found["gathered"] = comm.all_gather(torch.full((1, 2), rank))
    wrong.add(TWO_SHOTS)
    found["wrong"] = Symmetric.build(inner, group, torch.device("cpu"), max_bytes=2 * MIB) is inner
    torch.save(found, Path(directory) / f"{rank}.pt")
    dist.destroy_process_group()


def test_the_whole_way_without_a_gpu(tmp_path: Path) -> None:
    size = 3
    for found in in_processes(whole, size, tmp_path):
        for dtype in symmetric.DTYPES:
            assert found[f"built {dtype}"]
            assert found[f"used {dtype}"] == [(ONE_SHOT, False), (ONE_SHOT, True), (TWO_SHOTS, False)] + (
                [(TWO_SHOTS, True)] if dtype is torch.bfloat16 else []  # in float32 the largest has no room
            )
            for count, x in zip((5, 64, 200_000, 1_000_000, 0), found[f"sums {dtype}"], strict=True):
                assert x.dtype == dtype and torch.equal(x, (torch.arange(count) % 31 * 3 + 3).to(dtype))
        assert found["gathered"].tolist() == [[0, 0, 1, 1, 2, 2]]
        assert found["wrong"]  # though it is only the first rank's sum that is


def test_gpus_that_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda mine, other: other != 2)
    symmetric._check_peers([("here", 0), ("here", 1), ("here", 1)], torch.device("cuda:0"))
    with pytest.raises(RuntimeError, match="cuda:0 cannot map the memory of cuda:2"):
        symmetric._check_peers([("here", 0), ("here", 2)], torch.device("cuda:0"))


SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def sums(comm: Comm, device: torch.device) -> None:
    """One rank on a shared GPU: eight sums at once, of several sizes and types, then the same in a CUDA graph."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    assert isinstance(comm, Symmetric)
    counts = (1, 3, 64, 1000, 4097, 100_003, 262_144, 2_000_000)

    def mine(count: int, more: int) -> Tensor:
        """Small integers, which every type adds up exactly."""
        return (torch.arange(count, device=device) % 31 + comm.rank + more).float()

    def check(found: list[Tensor], more: int) -> None:
        for x, count in zip(found, counts, strict=True):
            each = torch.arange(count, device=device) % 31
            expected = comm.size * (each + more) + sum(range(comm.size))
            assert torch.equal(x.double(), expected.double()), (x.dtype, count, more)

    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # the last goes to the other communicator
        pending = [comm.all_reduce(mine(count, 1).to(dtype)) for count in counts]
        check([sum_.wait() for sum_ in pending], 1)
    given = [mine(count, 2) for count in counts]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pending = [comm.all_reduce(x.clone()) for x in given]
        taken = [sum_.wait().clone() for sum_ in pending]
    for more in (3, 4, 5):
        for x, count in zip(given, counts, strict=True):
            x.copy_(mine(count, more))
        for x in taken:
            x.fill_(float("nan"))
        graph.replay()
        check(taken, more)


@needs_gpu
@pytest.mark.parametrize("size", [2, 4])
def test_sums_of_ranks_that_share_a_gpu(size: int) -> None:
    names = "import torch; from ladder.bench.ranks import run_ranks; from tests.test_symmetric import sums"
    done = python(
        ["-c", f"{names}; run_ranks({size}, torch.device('cuda:0'), sums, comm_backend='symmetric')"], told=True
    )
    assert done.returncode == 0, done.stderr


def python(arguments: list[str], told: bool) -> subprocess.CompletedProcess[str]:
    """In a process of its own: this one's nursery of ranks is older than what is told to torch."""
    told_torch = {name: value for name, value in os.environ.items() if name != SHARE} | ({SHARE: "1"} if told else {})
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=told_torch, capture_output=True, text=True, timeout=LIMIT)


def ladder(arguments: list[str], told: bool) -> subprocess.CompletedProcess[str]:
    return python(["-m", "ladder", "generate", *arguments], told)


@needs_gpu
def test_tokens_of_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    with LLM(model, wiring="ladder") as llm:
        expected = llm.generate([[5, 17, 9]], SamplingParams(8))[0].token_ids
    arguments = ["--model", str(model), "--wiring", "ladder", "--token-ids", "5,17,9", "--max-new-tokens", "8"]
    done = ladder([*arguments, "--json", "--tp", "2", "--device", "cuda:0", "--comm-backend", "symmetric"], told=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == expected


@needs_gpu
def test_a_shared_gpu_is_refused(tmp_path: Path) -> None:
    arguments = [
        "--model",
        str(tiny(tmp_path)),
        "--token-ids",
        "5",
        "--tp",
        "2",
        "--device",
        "cuda:0",
        "--comm-backend",
    ]
    done = ladder([*arguments, "symmetric"], told=False)
    assert done.returncode == 2 and "symmetric memory cannot be had, rank 0: " in done.stderr
    done = ladder([*arguments, "nccl"], told=False)
    assert done.returncode == 2 and "comm_backend 'nccl' needs a GPU for every rank" in done.stderr
