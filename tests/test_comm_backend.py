"""The option `comm_backend`: what is refused before any rank is started, and which process group it gives."""

import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ladder import LLM
from ladder.cli import main
from ladder.comm.base import Comm, Solo
from ladder.comm.distributed import Distributed
from ladder.comm.symmetric import Symmetric
from ladder.engine.executors import control, start
from ladder.engine.executors.control import group_backend, join
from ladder.engine.options import COMM_BACKENDS, EngineOptions
from ladder.errors import LadderError
from tests.checkpoints import tiny


def test_backends_are_known(tmp_path: Path) -> None:
    for backend in COMM_BACKENDS:
        assert EngineOptions(tmp_path, comm_backend=backend).comm_backend == backend
    with pytest.raises(LadderError, match="unknown comm_backend 'rdma': known are auto, symmetric, nccl, gloo"):
        EngineOptions(tmp_path, comm_backend="rdma")
    with pytest.raises(LadderError, match="comm_backend must be str, not 1"):
        EngineOptions(tmp_path, comm_backend=1)  # type: ignore[arg-type]


def never(*_: object, **__: object) -> None:
    raise AssertionError("a rank was started")


@pytest.mark.parametrize("backend", ["symmetric", "nccl"])
def test_gpu_backends_are_refused_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str) -> None:
    monkeypatch.setattr(start, "MultiProcessExecutor", never)
    with pytest.raises(
        LadderError, match=f"comm_backend '{backend}' connects GPUs, the device is cpu: use --device cuda"
    ):
        LLM(tiny(tmp_path), tp=2, comm_backend=backend)


def test_a_backend_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["generate", "--model", str(tiny(tmp_path)), "--token-ids", "5", "--tp", "2", "--comm-backend", "nccl"]
    monkeypatch.setattr(sys, "argv", ["ladder", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert (
        capsys.readouterr().err == "ladder: comm_backend 'nccl' connects GPUs, the device is cpu: use --device cuda\n"
    )


def test_nccl_is_refused_where_a_gpu_is_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(LadderError, match="comm_backend 'nccl' needs a GPU for every rank"):
        group_backend("nccl", own_gpu=False)
    monkeypatch.setattr(start, "MultiProcessExecutor", never)
    setup: Any = SimpleNamespace(
        options=EngineOptions(tmp_path, tp=2, comm_backend="nccl"), device=torch.device("cuda:0"), rewired_remark=None
    )
    with pytest.raises(LadderError, match="comm_backend 'nccl' needs a GPU for every rank"):
        start.start(setup)


@pytest.mark.parametrize(
    ("backend", "own_gpu", "group", "required"),  # required: None where symmetric memory is not even tried
    [
        ("auto", True, "nccl", False),
        ("auto", False, "gloo", None),
        ("symmetric", True, "nccl", True),
        ("symmetric", False, "gloo", True),
        ("nccl", True, "nccl", None),
        ("gloo", True, "gloo", None),
        ("gloo", False, "gloo", None),
    ],
)
def test_the_option_decides_the_group(
    monkeypatch: pytest.MonkeyPatch, backend: str, own_gpu: bool, group: str, required: bool | None
) -> None:
    groups: list[str] = []
    limits: list[int] = []
    plain, built = Solo(), Solo()
    tried: list[bool] = []

    def build(inner: Comm, control_group: object, device: torch.device, required: bool) -> Comm:
        assert (inner, control_group, device) == (plain, "control_group", torch.device("cuda:0"))
        tried.append(required)
        return built

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: groups.append(name))

    def new_group(backend: str, timeout: timedelta, pg_options: Any = None) -> str:
        return "control_group" if backend == "gloo" else f"at most {pg_options.config.max_ctas}"

    def distributed(group: None = None, limited: str | None = None, multiprocessors: int = 0) -> Comm:
        assert limited is None or limited == f"at most {multiprocessors}"
        limits.append(multiprocessors)
        return plain

    for name in ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_MIN_NCHANNELS"):
        monkeypatch.delenv(name, raising=False)
    options = {"Options": lambda **_: SimpleNamespace(config=SimpleNamespace(max_ctas=None))}
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("Group", (), options), raising=False)
    monkeypatch.setattr(control, "Distributed", distributed)
    monkeypatch.setattr(control, "BroadcastControl", lambda control_group, key: control_group)
    monkeypatch.setattr(control, "greet", lambda *_: b"")
    monkeypatch.setattr(Symmetric, "build", build)
    comm, control_group = join(0, 2, torch.device("cuda:0"), own_gpu, backend, 1.0)
    assert groups == [group] and str(control_group) == "control_group"
    assert limits == [control.MULTIPROCESSORS if group == "nccl" else 0]
    assert tried == ([] if required is None else [required])
    assert comm is (plain if required is None else built)


def test_small_messages_go_where_few_thread_blocks_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, str]] = []

    def all_reduce(x: torch.Tensor, group: str, async_op: bool) -> SimpleNamespace:
        sent.append((len(x), group))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    comm = Distributed("all", "limited", 8)  # type: ignore[arg-type]
    for count in (1, 1 << 20, (1 << 20) + 1):
        comm.all_reduce(torch.zeros(count)).wait()
    assert sent == [(1, "limited"), (1 << 20, "limited"), ((1 << 20) + 1, "all")] and comm.multiprocessors == 8
    assert Distributed("all", None, 8).multiprocessors == 0  # type: ignore[arg-type]
