"""The rows that a report is made of: one measurement each, and the steps of a trace. No torch here."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ladder.bench.trace.lanes import Step
from ladder.comm.link import LINKS, Link
from ladder.errors import LadderError
from ladder.report.lines.values import filled, short


@dataclass(frozen=True)
class Row:
    """One measurement, named as in its line; None is what the line leaves out."""

    size: str
    arm: str
    wiring: str
    tp: int
    batch: int
    tpot_ms_p50: float
    prompt: int | None = None
    new: int | None = None
    context: int | None = None
    link: str | None = None
    cell_link: str | None = None
    link_alpha_us: float | None = None
    link_beta_gb_s: float | None = None
    link_kind: str | None = None
    mode: str | None = None
    chip: str | None = None
    cores: int | None = None
    dtype: str | None = None
    weights: str = "bf16"
    layers: int | None = None
    of_layers: int | None = None
    ttft_ms: float | None = None
    tpot_ms_p99: float | None = None
    tpot_ms_q1: float | None = None
    tpot_ms_q3: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_user: float | None = None
    tokens_per_s_gpu: float | None = None
    peak_memory_gb: float | None = None
    bandwidth_tb_s: float | None = None
    bandwidth_share: float | None = None
    prefill_tflop_s: float | None = None
    prefill_share: float | None = None
    all_reduces: float | None = None
    lanes: int | None = None
    comm_ms: float | None = None
    exposed_ms: float | None = None
    hidden: float | None = None
    repetitions: int | None = None
    torch: str | None = None
    triton: str | None = None
    python: str | None = None
    commit: str | None = None
    time: str | None = None

    @property
    def setting(self) -> tuple[Any, ...]:
        """What rows must have in common to be drawn together, beside size, TP and link."""
        return (*self.machine, self.weights)

    @property
    def machine(self) -> tuple[Any, ...]:
        """The same but for the format of the weights."""
        machine = (self.chip, self.mode, self.link_kind, self.dtype)
        return (*machine, self.prompt, self.new, self.context, self.layers, self.of_layers)

    @property
    def compared_on(self) -> str | None:
        """The link of the arms that it is compared with: an arm may have a link of its own."""
        return self.cell_link or self.link

    @property
    def total(self) -> float:
        """Tokens per second; without a prompt's time where the line gives none."""
        return self.batch * 1000 / self.tpot_ms_p50 if self.tokens_per_s is None else self.tokens_per_s

    @property
    def per_user(self) -> float:
        return 1000 / self.tpot_ms_p50 if self.tokens_per_s_user is None else self.tokens_per_s_user

    @property
    def per_gpu(self) -> float:
        return self.total / self.tp if self.tokens_per_s_gpu is None else self.tokens_per_s_gpu

    @property
    def spread(self) -> tuple[float, float] | None:
        """Slowest and fastest quartile of a token's time, relative to the median's rate."""
        if not self.tpot_ms_q1 or not self.tpot_ms_q3:
            return None
        return self.tpot_ms_p50 / self.tpot_ms_q3, self.tpot_ms_p50 / self.tpot_ms_q1

    @property
    def total_spread(self) -> tuple[float, float] | None:
        """Tokens per second at the quartiles of a token's time: the prompt's part of the time stays as it is."""
        if self.spread is None:
            return None
        share = 1.0  # of the time that is decoding
        if self.ttft_ms is not None and self.new is not None:
            share = (self.new - 1) * self.tpot_ms_p50 / max(self.ttft_ms + (self.new - 1) * self.tpot_ms_p50, 1e-9)
        low, high = self.spread
        return self.total / (1 - share + share / low), self.total / (1 - share + share / high)

    @property
    def timing(self) -> Link | None:
        """The link's times, where they are known; a link of the table as it stands there."""
        known = LINKS.get(self.link or "")
        if self.link_alpha_us is None:
            return known
        alpha, beta = self.link_alpha_us * 1e-6, (self.link_beta_gb_s or math.inf) * 1e9
        same = known is not None and math.isclose(known.alpha, alpha) and math.isclose(known.beta, beta)
        return known if same else Link(alpha, beta)


@dataclass(frozen=True)
class Lanes:
    """Steps to draw on one time axis: one file's, of one rank."""

    source: str
    rank: int
    steps: Sequence[Step]
    facts: dict[str, str]  # chip, link and the like, where the lines have them


def row_of(raw: Mapping[str, Any], where: str) -> Row:
    given = {key: value for key, value in raw.items() if value is not None}
    given = {**{new: given[old] for new, old in (("arm", "wiring"), ("wiring", "arm")) if old in given}, **given}
    row = filled(Row, given, where)
    for name in ("tp", "batch", "tpot_ms_p50"):
        if not getattr(row, name) > 0:
            raise LadderError(f"{where}: {name} must be more than 0, not {short(str(getattr(row, name)))}")
    return row
