"""`ladder doctor`: everything it has found, as one object and as text."""

import platform
from dataclasses import asdict
from typing import Any

from ladder import __version__
from ladder.bench.doctor.advice import link_of, predicted, sentences
from ladder.bench.doctor.devices import Devices, devices
from ladder.bench.doctor.packages import PACKAGES, found
from ladder.bench.doctor.topology import KINDS, Topology, topology

LIMITED = (8, 9)  # compute capability from which on kernels convert fp8


def examine(measure: bool = True) -> dict[str, Any]:
    """What there is, what is missing, and what suits it. `measure`: time all-reduces where there are several GPUs."""
    here = devices()
    how = topology() if here.gpus else Topology({})
    worst = how.worst if isinstance(how, Topology) else None
    latency: dict[str, Any] = {}
    if measure and here.ranks > 1 and here.nccl is not None:
        from ladder.bench.doctor.latency import all_reduce_us

        latency = all_reduce_us(here.ranks)
    link = link_of(here, worst)
    times = [value for value in latency.values() if isinstance(value, float)]
    rows = predicted(here, link, min(times, default=None))
    packages = {package.name: found(package) for package in PACKAGES}
    install: dict[str, list[str]] = {}
    for package in PACKAGES:
        if packages[package.name] is None and (here.gpus or not package.gpu):
            install.setdefault(package.install, []).append(package.what)
    return {
        "ladder": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": asdict(here),
        "connection": worst,
        "connection_unknown": how if isinstance(how, str) else None,
        "all_reduce_us": latency,
        "link": link,
        "packages": packages,
        "predicted": rows,
        "advice": sentences(here, worst, link, rows),
        "install": install,
    }


def told(report: dict[str, Any]) -> str:
    """The same as text."""
    here = Devices(**report["devices"])
    lines = [f"ladder {report['ladder']}, Python {report['python']}, {report['platform']}"]
    lines += _devices(here, report)
    lines += ["", "Packages"]
    lines += [f"  {name:<20}{version or '-'}" for name, version in report["packages"].items()]
    lines += ["", "What suits this machine", *(f"  {sentence}" for sentence in report["advice"])]
    if report["install"]:
        lines += ["", "What is missing, and how to get it"]
        lines += [f"  {command}  # {'; '.join(what)}" for command, what in report["install"].items()]
    return "\n".join(lines)


def _devices(here: Devices, report: dict[str, Any]) -> list[str]:
    if here.failure is not None:
        return [f"  torch cannot be used: {here.failure}"]
    built = f"for CUDA {here.cuda}" if here.cuda else "for CPUs"
    bf16 = "with bf16 products" if here.bf16_on_cpu else "no bf16 products: float32 is used instead"
    lines = [f"  torch {here.torch}, built {built}", f"  CPU: {here.cores} cores, {bf16}"]
    if not here.gpus:
        return [*lines, "  GPU: none that torch sees"]
    for number, (name, gigabytes) in enumerate(zip(here.gpus, here.gigabytes, strict=True)):
        lines.append(f"  GPU {number}: {name}, {gigabytes:g} GB")
    assert here.capability is not None
    if tuple(here.capability) < LIMITED:
        lines.append("  compute capability below 8.9: no fp8 cache in kernels")
    if len(here.gpus) > 1:
        how = KINDS.get(report["connection"] or "", report["connection_unknown"] or "unknown")
        lines.append(f"  between GPUs: {how}; peer-to-peer {_yes(here.peer_to_peer)}; NCCL {here.nccl or 'none'}; ")
        lines[-1] += f"symmetric memory {_yes(here.symmetric_memory)}"
        for name, value in report["all_reduce_us"].items():
            lines.append(f"  all-reduce of 16 KB, {name}: {value}{' us' if isinstance(value, float) else ''}")
    return lines


def _yes(value: bool | None) -> str:
    return "yes" if value else "no"
