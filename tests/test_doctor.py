"""`ladder doctor`: any machine, however little of it works, costs no traceback; its advice is `ladder plan`'s."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.bench.doctor import devices as devices_module
from ladder.bench.doctor import doctor, latency, packages, topology
from ladder.bench.doctor.advice import WIRINGS, link_of, predicted, sentences
from ladder.bench.doctor.devices import Devices
from ladder.bench.doctor.packages import EXTRA, PACKAGES, Package
from ladder.bench.doctor.topology import Topology, parsed
from ladder.comm.base import Solo
from ladder.comm.link import LINKS
from ladder.errors import LadderError, RankError, install
from ladder.perf.chips import CHIPS
from ladder.perf.plan import Deployment, predict

NVLINK = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\t0-47\t0\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tSYS\t0-47\t0\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\t48-95\t1\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\t48-95\t1\tN/A
NIC0\tPIX\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""
PCIE = """\tGPU0\tGPU1\tGPU2\tCPU Affinity
GPU0\t X \tPIX\tSYS\t0-31
GPU1\tPIX\t X \tSYS\t0-31
GPU2\tSYS\tSYS\t X \t32-63
"""


def machine(name: str, count: int, **more: Any) -> Devices:
    whole = {"torch": "2.13.0", "cuda": "13.0", "cores": 64, "capability": (9, 0), "nccl": "2.28.3"}
    return Devices(**{**whole, "gpus": (name,) * count, "gigabytes": (80.0,) * count, **more})


NVLINKED = machine(CHIPS["h100"].full_name, 8, peer_to_peer=True, symmetric_memory=True)
WORKSTATION = machine(CHIPS["rtx-4090"].full_name, 2, peer_to_peer=False)
ALONE = machine(CHIPS["h200"].full_name, 1)


def test_how_gpus_are_connected() -> None:
    found = parsed(NVLINK)
    assert len(found.pairs) == 6 and set(found.pairs.values()) == {"NV18"} and found.worst == "NV"
    found = parsed(PCIE)
    assert found.pairs == {(0, 1): "PIX", (0, 2): "SYS", (1, 2): "SYS"} and found.worst == "SYS"
    assert parsed("").worst is None and parsed("something else\nentirely").worst is None
    assert Topology({(0, 1): "WIFI"}).worst is None  # a kind that we do not know


@pytest.mark.parametrize("failure", ["missing", "fails", "hangs"])
def test_without_nvidia_smi(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: Any, **_: Any) -> Any:
        if failure == "missing":
            raise FileNotFoundError
        if failure == "hangs":
            raise subprocess.TimeoutExpired("nvidia-smi", 20)
        return subprocess.CompletedProcess(arguments, 9, "", "No devices were found")

    monkeypatch.setattr(subprocess, "run", run)
    said = {"missing": "is not there", "fails": "No devices were found", "hangs": "did not answer"}
    assert said[failure] in str(topology.topology())


@pytest.mark.parametrize("found, worst, link", [
    (NVLINKED, "NV", "nvlink_oneshot"),
    (machine("any", 8, peer_to_peer=True), "NV", "nvlink_nccl_graph"),
    (machine("any", 4, peer_to_peer=True), "PXB", "pcie_p2p_nccl"),
    (machine("any", 4, peer_to_peer=False), "PIX", "pcie_shm_tp4"),
    (WORKSTATION, "PHB", "pcie_shm_tp2"), (machine("any", 7), "SYS", "pcie_shm_tp4"),
    (ALONE, None, None), (Devices(), None, None), (WORKSTATION, None, None),
])  # fmt: skip
def test_which_link_that_is(found: Devices, worst: str | None, link: str | None) -> None:
    assert link_of(found, worst) == link and (link is None or link in LINKS)


def test_the_advice_is_the_performance_models() -> None:
    """The largest models that fit, each under every wiring, as `ladder plan` predicts them."""
    rows = predicted(NVLINKED, "nvlink_oneshot", None)
    assert [(row["size"], row["tp"]) for row in rows[:: len(WIRINGS)]] == [("llama-3-70b", 8), ("llama-3-8b", 8)]
    own = Deployment("llama-3-70b", "h100", 8, "nvlink_oneshot", 1, 1024, 512, "ladder", "ladder")
    (row,) = (row for row in rows if row["size"] == "llama-3-70b" and row["wiring"] == predict(own)["wiring"])
    assert row["tpot_ms"] == predict(own)["tpot_ms"]
    said = sentences(NVLINKED, "NV", "nvlink_oneshot", rows)
    assert said[1].startswith("llama-3-70b on 8 GPUs, batch 1: ladder")
    for share, name in ((1.04, "ladder"), (1.06, "ladder-1-2")):  # another is suggested where it is clearly faster
        ladder = rows[WIRINGS.index("ladder")]
        changed = [*rows]
        changed[WIRINGS.index("ladder-1-2")] = {**ladder, "speedup": share * ladder["speedup"]}
        times = changed[WIRINGS.index(name)]["speedup"]
        said_of_70b = sentences(NVLINKED, "NV", "nvlink_oneshot", changed)[1]
        assert f"batch 1: {name}, {times:.2f} times as fast as standard" in said_of_70b
    assert "NVLink" in said[0] and "its price in quality is not known" in " ".join(said)


def test_a_measured_latency_counts() -> None:
    slow, fast = (predicted(NVLINKED, "nvlink_oneshot", us)[0]["tpot_ms"] for us in (100.0, 5.0))
    assert slow > 1.5 * fast
    size = 8192 * 2 / LINKS["nvlink_oneshot"].beta * 1e6
    row = predicted(NVLINKED, "nvlink_oneshot", LINKS["nvlink_oneshot"].alpha * 1e6 + size)[0]
    assert row["tpot_ms"] == pytest.approx(predicted(NVLINKED, "nvlink_oneshot", None)[0]["tpot_ms"], rel=1e-3)


def test_where_nothing_is_gained() -> None:
    rows = [{**row, "speedup": 1.0 if row["speedup"] else None} for row in predicted(ALONE, None, None)]
    assert all("stay with standard" in sentence for sentence in sentences(ALONE, None, None, rows))
    assert "there is no gpu" in sentences(Devices(), None, None, [])[0].lower()
    assert "Without torch" in sentences(Devices(failure="gone"), None, None, [])[0]
    unknown = machine("Some GPU", 1)
    assert predicted(unknown, None, None) == [] and "is not in the table" in sentences(unknown, None, None, [])[0]


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = Package("nosuchmodule", "nosuch", "nosuch", "nothing")
    (tmp_path / "nosuchmodule").mkdir()
    monkeypatch.syspath_prepend(tmp_path)  # a folder of that name is no package
    assert packages.found(package) is None and packages.found(Package("torch", "torch", "torch", "")) is not None

    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    assert packages.found(Package("json", "json", "json", ""), unknown) == "of unknown version"
    extras = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    for each in PACKAGES:  # an extra that is named exists, and installs what it is named for
        if EXTRA in each.source:
            line = next(line for line in extras.splitlines() if line.startswith(f"{each.source[len(EXTRA) :]} = "))
            assert each.name in line, each
        assert each.install.startswith("pip install ") and EXTRA not in each.install


@pytest.mark.parametrize("here, topo, latencies", [
    (NVLINKED, parsed(NVLINK), {"symmetric memory": 9.5, "NCCL": 15.0}),
    (WORKSTATION, "nvidia-smi is not there", {"failure": "nccl: rank 1 failed"}),
    (ALONE, Topology({}), {}),
    (machine("Some GPU", 1, capability=(8, 0)), Topology({}), {}),
    (Devices(failure="OSError: libcudart.so: no such file"), Topology({}), {}),
    (Devices(torch="2.13.0", cores=2), Topology({}), {}),
])  # fmt: skip
def test_any_machine(here: Devices, topo: Any, latencies: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "devices", lambda: here)
    monkeypatch.setattr(doctor, "topology", lambda: topo)
    monkeypatch.setattr(latency, "all_reduce_us", lambda ranks: latencies)
    monkeypatch.setattr(doctor, "found", lambda package: None)
    report = json.loads(json.dumps(doctor.examine()))
    text = doctor.told(report)
    assert report["advice"] and all(sentence in text for sentence in report["advice"])
    assert ("pip install vllm " in text) == bool(here.gpus) and install("serve") in text
    assert all(str(value) in text for value in latencies.values())
    assert report["all_reduce_us"] == latencies
    if here.failure:
        assert here.failure in text
    if isinstance(topo, str):
        assert topo in text
    assert doctor.examine(measure=False)["all_reduce_us"] == {}


def test_a_broken_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> dict[str, Any]:
        raise OSError("libcudart.so:\n no such file")

    monkeypatch.setattr(devices_module, "_gpus", broken)
    assert devices_module.devices().failure == "OSError: libcudart.so: no such file"


def test_latency_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one rank yields, and that a failure is a sentence."""
    monkeypatch.setattr(latency, "milliseconds", lambda work: (work(), [0.32, 0.16, 0.48])[1])
    assert list(latency.timed(Solo(), torch.device("cpu"))) == [("Solo", 20.0)]

    def ranks(size: int, device: torch.device, work: Any, comm_backend: str) -> Any:
        if comm_backend == "nccl":
            raise RankError("rank 1 failed: no")
        return iter([("symmetric memory", 9.0)])

    monkeypatch.setattr(latency, "stream_ranks", ranks)
    assert latency.all_reduce_us(2) == {"symmetric memory": 9.0, "failure": "nccl: rank 1 failed: no"}
    assert issubclass(LadderError, ValueError)


def test_the_command(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = run("doctor")
    assert (status, err) == (0, "") and f"torch {torch.__version__}" in out and "Packages" in out
    status, out, _ = run("doctor", "--json")
    report = json.loads(out)
    assert status == 0 and report["python"] == sys.version.split()[0] and report["packages"]["torch"]


def test_without_torch_a_command_is_a_sentence(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(doctor, "examine", missing)
    status, out, err = run("doctor")
    assert (status, out, err.count("\n")) == (1, "", 1) and "torch is not installed: pip install torch" in err
    monkeypatch.setattr(doctor, "examine", lambda *_: __import__("nosuchmodule"))
    with pytest.raises(ModuleNotFoundError):
        run("doctor")
