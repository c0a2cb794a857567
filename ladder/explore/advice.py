"""What to do in one setting, in plain words: from the predicted rows, and what was measured there. No torch here."""

from collections.abc import Mapping
from typing import Any

from ladder.charts.looks import TIMES

Row = Mapping[str, Any]

NOTHING, LITTLE = 1.03, 1.10  # speed-ups below which Ladder gives nothing, and little
SLOW = 0.5  # share of a step that standard waits: more cannot be hidden behind what is left
KEEP = "Keep the standard wiring: Ladder pays where all-reduces take a larger part of the time, as on slower links."
TOO_SLOW = "The link is so slow that there is hardly any computation to hide it behind: fewer GPUs may be faster."
CLEARLY = 1.05  # another wiring is named when it is so many times as fast as Ladder
# wirings that are named beside it, with what is known of their quality
OTHERS = {
    "parallel": "it has half as many all-reduces, and its loss was as good as ladder's when small models were trained",
    "desync-2x": "it has half as many all-reduces, but its loss was above ladder's when small models were trained",
    "ladder-1-2": "its loss was as good as ladder's when small models were trained",
    "ladder-2": "its loss was somewhat above ladder's when small models were trained",
    "parallel-1": "a converted model loses more by it than by ladder, and after training that has not been measured",
}


def advice(rows: Mapping[str, Row], measured: float | None = None) -> dict[str, Any]:
    """`verdict`: nothing, little or yes; `headline`: one sentence; `reasons`: some more. `rows`: by wiring; `measured`:
    how many times as fast as standard Ladder was in this very setting, which then counts.
    """
    standard, ladder, none = rows["standard"], rows["ladder"], rows["none"]
    gain = ladder["speedup"] if measured is None else measured
    verdict = "nothing" if gain < NOTHING else "little" if gain < LITTLE else "yes"
    alone = standard["tp"] == 1
    times = f"{gain:.2f}{TIMES}"
    most = f"standard without any communication would be {none['speedup']:.2f}{TIMES}"
    if verdict == "nothing":
        headline = f"Ladder gives you nothing here ({times})."
    elif alone:
        headline = f"Ladder gives {times} on a single GPU{', which is little' if verdict == 'little' else ''}."
    else:
        headline = f"Ladder gives {'only ' if verdict == 'little' else ''}{times} the speed of standard; {most}."
    reasons = [] if measured is None else [f"That was measured; the prediction is {ladder['speedup']:.2f}{TIMES}."]
    reasons.append(_on_one_gpu(ladder, verdict) if alone else _between(standard, ladder))
    if verdict == "little":
        reasons.append("A model must be trained or adapted for it: weigh that against the gain.")
    reasons += _others(rows, gain)
    if verdict == "nothing" and not alone:
        slow = standard["exposed_ms"] > SLOW * standard["tpot_ms"]
        reasons.append(TOO_SLOW if slow else KEEP)
    return {"verdict": verdict, "headline": headline, "reasons": reasons}


def _on_one_gpu(ladder: Row, verdict: str) -> str:
    if ladder["lanes"] == 2 and verdict != "nothing":
        return (
            "There is no network to hide; but attention and MLP, which do not depend on each other, run side by side."
        )
    if ladder["lanes"] == 2:
        return (
            "There is no network to hide, and computing attention beside the MLP gains next to nothing in this setting."
        )
    engine = f"the engine of this prediction ({ladder['engine']}) computes one sub-block after the other here"
    own = "; this repository's may compute them side by side: see `ladder plan --engine ladder`"
    return f"There is no network to hide, and {engine}{'' if ladder['engine'] == 'ladder' else own}."


def _between(standard: Row, ladder: Row) -> str:
    """Where the time of both goes."""
    share = standard["exposed_ms"] / standard["tpot_ms"]
    base = f"All-reduces cost standard {standard['exposed_ms']:.2g} of its {_ms(standard)} per token ({share:.0%})"
    hidden = 0.0 if ladder["hidden"] is None else ladder["hidden"]
    if hidden > 0.98:
        return f"{base}; Ladder hides all of the communication behind computation."
    if hidden < 0.02:
        return f"{base}; Ladder hides none of it."
    slow = ": an all-reduce takes longer than a sub-block that it runs behind" if _slow(ladder) else ""
    return f"{base}; Ladder hides {hidden:.0%} of the communication{slow}."


def _slow(ladder: Row) -> bool:
    """An all-reduce takes longer than the sub-block that it runs behind."""
    return bool(ladder["all_reduce_us"] > min(ladder["attention_us"], ladder["mlp_us"]))


def _others(rows: Mapping[str, Row], gain: float) -> list[str]:
    """Wirings that are clearly faster still."""
    least = max(gain, 1.0) * CLEARLY
    found = [(name, rows[name]["speedup"]) for name in OTHERS if name in rows and rows[name]["speedup"] >= least]
    return [f"{name} would be {speedup:.2f}{TIMES}: {OTHERS[name]}." for name, speedup in found]


def _ms(row: Row) -> str:
    return f"{row['tpot_ms']:.3g} ms"
