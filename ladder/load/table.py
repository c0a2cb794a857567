"""The figures of runs as tables for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from ladder.load.summary import SHARES, TIMES

NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "end to end"}
SHORT = {**NAMES, "e2e": "E2E"}


def table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """One run in detail, or several with a row each."""
    return _detail(lines[0]) if len(lines) == 1 else _rows(lines)


def arrivals_name(line: Mapping[str, Any]) -> str:
    """How the requests of a run arrived, from its line."""
    if line["arrivals"] == "closed":
        return f"{line['concurrency']} at a time"
    return "all at once" if line["arrivals"] == "at once" else f"{line['rate']:g}/s"


def _detail(line: Mapping[str, Any]) -> Table:
    figures = [
        f"{line['completed']} of {line['requests']} requests in {line['duration_s']:.1f} s",
        f"{line['output_tokens_per_s']:.1f} output tokens/s, {line['total_tokens_per_s']:.1f} with prompts",
        f"{line['requests_per_s']:.2f} requests/s{_goodput(line)}",
    ]
    grid = Table(title="\n".join(_title(line, arrivals_name(line))), caption="\n".join(figures), min_width=64)
    for name in ("milliseconds", "mean", *(f"p{share}" for share in SHARES)):
        grid.add_column(name, justify="left" if name == "milliseconds" else "right", no_wrap=True)
    for time in TIMES:
        keys = [f"{time}_ms_mean", *(f"{time}_ms_p{share}" for share in SHARES)]
        grid.add_row(NAMES[time], *(_ms(line[key]) for key in keys))
    return grid


def _rows(lines: Sequence[Mapping[str, Any]]) -> Table:
    columns = ["arrivals", "done", "failed", "req/s", "tokens/s"]
    columns += ["goodput"] if "slo" in lines[0] else []
    caption = "times in milliseconds" + ("; goodput: requests/s within the --slo" if "slo" in lines[0] else "")
    grid = Table(title="\n".join(_title(lines[0])), caption=caption)
    times = [(time, share) for time in ("ttft", "tpot", "e2e") for share in (50, 99)]
    for name in (*columns, *(f"{SHORT[time]} p{share}" for time, share in times)):
        grid.add_column(name, justify="left" if name == "arrivals" else "right", no_wrap=True)
    for line in lines:
        row = [arrivals_name(line), str(line["completed"]), str(line["failed"])]
        row += [f"{line['requests_per_s']:.2f}", f"{line['output_tokens_per_s']:.1f}"]
        row += [f"{line['goodput_per_s']:.2f}"] if "goodput" in columns else []
        grid.add_row(*row, *(_ms(line[f"{time}_ms_p{share}"]) for time, share in times))
    return grid


def _title(line: Mapping[str, Any], *more: str) -> list[str]:
    lengths = f"prompts {line['prompt_length']}, outputs {line['output_length']}"
    return [str(line["label"]), ", ".join([str(line["api"]), *more, lengths])]


def _goodput(line: Mapping[str, Any]) -> str:
    if "slo" not in line:
        return ""
    wanted = ", ".join(f"{name} {limit:g} ms" for name, limit in line["slo"].items())
    share = "" if line["goodput_share"] is None else f" ({line['goodput_share']:.0%})"
    return f"; goodput {line['goodput_per_s']:.2f}{share} within {wanted}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.0f}"
