"""Tables of wired models inside vLLM: docs/serving.md."""

from experiments.tables.figures import Table, fixed, markdown, one, times
from ladder.comm.link import Link
from ladder.config import ModelConfig

NAME = "vllm_h200"
ARMS = {
    "vllm standard": "vLLM, standard",
    "vllm ladder": "vLLM, `ladder`, one lane",
    "vllm ladder, two lanes": "vLLM, `ladder`, two lanes",
    "native standard": "ours, standard",
    "native ladder": "ours, `ladder`",
}
LINKS = {"nvlink_oneshot": "8 us", "nvlink_nccl": "24 us", "pcie_shm_tp8": "62 us"}


def speed() -> str:
    rows = []
    for batch in (1, 16, 64):
        ms = [one(NAME, measure="vllm_speed", arm=arm, batch=batch)["ms_per_token"] for arm in ARMS]
        rows.append([str(batch), *(f"{fixed(each, 2)} ({times(ms[0] / each)})" for each in ms)])
    return markdown(["batch", *ARMS.values()], rows)


def overlap() -> str:
    rows = []
    for batch in (1, 16):
        for link, name in ((None, "none"), *LINKS.items()):
            found = {
                wiring: one(NAME, measure="vllm_overlap", batch=batch, link_name=link, wiring=wiring)
                for wiring in ("standard", "ladder", "parallel-1")
            }
            row = [str(batch), name, fixed(found["standard"]["ms_per_token"], 2)]
            for wiring in ("ladder", "parallel-1"):
                line = found[wiring]
                gain = times(found["standard"]["ms_per_token"] / line["ms_per_token"])
                row.append(f"{fixed(line['ms_per_token'], 2)} ({gain})")
                row.append("" if link is None else f"{share(line['hidden'])} of {share(hideable(wiring, link, batch))}")
            rows.append(row)
    return markdown(["batch", "link", "standard", "`ladder`", "hidden", "`parallel-1`", "hidden"], rows)


def hideable(wiring: str, link: str, batch: int) -> float:
    """At most this share of the all-reduces' time: what they take, against the step without a link."""
    line = one(NAME, measure="vllm_overlap", batch=batch, link_name=link, wiring=wiring)
    alone = one(NAME, measure="vllm_overlap", batch=batch, link_name=None, wiring=wiring)
    assert line["size"] == "llama-3-70b"
    spent = line["all_reduces_ms"]
    at_once = Link.parse(link).seconds(batch * ModelConfig.named(line["size"]).hidden * 2) * 1e3  # the embedding's
    return float(min(spent - at_once, alone["ms_per_token"]) / spent)


def share(part: float) -> str:
    return f"{fixed(100 * part, 0)}%"


TABLES: dict[str, Table] = {"vllm-speed": speed, "vllm-overlap": overlap}
