"""Tables of predictions, as `ladder plan` makes them today: docs/reproduce.md."""

from experiments.tables.figures import Table, fixed, markdown, times
from ladder.perf.plan import Deployment, plan

# the paper's speed-ups of ladder over standard: with peer-to-peer, and without
SIZES: list[tuple[str, str, str, str]] = [
    ("1B", "1B", "1.56", "1.39"),
    ("3B", "3B-32h", "1.57", "1.50"),
    ("8B", "llama-3-8b", "1.46", "1.40"),
    ("34B", "34B", "1.44", "1.47"),
    ("70B", "llama-3-70b", "1.29", "1.59"),
]


def speedup(size: str, link: str, tp: int = 8) -> float:
    """Of ladder over standard, in tokens/s, by the engine of the paper's code."""
    pair = plan(
        Deployment(size, "h100", tp, link, batch=4, prompt=1024, new=512, wiring=wiring, engine="paper")
        for wiring in ("standard", "ladder")
    )
    return float(pair[1]["tokens_per_s"] / pair[0]["tokens_per_s"])


def sizes() -> str:
    rows = []
    for name, size, on, off in SIZES:
        rows.append([name, on, fixed(speedup(size, "nvlink_nccl"), 2), off, fixed(speedup(size, "pcie_shm_tp8"), 2)])
    nodes = fixed(speedup("llama-3.1-405b", "ib_2node_nccl", tp=16), 2)
    rows.append(["405B (`ib_2node_nccl`)", "1.31", nodes, "1.57", ""])
    return markdown(["size", "published, on", "predicted", "published, off", "predicted"], rows)


def weights() -> str:
    """Milliseconds per token with quantized weights."""
    rows = []
    for link, name in (("nvlink_oneshot", "8 us"), ("nvlink_nccl", "24 us"), ("pcie_shm_tp8", "62 us")):
        for form in ("bf16", "fp8", "int4"):
            wirings = ("standard", "ladder", "ladder-2", "parallel-1")
            found = plan(
                Deployment("llama-3-70b", "h200", 8, link, 1, 1024, 512, wiring, weights=form) for wiring in wirings
            )
            steps = [line["tpot_ms"] for line in found]
            shown = [f"{fixed(ms, 2)} ({times(steps[0] / ms)})" for ms in steps[1:]]
            rows.append([name, form, fixed(found[0]["bytes_per_weight"], 3), fixed(steps[0], 2), *shown])
    return markdown(["link", "weights", "bytes per weight", "standard", "ladder", "ladder-2", "parallel-1"], rows)


TABLES: dict[str, Table] = {"predicted-sizes": sizes, "predicted-weights": weights}
