"""Which wiring suits this machine, by the performance model of `ladder plan`. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ladder.bench.doctor.devices import Devices
from ladder.bench.doctor.topology import KINDS
from ladder.comm.link import LINKS
from ladder.errors import LadderError
from ladder.perf.chips import CHIPS, Chip
from ladder.perf.plan import Deployment, plan

SIZES = ("llama-3-70b", "llama-3-8b", "llama-3.2-1b")  # the first two that fit are predicted
WIRINGS = ("standard", "ladder", "ladder-1-2", "parallel-1")
MEASURED = ("standard", "ladder", "ladder-1-2")  # wirings whose price in quality is known
NOTHING = 1.03  # a gain that no one would train a model for
CLEARLY = 1.05  # another wiring is suggested where it is so many times as fast as ladder
ENGINE = "ladder"
HIDDEN = 8192  # numbers of the message that is timed: the stream of one token of a 70B model, in bf16


def link_of(found: Devices, worst: str | None) -> str | None:
    """The row of `LINKS` that is most like this machine's; None: no two GPUs, or unknown."""
    ranks = min(found.ranks, 8)
    if ranks < 2 or worst is None:
        return None
    if worst == "NV":
        return "nvlink_oneshot" if found.symmetric_memory else "nvlink_nccl_graph"
    if found.peer_to_peer and worst in ("PIX", "PXB"):
        return "pcie_p2p_nccl"
    return f"pcie_shm_tp{ranks}"


def predicted(found: Devices, link: str | None, measured_us: float | None) -> list[dict[str, Any]]:
    """Rows of `ladder plan` for models that fit these GPUs. A latency that was measured replaces the link's own."""
    chip = Chip.of(found.gpus[0]) if found.gpus else None
    if chip is None or (found.ranks > 1 and link is None):
        return []
    rows: list[dict[str, Any]] = []
    tp = min(found.ranks, 8)
    alpha = None
    if measured_us is not None and link is not None:
        alpha = max(0.1, measured_us - 2 * HIDDEN / LINKS[link].beta * 1e6)
    base = Deployment("", chip.name, tp, link or "nvlink_nccl", 1, 1024, 512, "standard", ENGINE, alpha_us=alpha)
    for size in SIZES:
        try:
            some = plan([replace(base, size=size, wiring=wiring) for wiring in WIRINGS])
        except LadderError:  # it does not fit
            continue
        rows += some
        if len(rows) == 2 * len(WIRINGS):
            break
    return rows


def sentences(found: Devices, worst: str | None, link: str | None, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the rows say."""
    if found.failure is not None:
        return ["Without torch nothing is computed: only `ladder plan` works, and --help."]
    if not found.gpus:
        return [
            "There is no GPU here: every command works on the CPU, with small models; "
            "`ladder plan` predicts other machines, `ladder demo` shows what overlap gains on this one."
        ]
    said = []
    if link is not None:
        how = KINDS.get(worst or "", "unknown")
        said.append(f"The GPUs are connected by {how}: taken as the link {link} of `ladder plan`.")
    elif found.ranks > 1:
        said.append("How the GPUs are connected is not known: `ladder plan --link ...` predicts what you think it is.")
    if Chip.of(found.gpus[0]) is None:
        return [
            *said,
            f"{found.gpus[0]} is not in the table of `ladder plan` ({', '.join(CHIPS)}): give it its figures, as in "
            "--chip '141GB,4.8TB/s,989TFLOP/s'.",
        ]
    for first in range(0, len(rows), len(WIRINGS)):
        said.append(_best(rows[first : first + len(WIRINGS)]))
    return said


def _best(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of one model under all wirings."""
    by_name = dict(zip(WIRINGS, rows, strict=True))
    name = max(MEASURED, key=lambda name: by_name[name]["speedup"])
    if by_name[name]["speedup"] < CLEARLY * by_name["ladder"]["speedup"]:
        name = "ladder"
    best, first = by_name[name], rows[0]
    where = f"{first['size']} on {first['tp']} GPUs" if first["tp"] > 1 else f"{first['size']} on one GPU"
    if best["speedup"] < NOTHING:
        return f"{where}, batch 1: stay with standard; {name} would be {best['speedup']:.2f} times as fast (predicted)."
    said = f"{where}, batch 1: {name}, {best['speedup']:.2f} times as fast as standard (predicted: "
    said += f"{best['tpot_ms']:.3g} instead of {first['tpot_ms']:.3g} ms per token)."
    for other in WIRINGS:
        if other not in MEASURED and by_name[other]["speedup"] > best["speedup"] * NOTHING:
            said += f" {other}: {by_name[other]['speedup']:.2f} times; its price in quality is not known."
    return said
