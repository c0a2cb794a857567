"""Tables of speed: README.md, docs/performance.md, docs/choose.md."""

from experiments.tables.figures import Table, fixed, least, markdown, one, times

LANES = "two_lanes_h200"
LINKS = {"nvlink_oneshot": "8 us", "nvlink_nccl_graph": "13 us", "nvlink_nccl": "24 us", "pcie_shm_tp8": "62 us"}
Row = tuple[str, str, int, str | None]  # its name, size, batch, link
ROWS: list[Row] = [
    ("8B on one GPU, batch 1", "llama-3-8b", 1, None),
    ("8B on one GPU, batch 16", "llama-3-8b", 16, None),
    ("70B, one rank of 8, batch 1, no link", "llama-3-70b", 1, None),
    ("8 us an all-reduce", "llama-3-70b", 1, "nvlink_oneshot"),
    ("13 us", "llama-3-70b", 1, "nvlink_nccl_graph"),
    ("24 us", "llama-3-70b", 1, "nvlink_nccl"),
    ("62 us", "llama-3-70b", 1, "pcie_shm_tp8"),
    ("70B, batch 16, no link", "llama-3-70b", 16, None),
    ("70B, batch 16, 24 us", "llama-3-70b", 16, "nvlink_nccl"),
    ("70B, batch 64, no link", "llama-3-70b", 64, None),
]


def step(row: Row, wiring: str, **more: int) -> float:
    """Milliseconds per token, the fastest of the ways that `more` leaves."""
    _, size, batch, link = row
    return least(LANES, "ms", measure="decode", size=size, batch=batch, link_name=link, wiring=wiring, **more)


def digits(ms: float) -> str:
    return fixed(ms, 2) if ms < 10 else fixed(ms, 1)


def lanes() -> str:
    """Standard, and what two lanes give."""
    arms = [("ladder", 1), ("ladder", 2), ("ladder-2", 2), ("parallel-1", 1), ("parallel-1", 2)]
    rows = []
    for row in ROWS:
        standard = step(row, "standard")
        found = [
            step(row, *arm[:1], lanes=arm[1]) if not (row[1] == "llama-3-8b" and arm[0] == "ladder-2") else None
            for arm in arms
        ]
        rows.append(
            [
                row[0],
                digits(standard),
                *("" if ms is None else f"{digits(ms)} ({times(standard / ms)})" for ms in found),
            ]
        )
    header = [f"{wiring}, {'one lane' if number == 1 else 'two lanes'}" for wiring, number in arms]
    return markdown(["", "standard", *header], rows)


def headline() -> str:
    """The faster of one lane and two."""
    rows = []
    for place, name in [
        (0, ROWS[0][0]),
        (1, ROWS[1][0]),
        (3, "70B, one rank of 8, NVLink, 8 us an all-reduce"),
        (5, "70B, one rank of 8, NVLink, 24 us"),
        (6, "70B, one rank of 8, PCIe, 62 us"),
    ]:
        standard, ladder, parallel = (step(ROWS[place], wiring) for wiring in ("standard", "ladder", "parallel-1"))
        rows.append(
            [
                name,
                digits(standard),
                f"{digits(ladder)} (**{times(standard / ladder)}**)",
                f"{digits(parallel)} ({times(standard / parallel)})",
            ]
        )
    return markdown(["", "standard", "ladder", "parallel-1"], rows)


def lanes_70b() -> str:
    rows = []
    for row in ROWS[2:7]:
        standard = step(row, "standard")
        others = [step(row, wiring) for wiring in ("ladder", "ladder-2", "parallel-1")]
        name = "none" if row[3] is None else f"`{row[3]}`, {LINKS[row[3]]}"
        rows.append([name, digits(standard), *(f"{digits(ms)} ({times(standard / ms)})" for ms in others)])
    return markdown(["link", "standard", "ladder", "ladder-2", "parallel-1"], rows)


def generate() -> str:
    rows = []
    for wiring in ("standard", "ladder"):
        line = one("generate_h200", wiring=wiring)
        rows.append([f"`{wiring}`", fixed(line["ms_per_token"], 3), fixed(line["bare_step_ms"], 3)])
    return markdown(["ms per token", "`LLM.generate`", "bare step"], rows)


def vllm() -> str:
    rows, name = [], "generate_batches_h200"
    for batch in (1, 4, 16, 64, 128):
        arms = [
            one(name, batch=batch, engine="vllm 0.26.0"),
            one(name, batch=batch, wiring="standard"),
            one(name, batch=batch, wiring="ladder"),
        ]
        pairs = [(line["greedy_ms_per_token"], line["sampled_ms_per_token"]) for line in arms]
        ratios = [fixed(there / here, 2) for there, here in zip(pairs[0], pairs[2], strict=True)]
        rows.append(
            [
                str(batch),
                *(f"{fixed(greedy, 2)} / {fixed(sampled, 2)}" for greedy, sampled in pairs),
                " / ".join(ratios),
            ]
        )
    return markdown(["batch", "vLLM", "ours, `standard`", "ours, `ladder`", "`ladder`, times as fast as vLLM"], rows)


def throughput() -> str:
    rows = []
    for run, requests, rate, name in [
        (6, 256, None, "256 at once"),
        (5, 1024, None, "1,024 at once"),
        (5, 256, 12.0, "256, Poisson, 12/s"),
        (5, 1024, 24.0, "1,024, Poisson, 24/s"),
    ]:
        pair = [
            one("throughput_h200", run=run, measure="throughput", requests=requests, rate=rate, engine=engine)
            for engine in ("ladder", "vllm 0.26.0")
        ]
        cells = [
            [f"{line[key]:,.{figures}f}" for line in pair]
            for key, figures in (("output_tokens_per_second", 0), ("ttft_p50_ms", 0), ("tpot_p50_ms", 1))
        ]
        rows.append([name, *(" against ".join(cell) for cell in cells)])
    return markdown(["requests", "tokens/s", "TTFT", "TPOT"], rows)


def one_lane() -> str:
    """An earlier run, with more wirings."""
    rows = []
    for link in (None, *LINKS):
        where = {"measure": "decode", "size": "llama-3-70b", "batch": 1, "link_name": link}
        steps = {}
        for wiring in ("standard", "parallel", "desync-2x", "ladder", "ladder-1-2"):
            at_once = 1 if link else None  # ladder-1-2 has a second line, with two
            steps[wiring] = one("one_rank_h200", **where, wiring=wiring, sums_at_once=at_once)
        name = "none" if link is None else f"`{link}` ({LINKS[link]})"
        more = 100 * (steps["ladder"]["over_none"] - 1)
        rows.append(
            [
                name,
                *(f"{digits(line['ms'])}" for line in steps.values()),
                f"+{fixed(more, 0)}%" if more >= 10 else f"+{fixed(more, 1)}%",
                times(steps["standard"]["ms"] / steps["ladder"]["ms"]),
            ]
        )
    return markdown(
        [
            "emulated link (alpha)",
            "standard",
            "parallel",
            "desync-2x",
            "ladder",
            "ladder-1-2",
            "ladder over `none`",
            "ladder, times standard",
        ],
        rows,
    )


TABLES: dict[str, Table] = {
    "lanes": lanes,
    "headline": headline,
    "lanes-70b": lanes_70b,
    "generate": generate,
    "vllm": vllm,
    "throughput": throughput,
    "one-lane": one_lane,
}
