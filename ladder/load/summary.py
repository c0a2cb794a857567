"""The figures of a run: one JSON line for each request, and one for all of them."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ladder.load.exchange import Outcome
from ladder.load.run import Run
from ladder.load.slo import meets
from ladder.load.workload import Planned

REQUEST, SUMMARY = "load request", "load"  # what the lines call themselves
TIMES = ("ttft", "tpot", "itl", "e2e")
SHARES = (50, 90, 99)
# from where on the client itself may have made the figures worse
LAGGED_MS = 10.0  # its event loop was later than this in one of a hundred looks
BUSY = 0.85  # share of one core


def percentile(values: Sequence[float], percent: float) -> float:
    """Of sorted values, between the two nearest."""
    place = (len(values) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def request_line(run_id: str, begun: float, planned: Planned, outcome: Outcome) -> dict[str, Any]:
    """One request's line."""
    return {
        "measure": REQUEST,
        "run": run_id,
        "index": outcome.index,
        "due_s": round(outcome.due - begun, 6),
        "sent_s": round(outcome.sent - begun, 6),
        "prompt_tokens": planned.prompt_tokens if outcome.prompt_tokens is None else outcome.prompt_tokens,
        "max_tokens": planned.max_tokens,
        "output_tokens": outcome.output_tokens,
        "ttft_ms": _rounded(outcome.ttft_ms),
        "tpot_ms": _rounded(outcome.tpot_ms),
        "e2e_ms": _rounded(outcome.e2e_ms),
        "itl_ms": [_rounded(value) for value in outcome.itl_ms],
        "finish_reason": outcome.finish_reason,
        "error": outcome.error,
        "detail": outcome.detail or None,
    }


def summary(run: Run, planned: Sequence[Planned], slo: Mapping[str, float]) -> dict[str, Any]:
    """The figures of all requests that finished. A rate counts from the start of the run to its end."""
    good = [outcome for outcome in run.outcomes if outcome.error is None]
    seconds = max(run.ended - run.begun, 1e-9)
    prompt = sum(outcome.prompt_tokens or planned[outcome.index].prompt_tokens or 0 for outcome in good)
    output = sum(outcome.output_tokens for outcome in good)
    lags = sorted(run.lags)
    rate = run.arrivals.rate
    line: dict[str, Any] = {
        "arrivals": run.arrivals.kind,
        "rate": None if rate is None or math.isinf(rate) else rate,
        "concurrency": run.arrivals.concurrency,
        "requests": run.planned,
        "sent": run.sent,
        "completed": len(good),
        "failed": len(run.outcomes) - len(good),
        "unfinished": run.unfinished,
        "interrupted": run.interrupted,
        "errors": dict(Counter(outcome.error for outcome in run.outcomes if outcome.error is not None).most_common()),
        "duration_s": round(seconds, 6),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "wanted_tokens": sum(planned[outcome.index].max_tokens for outcome in good),
        "tokens_from": _source(good),
        "requests_per_s": _rounded(len(good) / seconds),
        "output_tokens_per_s": _rounded(output / seconds),
        "total_tokens_per_s": _rounded((prompt + output) / seconds),
    }
    for name, values in _times(good).items():
        ordered = sorted(values)
        line[f"{name}_ms_mean"] = _rounded(sum(ordered) / len(ordered)) if ordered else None
        for share in SHARES:
            line[f"{name}_ms_p{share}"] = _rounded(percentile(ordered, share)) if ordered else None
    if slo:
        times = [{"ttft": one.ttft_ms, "tpot": one.tpot_ms, "e2e": one.e2e_ms} for one in good]
        met = sum(meets(slo, each) for each in times)
        line |= {"slo": dict(slo), "goodput_per_s": _rounded(met / seconds)}
        line["goodput_share"] = _rounded(met / len(run.outcomes)) if run.outcomes else None
    line["lag_ms_p99"] = _rounded(1000 * percentile(lags, 99)) if lags else None
    line["lag_ms_max"] = _rounded(1000 * lags[-1]) if lags else None
    line["late_ms_max"] = _rounded(1000 * max((one.sent - one.due for one in run.outcomes), default=0.0))
    line["client_cpu_share"] = _rounded(run.cpu / seconds)
    return line


def remarks(line: Mapping[str, Any]) -> list[str]:
    """Sentences about what a reader must know before trusting the figures."""
    found = []
    lag, busy = line["lag_ms_p99"], line["client_cpu_share"]
    if lag is not None and (lag > LAGGED_MS or busy > BUSY):
        found.append(
            f"the client itself was slow: its event loop was up to {line['lag_ms_max']:.0f} ms late (p99 {lag:.0f} ms) "
            f"and used {busy:.0%} of a core, requests were sent up to {line['late_ms_max']:.0f} ms late; "
            "the endpoint may be faster than shown"
        )
    if line["tokens_from"] == "events":
        found.append("the endpoint sends no usage: tokens are counted by the events that came")
    if line["output_tokens"] < 0.95 * line["wanted_tokens"]:
        found.append(
            f"outputs ended early: {line['output_tokens']} tokens of {line['wanted_tokens']} "
            "(--ignore-eos asks for all of them)"
        )
    if line["errors"]:
        found.append(f"failed: {', '.join(f'{count} by {kind}' for kind, count in line['errors'].items())}")
    if line["interrupted"]:
        left = line["requests"] - line["sent"]
        found.append(f"stopped early: {line['unfinished']} requests were under way, {left} were not sent")
    return found


def _times(good: Sequence[Outcome]) -> dict[str, list[float]]:
    return {
        "ttft": [value for one in good if (value := one.ttft_ms) is not None],
        "tpot": [value for one in good if (value := one.tpot_ms) is not None],
        "itl": [value for one in good for value in one.itl_ms],
        "e2e": [one.e2e_ms for one in good],
    }


def _source(good: Sequence[Outcome]) -> str | None:
    """Where the numbers of tokens come from."""
    if not good:
        return None
    return "usage" if all(outcome.usage_tokens is not None for outcome in good) else "events"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
