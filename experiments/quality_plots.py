"""The pictures of docs/quality.md, from the lines in results/.

python -m experiments.quality_plots

    scratch.png     validation loss while wirings are trained from scratch, and how far each is from standard
    adaptation.png  a pretrained model rewired, fitted and adapted: KL to the original
    latency.png     loss against the time of a decoding step, where both were measured
    wirings.png     a pretrained model fitted to wirings: KL to the original against the predicted speed
"""

from pathlib import Path
from typing import Any

from experiments.tables.quality import LINKS, larger, number, speeds
from ladder.charts.looks import looks
from ladder.perf.measurements import read_lines
from ladder.plotting import load_pyplot, plot_style

RESULTS = Path(__file__).parent.parent / "results"
WAYS = {
    "finetune": "plain fine-tuning", "distill": "distilled", "schedule": "distilled, staleness moves",
    "fit": "fitted, distilled", "fittext": "fitted, distilled, text's loss", "side": "a side network",
    "fitlayers": "fitted, distilled, rewired layers only", "lora": "LoRA, staleness moves",
}  # fmt: skip
HALF = "standard:15 ladder:15"


def main() -> None:
    pyplot = load_pyplot()
    with plot_style(pyplot, **{"font.size": 10}):
        for draw in (scratch, adaptation, latency, wirings):
            figure = draw(pyplot)
            if figure is not None:
                figure.savefig(RESULTS / "quality" / f"{draw.__name__}.png", dpi=120)
                pyplot.close(figure)


def lines(name: str) -> list[dict[str, Any]]:
    file = RESULTS / name
    return [line for _, line in read_lines(file).objects] if file.exists() else []


def curve(arm: str) -> tuple[list[float], list[float]]:
    """(million tokens, validation loss)"""
    found = [line for line in lines(f"scratch/{arm}.jsonl") if "eval_loss" in line]
    return [line["tokens"] / 1e6 for line in found], [line["eval_loss"] for line in found]


def scratch(pyplot: Any) -> Any:
    """Curves of all arms, and their distance from standard of the same seed where both were evaluated."""
    rows = lines("scratch_h200.jsonl")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    base = {row["seed"]: dict(zip(*curve(row["arm"]), strict=True)) for row in rows if row["wiring"] == "standard"}
    names = {row["arm"]: row["wiring"] + ", 13 layers" * row["size"].endswith("long") for row in rows}
    for name, look in looks(names.values()).items():
        for row in (row for row in rows if names[row["arm"]] == name):
            tokens, losses = curve(row["arm"])
            again = row["seed"] > 1
            style = {"label": name + ", second seed" * again, "color": look.colour, "linestyle": "--" if again else "-"}
            left.plot(tokens, losses, marker=".", **style)
            near = base[row["seed"]]
            both = [(at, loss / near[at] - 1) for at, loss in zip(tokens, losses, strict=True) if at in near]
            right.plot([at for at, _ in both], [100 * far for _, far in both], marker=".", **style)
    left.set_ylabel("validation loss, nats per token")
    right.set_ylabel("from standard of the same seed, %")
    right.axhline(1, color="#888888", linewidth=0.8, linestyle=":")
    for axis in (left, right):
        axis.set_xlabel("million tokens")
    left.legend(frameon=False)
    return figure


def adaptation(pyplot: Any) -> Any:
    """A point each: the KL on a logarithmic axis, the perplexity beside it; the tasks, with a line for the original."""
    found = lines("adaptation_h200.jsonl")
    original = next(line for line in found if line["arm"] == "original")
    rows = [line for line in found if line is not original and "share" not in line]
    rows.sort(key=lambda line: (line["wiring"] == "ladder", line["wiring"] != HALF, -line["kl"]))
    size = (13, 0.8 + 0.32 * len(rows))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=size, layout="constrained", sharey=True, width_ratios=(5, 3))
    colours = [{"ladder": "#d55e00", HALF: "#0072b2"}.get(line["wiring"], "#009e73") for line in rows]
    left.scatter([line["kl"] for line in rows], range(len(rows)), color=colours, zorder=2)
    left.set_yticks(range(len(rows)), [described(line) for line in rows])
    left.set_ylim(-0.7, len(rows) - 0.3)
    for at, line in enumerate(rows):
        text = f"perplexity {line['valid_perplexity']:,.1f}"
        left.annotate(text, (line["kl"], at), (8, 0), textcoords="offset points", va="center", fontsize=9)
    left.set_xscale("log")
    left.xaxis.set_major_formatter(lambda kl, _: f"{kl:g}")
    left.xaxis.set_minor_formatter(lambda kl, _: "")
    left.set_xlim(right=15 * max(line["kl"] for line in rows))
    left.set_xlabel("KL to the original, nats per token of held-out text")
    right.scatter([100 * line["tasks"] for line in rows], range(len(rows)), color=colours, zorder=2)
    right.axvline(100 * original["tasks"], color="#888888", linewidth=0.8, linestyle=":")
    right.set_xlabel("mean of six tasks, % (dotted: original)")
    for axis in (left, right):
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    return figure


def described(line: dict[str, Any]) -> str:
    """What an arm is, with its tokens."""
    layers = {"ladder": "all", HALF: "last half"}.get(line["wiring"], "chosen half")
    if line["arm"].startswith("rewired"):
        return f"{layers}: rewired"
    text = ", its own text too" * (line.get("data") == "mix")
    if line["arm"].startswith("fitted"):
        return f"{layers}: fitted, {line['fit_tokens']:,} tokens{text}"
    way = line["arm"].split("-")[1]
    return f"{layers}: {WAYS.get(way, way)}, {line['tokens'] / 1e6:g} M tokens{text}"


def latency(pyplot: Any) -> Any:
    """Of each link, the validation loss over the time of a step at TP 8, batch 1."""
    losses = {(line["size"], line["wiring"]): line["valid_loss"] for line in reversed(lines("scratch_h200.jsonl"))}
    steps = [line for line in lines("bench_small_h200.jsonl") if line["batch"] == 1]
    points = [(line, losses[key]) for line in steps if (key := (line["size"], line["wiring"])) in losses]
    if not points:
        return None
    links = list(dict.fromkeys(line["cell_link"] for line, _ in points))
    arms = looks(line["arm"] for line, _ in points)
    size = (4 * len(links), 3.6)
    figure, axes = pyplot.subplots(1, len(links), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for axis, link in zip(axes[0], links, strict=True):
        for line, loss in points:
            if line["cell_link"] == link:
                place = (line["tpot_ms_p50"], loss)
                axis.plot(*place, "o", color=arms[line["arm"]].colour)
                axis.annotate(f"{line['arm']} {line['size']}", place, (4, 4), textcoords="offset points", fontsize=8)
        axis.set_title(link, loc="left")
        axis.set_xlabel("ms of a decoding step")
        axis.margins(0.3, 0.15)
    axes[0][0].set_ylabel("validation loss")
    return figure


def wirings(pyplot: Any) -> Any:
    """Of each link, KL after the fit over the predicted speed; ladder by its number of layers."""
    figure, axes = pyplot.subplots(1, len(LINKS), figsize=(12, 4), layout="constrained", sharey=True)
    found = [(line, speeds(larger(line["wiring"]))) for line in lines("fitting_wirings_cpu.jsonl")]
    names = {line["wiring"]: line["wiring"].split()[-1] for line, _ in found}
    arms = looks(names.values())
    for number_of_link, (axis, link) in enumerate(zip(axes, LINKS.values(), strict=True)):
        for name in arms:
            own = sorted(
                (number(line), fast[number_of_link], line) for line, fast in found if names[line["wiring"]] == name
            )
            if name == "ladder-3-2":  # of another grouping's function: it has no speed
                continue
            axis.plot(
                [x for _, x, _ in own],
                [line["fitted_kl"] for *_, line in own],
                "o-",
                color=arms[name].colour,
                label=name,
            )
            for count, x, line in own:
                axis.annotate(str(count), (x, line["fitted_kl"]), (4, 4), textcoords="offset points", fontsize=8)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda kl, _: f"{kl:g}")
        axis.yaxis.set_minor_formatter(lambda kl, _: f"{kl:g}" if f"{kl:.0e}"[0] in "25" else "")
        axis.set_title(f"an all-reduce takes {link}", loc="left")
        axis.set_xlabel("times as fast as standard (predicted, 70B)")
        axis.margins(0.15, 0.1)
    axes[0].set_ylabel("KL to the original, fitted, nats")
    axes[0].legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
