"""The option `wire`: what is refused before any rank is started, and what the ranks then add up over."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ladder import LLM
from ladder.cli import main
from ladder.comm.base import Comm, Solo
from ladder.comm.symmetric import Symmetric
from ladder.engine import control, executors
from ladder.engine.control import backend, join
from ladder.engine.options import WIRES, EngineOptions
from ladder.errors import LadderError
from tests.checkpoints import tiny


def test_wires_are_known(tmp_path: Path) -> None:
    for wire in WIRES:
        assert EngineOptions(tmp_path, wire=wire).wire == wire
    with pytest.raises(LadderError, match="unknown wire 'rdma': known are auto, symmetric, nccl, gloo"):
        EngineOptions(tmp_path, wire="rdma")
    with pytest.raises(LadderError, match="wire must be str, not 1"):
        EngineOptions(tmp_path, wire=1)  # type: ignore[arg-type]


def never(*_: object, **__: object) -> None:
    raise AssertionError("a rank was started")


@pytest.mark.parametrize("wire", ["symmetric", "nccl"])
def test_gpu_wires_are_refused_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wire: str) -> None:
    monkeypatch.setattr(executors, "Processes", never)
    with pytest.raises(LadderError, match=f"wire '{wire}' is between GPUs, the device is cpu: use --device cuda"):
        LLM(tiny(tmp_path), tp=2, wire=wire)


def test_a_wire_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["generate", "--model", str(tiny(tmp_path)), "--token-ids", "5", "--tp", "2", "--wire", "nccl"]
    monkeypatch.setattr(sys, "argv", ["ladder", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert capsys.readouterr().err == "ladder: wire 'nccl' is between GPUs, the device is cpu: use --device cuda\n"


def test_nccl_is_refused_where_a_gpu_is_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(LadderError, match="wire 'nccl' needs a GPU for every rank"):
        backend("nccl", own_gpu=False)
    monkeypatch.setattr(executors, "Processes", never)
    opened: Any = SimpleNamespace(options=EngineOptions(tmp_path, tp=2, wire="nccl"), device=torch.device("cuda:0"))
    with pytest.raises(LadderError, match="wire 'nccl' needs a GPU for every rank"):
        executors.start(opened)


@pytest.mark.parametrize(
    ("wire", "own_gpu", "group", "required"),  # required: None where symmetric memory is not even tried
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
def test_the_wire_decides_the_group(
    monkeypatch: pytest.MonkeyPatch, wire: str, own_gpu: bool, group: str, required: bool | None
) -> None:
    groups: list[str] = []
    plain, built = Solo(), Solo()
    tried: list[bool] = []

    def build(inner: Comm, ear: object, device: torch.device, required: bool) -> Comm:
        assert (inner, ear, device) == (plain, "ear", torch.device("cuda:0"))
        tried.append(required)
        return built

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: groups.append(name))
    monkeypatch.setattr(dist, "new_group", lambda **_: "ear")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("Group", (), {"Options": lambda **_: None}), raising=False)
    monkeypatch.setattr(control, "Distributed", lambda: plain)
    monkeypatch.setattr(control, "Broadcast", lambda ear: ear)
    monkeypatch.setattr(Symmetric, "build", build)
    comm, ear = join(0, 2, torch.device("cuda:0"), own_gpu, wire, 1.0)
    assert groups == [group] and str(ear) == "ear"
    assert tried == ([] if required is None else [required])
    assert comm is (plain if required is None else built)
