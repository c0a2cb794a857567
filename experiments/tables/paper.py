"""Tables beside the paper's figures, and of quantized steps: docs/reproduce.md, docs/performance-model.md."""

from experiments.tables.figures import Line, Table, fixed, gain, least, markdown, one, published_ms, those, times

ONE_RANK, BENCH, WEIGHTS, KERNELS = "one_rank_h200", "bench_h200", "one_rank_weights_h200", "quantized_kernels_h200"
MICROSECONDS = {None: "none", "nvlink_oneshot": "8 us", "nvlink_nccl": "24 us", "pcie_shm_tp8": "62 us"}
ARMS = ("standard", "standard-fused", "parallel", "desync-2x", "hybrid", "ladder", "none")


def decoding() -> str:
    """Published and ours, and how much faster than the same column's standard."""
    rows = []
    for batch in (1, 4, 16, 64):
        first: list[float] = []
        for wiring, name, theirs in [
            ("standard", "standard", "standard"),
            ("parallel", "parallel", "parallel"),
            ("ladder", "ladder", "ladder"),
            ("none", "no communication", "upper"),
        ]:
            found = []
            for p2p, link in (("on", "nvlink_nccl"), ("off", "pcie_shm_tp8")):
                # of ladder at batch 16 one of two runs is three times as slow as the other
                found.append(published_ms(theirs, p2p, batch, leave_out=2.0))
                where = {
                    "measure": "decode",
                    "size": "llama-3-70b",
                    "batch": batch,
                    "link_name": None if wiring == "none" else link,
                }
                found.append(one(ONE_RANK, wiring=wiring, **where)["ms"])
            first = first or found
            shown = [
                fixed(ms, 2) + ("" if wiring == "standard" else f" ({gain(slow, ms)})")
                for slow, ms in zip(first, found, strict=True)
            ]
            rows.append([str(batch) if wiring == "standard" else "", name, *shown])
    header = ["batch", "wiring", "published, peer-to-peer on", "ours, `nvlink_nccl` (24 us)"]
    return markdown([*header, "published, off", "ours, `pcie_shm_tp8` (62 us)"], rows)


def arms() -> str:
    """Tokens/s of one replica."""
    rows = []
    for batch in (1, 4, 16, 64):
        for link in ("nvlink_oneshot", "nvlink_nccl", "pcie_shm_tp8"):
            if batch == 64 and link != "nvlink_nccl":
                continue
            speeds = [one(BENCH, batch=batch, cell_link=link, arm=arm)["tokens_per_s"] for arm in ARMS]
            shown = [f"{fixed(speed, 0)} ({times(speed / speeds[0])})" for speed in speeds[1:]]
            rows.append([str(batch), f"`{link}`", fixed(speeds[0], 0), *shown])
    return markdown(["batch", "link", *ARMS], rows)


def weights() -> str:
    """Steps with quantized weights, the best schedule of each wiring."""
    rows = []
    for size, batch, form, links in [
        ("70b", 1, "fp8", list(MICROSECONDS)),
        ("70b", 1, "int4", list(MICROSECONDS)),
        ("70b", 16, "fp8", list(MICROSECONDS)),
        ("70b", 16, "int4", list(MICROSECONDS)),
        ("8b", 1, "fp8", [None]),
        ("8b", 1, "int4", [None]),
    ]:
        for link in links:
            run = 5 if (size, batch, form) == ("70b", 1, "int4") else 3
            where = {"run": run, "measure": "decode", "size": f"llama-3-{size}", "weights": form, "link_name": link}
            where["batch"] = batch
            none: Line = {} if link else min(those(WEIGHTS, **where, wiring="none"), key=lambda line: float(line["ms"]))
            bound = f"{fixed(none['ms'], 2)} ({fixed(100 * none['share_of_peak'], 0)}%)" if none else ""
            standard = least(WEIGHTS, "ms", **where, wiring="standard")
            others = ["ladder", "ladder-2", "parallel-1"] if size == "70b" else ["ladder", "", "parallel-1"]
            steps = [least(WEIGHTS, "ms", **where, wiring=wiring) if wiring else None for wiring in others]
            shown = ["" if ms is None else f"{fixed(ms, 2)} ({times(standard / ms)})" for ms in steps]
            rows.append([size.upper(), str(batch), form, MICROSECONDS[link], bound, fixed(standard, 2), *shown])
    return markdown(
        ["", "batch", "weights", "link", "`none` (share of the memory's peak)", "standard", "ladder", "ladder-2",
         "parallel-1"],
        rows,
    )  # fmt: skip


TRIED = [
    ("int4", 1, 4, 5, "kept"),
    ("fp8", 1, 3, 7, "left out"),
    ("int4", 16, 3, 6, "left out"),
    ("fp8", 16, 3, 6, "kept"),
]


def tuned() -> str:
    """The fastest steps of 70B with rows that `ladder tune` found, and without."""
    rows = []
    for form, batch, before, after, fate in TRIED:
        where = {"measure": "decode", "size": "llama-3-70b", "weights": form, "batch": batch}
        known = {(line["link_name"], line["wiring"]) for line in those(WEIGHTS, run=after, **where)}
        for link in MICROSECONDS:
            wirings = [name for at, name in sorted(known, key=str) if at == link and name != "none"]
            if not wirings:
                continue
            ms = [
                min((least(WEIGHTS, "ms", run=run, **where, link_name=link, wiring=name), name) for name in wirings)
                for run in (before, after)
            ]
            standard = [
                least(WEIGHTS, "ms", run=run, **where, link_name=link, wiring="standard") for run in (before, after)
            ]
            shown = [f"{fixed(each, 2)} (`{name}`)" for each, name in ms]
            rows.append([form, str(batch), MICROSECONDS[link], *(fixed(each, 2) for each in standard), *shown, fate])
    return markdown(["weights", "batch", "link", "standard by rule", "tuned", "fastest by rule", "tuned", "rows"], rows)


MATRICES = {
    "8b-qkv": "8B, QKV, 6,144 x 4,096",
    "8b-o": "8B, output of attention, 4,096 x 4,096",
    "8b-gate_up": "8B, gate and up, 2 x 14,336 x 4,096",
    "8b-down": "8B, down, 4,096 x 14,336",
    "70b-qkv": "70B at TP 8, QKV, 1,280 x 8,192",
    "70b-o": "70B at TP 8, output of attention, 8,192 x 1,024",
    "70b-gate_up": "70B at TP 8, gate and up, 2 x 3,584 x 8,192",
    "70b-down": "70B at TP 8, down, 8,192 x 3,584",
}


WRONG = 0.01  # relative to the norm of the result, which bfloat16 rounds by less than 0.002


REPEATED = ("70b-o", "int4", 1)  # wrong in run 2


def kernels() -> str:
    rows = []
    for shape, name in MATRICES.items():
        found = [
            one(KERNELS, run=3 if (shape, form, count) == REPEATED else 2, shape=shape, rows=count, weights=form)
            for count in (1, 16)
            for form in ("bf16", "fp8", "int4")
        ]
        assert all(line["error"] < WRONG for line in found), "a wrong result has no speed"
        rows.append([name, *(f"{fixed(line['us'], 1)} ({fixed(line['tb_s'], 2)})" for line in found)])
    return markdown(["weight", "bf16", "fp8", "int4", "16 rows: bf16", "fp8", "int4"], rows)


def prompts() -> str:
    rows = []
    for shape in ("8b-qkv", "8b-o", "8b-gate_up", "8b-down"):
        for count in (512, 2048, 8192):
            found = [
                one(KERNELS, run=2, measure="prefill", shape=shape, rows=count, way=way)
                for way in ("bf16", "dequantized", "fp8", "dequantized-block", "fp8-block")
            ]
            shown = [f"{fixed(line['ms'], 3)} ({fixed(line['tflop_s'], 0)})" for line in found]
            rows.append([MATRICES[shape], f"{count:,}", *shown])
    return markdown(
        ["weight", "rows", "bf16", "fp8, dequantized", "fp8 by fp8", "fp8-block, dequantized", "fp8-block by fp8"], rows
    )


def calibration() -> str:
    """How far the predictions of each engine are from measured tokens/s."""
    rows = []
    runs = {"paper": "published/h100_70b_runs.csv", "ladder": "one_rank_h200.jsonl"}
    for engine, name in (("paper", "paper"), ("ladder", "ladder (ms per step)")):
        where = {"engine": engine, "measurements": f"results/{runs[engine]}", "row": "as it is"}
        for on, half in (("first half", "fitted"), ("second half", "held back")):
            line = one("calibration", **where, on=on)
            exact = [
                f"{fixed(100 * line['median_error'], 1)}%",
                f"{fixed(100 * line['p90_error'], 1)}%",
                f"{fixed(100 * line['max_error'], 1)}%",
            ]
            rows.append(
                [name, half, str(line["configurations"]), *exact, f"{line['right_orders']} of {line['orders']}"]
            )
    return markdown(["engine", "half", "configurations", "median", "90th percentile", "largest", "orders right"], rows)


TABLES: dict[str, Table] = {
    "decoding": decoding,
    "arms": arms,
    "weights": weights,
    "tuned": tuned,
    "kernels": kernels,
    "prompts": prompts,
    "calibration": calibration,
}
