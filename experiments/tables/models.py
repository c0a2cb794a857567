"""Tables of models trained from scratch, and of quantized ones: docs/quality.md, docs/use/train.md."""

from math import log
from statistics import mean, stdev

from experiments.tables.figures import Table, fixed, markdown, one, times
from experiments.tables.quality import LINKS
from ladder.perf.plan import Deployment, plan

SCRATCH, SMALL, QUANTIZED = "scratch_h200", "bench_small_h200", "quality/quantization"
RUNS = [("standard", 10, 1), ("standard", 10, 2), ("ladder", 10, 1), ("ladder", 10, 2), ("ladder", 13, 1)]
RUNS += [(wiring, 10, 1) for wiring in ("parallel", "ladder-1-2", "ladder-2", "desync-2x")]


def loss(wiring: str, layers: int, seed: int) -> float:
    size = "50M" if layers == 10 else "50M-long"
    return float(one(SCRATCH, wiring=wiring, size=size, seed=seed)["valid_loss"])


def apart(wiring: str, layers: int, seed: int) -> str:
    """From standard of the same seed."""
    share = loss(wiring, layers, seed) / loss("standard", 10, seed) - 1
    return "" if wiring == "standard" else f"{100 * share:+.1f}%"


def scratch() -> str:
    rows = [
        [wiring, str(layers), str(seed), fixed(loss(wiring, layers, seed), 3), apart(wiring, layers, seed)]
        for wiring, layers, seed in RUNS
    ]
    return markdown(["wiring", "layers", "seed", "validation loss", "from standard of that seed"], rows)


def scratch_speed() -> str:
    """With the speeds of the runs that had the GPU to themselves."""
    rows = []
    for wiring, layers, seed in RUNS:
        line = one(SCRATCH, wiring=wiring, size="50M" if layers == 10 else "50M-long", seed=seed)
        speed = ["", ""]
        if "tokens_per_s" in line:
            speed = [f"{round(line['tokens_per_s'], -3):,.0f}", f"{fixed(100 * line['share_of_peak'], 0)}%"]
        rows.append(
            [wiring, str(layers), str(seed), fixed(loss(wiring, layers, seed), 3), apart(wiring, layers, seed), *speed]
        )
    header = ["wiring", "layers", "seed", "validation loss", "from standard of that seed", "tokens/s"]
    return markdown([*header, "of the measured peak of a matrix product"], rows)


def latency() -> str:
    """Milliseconds of a decode step beside the loss."""
    rows = []
    for wiring, layers in [
        ("standard", 10),
        ("ladder", 10),
        ("ladder", 13),
        ("ladder-1-2", 10),
        ("ladder-2", 10),
        ("parallel", 10),
        ("desync-2x", 10),
    ]:
        size = "50M" if layers == 10 else "50M-long"
        steps = [
            one(SMALL, wiring=wiring, size=size, cell_link=link)["tpot_ms_p50"]
            for link in ("nvlink_oneshot", "nvlink_nccl", "pcie_shm_tp8")
        ]
        rows.append([f"{wiring}, {layers} layers", fixed(loss(wiring, layers, 1), 3), *(fixed(ms, 3) for ms in steps)])
    return markdown(["ms", "loss", "`nvlink_oneshot`", "`nvlink_nccl`", "`pcie_shm_tp8`"], rows)


def equal_latency() -> str:
    """Loss where every wiring has as many layers as it decodes in standard's time, by the slope between ladder of 10
    and of 13 layers; in brackets how much faster its step is predicted to be at equal layers.
    """
    slope = (loss("ladder", 10, 1) - loss("ladder", 13, 1)) / log(1.3)  # nats for e times as many layers
    wirings = [wiring for wiring, layers, seed in RUNS if (layers, seed) == (10, 1)]
    rows = {wiring: [wiring, fixed(loss(wiring, 10, 1), 3)] for wiring in wirings}
    for size in ("llama-3-8b", "llama-3-70b"):
        for link in LINKS:
            # `plan` leaves the order as it is given; standard is the first
            steps = plan(Deployment(size, "h200", 8, link, 1, 1024, 512, wiring) for wiring in wirings)
            for wiring, step in zip(wirings, steps, strict=True):
                faster = steps[0]["tpot_ms"] / step["tpot_ms"]
                rows[wiring].append(f"{fixed(loss(wiring, 10, 1) - slope * log(faster), 3)} ({times(faster)})")
    header = ["wiring", "loss, 10 layers", *(f"{size}, {us}" for size in ("8B", "70B") for us in LINKS.values())]
    return markdown(header, rows.values())


def quantized() -> str:
    rows = []
    names = {
        "int8": "int8",
        "fp8": "fp8",
        "fp8-block": "fp8-block",
        "int4-64": "int4, groups of 64",
        "int4-128": "int4, groups of 128",
    }
    whole = one(QUANTIZED, wiring="standard", format="dense")
    rows.append(["none", fixed(whole["perplexity"], 2), "", "0", "", "100%", ""])
    for form, name in names.items():
        near = one(QUANTIZED, wiring="standard", format=form, way="nearest")
        best = None if form == "int4-64" else one(QUANTIZED, wiring="standard", format=form, way="calibrated")
        exact = 3 if form.startswith("int4") else 4
        cells = []
        for key, show in (
            ("perplexity", "{:.2f}"),
            ("kl_to_original", f"{{:.{exact}f}}"),
            ("agreement_with_original", "{:.1%}"),
        ):
            cells += [show.format(near[key]), "" if best is None else show.format(best[key])]
        rows.append([name, *cells])
    header = ["format", "perplexity, nearest", "calibrated", "KL, nearest", "calibrated", "same next token, nearest"]
    return markdown([*header, "calibrated"], rows)


def vision() -> str:
    """Seeds of a vision transformer: each wiring against standard of the same seed."""
    seeds = (1, 2, 3, 4)
    excess = {
        wiring: [one("vision_converged_cpu", wiring=wiring, seed=seed)["excess"] for seed in seeds]
        for wiring in ("standard", "ladder", "parallel")
    }
    rows = []
    for wiring, found in excess.items():
        apart = [mine - theirs for mine, theirs in zip(found, excess["standard"], strict=True)]
        error = stdev(apart) / len(seeds) ** 0.5
        against = "" if wiring == "standard" else f"{mean(apart):+.4f}, standard error {fixed(error, 4)}"
        rows.append([wiring, fixed(mean(found), 4), fixed(stdev(found), 4), against])
    header = ["wiring", "loss above the best possible", "standard deviation of the seeds"]
    return markdown([*header, "minus standard, seed by seed"], rows)


TABLES: dict[str, Table] = {
    "scratch": scratch,
    "scratch-speed": scratch_speed,
    "latency": latency,
    "equal-latency": equal_latency,
    "quantized": quantized,
    "vision": vision,
}
