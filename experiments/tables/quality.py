"""Tables of quality: README.md, docs/quality.md, docs/use/."""

from collections.abc import Iterable
from itertools import groupby

from experiments.tables.figures import Line, Table, fixed, lines, markdown, one, times
from ladder.perf.plan import Deployment, plan
from ladder.wiring import Wiring

ADAPTED, TRIALS, OWN = "adaptation_h200", "adaptation_trials_h200", "own_partial"
WIRINGS, HYBRIDS = "fitting_wirings_cpu", "fitting_hybrids_cpu"
LINKS = {"nvlink_oneshot": "8 us", "nvlink_nccl": "24 us", "pcie_shm_tp8": "62 us"}
HALF = "standard:15 ladder:15"
HALF_BY_SCAN = (
    "standard:5 ladder:2 standard:1 ladder:4 standard:1 ladder:2 standard:6 ladder:2 standard:1 ladder:5 standard:1"
)
SCANNED = f"fitted {HALF_BY_SCAN} 131072"
Named = tuple[str, str, dict[str, object]]  # layers, what was done, and its line
ROWS: list[Named] = [
    ("none", "original", {"arm": "original"}),
    ("last half", "rewired", {"arm": "rewired", "wiring": HALF}),
    ("", "fitted by least squares, 131,072 tokens", {"arm": f"fitted {HALF} 131072", "data": None}),
    ("", "distilled, 12 M tokens", {"arm": "half-distill-12M-0.001-16-adamw"}),
    ("", "distilled, rising staleness, 12 M", {"arm": "half-schedule-12M-0.001-16-adamw"}),
    ("", "that, LoRA of rank 64, 12 M", {"arm": "half-lora-12M-0.001-16-adamw"}),
    ("", "a side network, a quarter as wide in whole heads, 12 M", {"arm": "half-side-12M-0.003-16-adamw"}),
    ("", "plain fine-tuning, 12 M", {"arm": "half-finetune-12M-0.0003-16-adamw"}),
    ("", "fitted as above, then distilled, 12 M", {"arm": "half-fit-12M-0.0003-16-adamw"}),
    ("", "the same, only the rewired layers trained", {"arm": "half-fitlayers-12M-0.0003-16-adamw-131072"}),
    ("", "fitted, then distilled with the text's loss, 12 M", {"arm": "half-fittext-12M-0.0003-16-adamw-131072"}),
    ("", "half of the way there from the fitted weights", {"arm": "half-fittext-12M-0.0003-16-adamw-131072 0.5"}),
    ("", "three quarters of it", {"arm": "half-fittext-12M-0.0003-16-adamw-131072 0.75"}),
    ("", "**fitted, then distilled with the text's loss, 24 M**", {"arm": "half-fittext-24M-0.0003-16-adamw-131072"}),
    ("", "three quarters of the way there", {"arm": "half-fittext-24M-0.0003-16-adamw-131072 0.75"}),
    ("", "fitted on another mixture, with text of its own", {"arm": f"fitted {HALF} 131072", "data": "mix"}),
    ("", "that, then distilled on the mixture, 24 M", {"arm": "half-fit-24M-0.0003-16-adamw-131072"}),
    ("half, by `ladder scan`", "fitted by least squares, 131,072 tokens", {"arm": SCANNED}),
    ("", "distilled, rising staleness, 12 M", {"arm": "scanned-schedule-12M-0.001-16-adamw"}),
    ("", "fitted as above, then distilled, 12 M", {"arm": "scanned-fit-12M-0.0003-16-adamw-131072"}),
    ("all", "rewired", {"arm": "rewired ladder"}),
    ("", "fitted by least squares, 131,072 tokens", {"arm": "fitted ladder 131072", "data": None}),
    ("", "plain fine-tuning, 12 M", {"arm": "all-finetune-12M-0.0003-16-adamw"}),
    ("", "distilled, 12 M", {"arm": "all-distill-12M-0.001-16-adamw"}),
    ("", "distilled, rising staleness, 12 M", {"arm": "all-schedule-12M-0.001-16-adamw"}),
    ("", "fitted as above, then distilled, 12 M", {"arm": "all-fit-12M-0.001-16-adamw-131072"}),
    ("", "the same with the text's loss, 12 M", {"arm": "all-fittext-12M-0.001-16-adamw-131072"}),
    ("", "fitted, then distilled, 32 M", {"arm": "all-fit-32M-0.001-16-muon"}),
    ("", "fitted on the mixture", {"arm": "fitted ladder 131072", "data": "mix"}),
    ("", "that, then distilled on the mixture, 48 M", {"arm": "all-fit-48M-0.001-16-muon-131072"}),
]  # fmt: skip
TASKS = {"HellaSwag": "hellaswag/acc_norm", "PIQA": "piqa/acc_norm", "ARC easy": "arc_easy/acc_norm"}
TASKS |= {"ARC challenge": "arc_challenge/acc_norm", "WinoGrande": "winogrande/acc", "LAMBADA": "lambada/acc"}
BY_TASK: list[tuple[str, int]] = [  # a name, and a row above
    ("original", 0), ("last half, fitted", 2), ("last half, fitted and distilled, 12 M", 8),
    ("last half, fitted and distilled on the mixture, 24 M", 16),
    ("last half, fitted, distilled with the text's loss, 24 M", 13), ("last half, plain fine-tuning, 12 M", 7),
    ("all, fitted and distilled, 32 M", 27), ("all, fitted and distilled on the mixture, 48 M", 29),
]  # fmt: skip
TRIED: list[tuple[str, str, str, str, str, str]] = [  # layers, starts, staleness, learning rate, a remark; and the arm
    ("all", "rewired", "at once", "1e-3", "", "all-distill-6M-0.001-32"),
    ("all", "rewired", "rising", "1e-3", "", "all-schedule-6M-0.001-32"),
    ("all", "rewired", "rising", "1e-3", "the original's streams too", "all-streams-6M-0.001-32"),
    ("all", "rewired", "rising", "2e-3", "", "all-schedule-6M-0.002-32"),
    ("all", "rewired", "rising", "4e-3", "", "all-schedule-6M-0.004-32"),
    ("all", "rewired", "rising", "1e-3", "", "all-schedule-6M-0.001-16"),
    ("all", "rewired", "rising", "1e-3", "", "all-schedule-6M-0.001-8"),
    ("all", "rewired", "rising", "1e-3", "", "all-schedule-12M-0.001-32"),
    ("all", "fitted, 1 M tokens", "at once", "1e-3", "", "all-fit-4M-0.001-16-adamw"),
    ("last half", "rewired", "rising", "1e-3", "", "half-schedule-6M-0.001-32"),
    ("last half", "rewired", "rising", "4e-4", "", "half-schedule-6M-0.0004-32"),
    ("last half", "fitted, 1 M tokens", "at once", "3e-4", "", "half-fit-4M-0.0003-16-adamw"),
]


def line(number: int) -> Line:
    return one(ADAPTED, **ROWS[number][2])


def rounded(value: float) -> str:
    return fixed(value, 2) if value < 1000 else fixed(value, 0)


def adaptation() -> str:
    """Every run."""
    rows = []
    for layers, what, wanted in ROWS:
        found = one(ADAPTED, **wanted)
        figures = [rounded(found["wikitext2_perplexity"]), rounded(found["valid_perplexity"]), fixed(found["kl"], 3)]
        rows.append([layers, what, *figures, f"{fixed(100 * found['agreement'], 1)}%", fixed(100 * found["tasks"], 2)])
    return markdown(["layers", "", "WikiText-2", "held out", "KL", "agreement", "tasks"], rows)


def short(chosen: Iterable[tuple[str, int]]) -> str:
    rows = []
    for name, number in chosen:
        found = line(number)
        rows.append([name, fixed(found["valid_perplexity"], 1), fixed(found["kl"], 3), fixed(100 * found["tasks"], 1)])
    return markdown(["layers", "perplexity, held out", "KL to the original", "six tasks, %"], rows)


def adapted() -> str:
    return short(
        [
            ("original", 0),
            ("last half, fitted and trained by the defaults, 24 M tokens", 13),
            ("last half, fitted, then KL alone, 12 M tokens", 8),
            ("all, fitted, then 32 M tokens", 27),
            ("all, fitted, then 48 M tokens of a mixture with own text", 29),
        ]
    )


CONTROLS = "adaptation_controls_h200"
CONTROLLED = {
    "none-fittext-22M": "none: the original, trained as long",
    "half-fittext-22M": "last half",
    "27-fittext-22M": "all but the first three",
}


def controls() -> str:
    """Beside the original trained as long."""
    rows, control = [], one(CONTROLS, measure="end of training", arm="none-fittext-22M")["eval_perplexity"]
    for arm, name in CONTROLLED.items():
        end = one(CONTROLS, measure="end of training", arm=arm)
        own = [line for line in lines(CONTROLS) if line["measure"] == "model" and line["arm"].startswith(arm)]
        more = [fixed(100 * own[0]["tasks"], 1), fixed(own[0]["wikitext2_perplexity"], 2)] if own else ["", ""]
        above = "" if end["wiring"] == "standard" else f"{100 * (end['eval_perplexity'] / control - 1):+.1f}%"
        rows.append([name, fixed(end["eval_perplexity"], 2), above, fixed(end["eval_kl"], 3), *more])
    header = ["ladder layers", "perplexity, held out", "above the control", "KL to the original", "six tasks, %"]
    return markdown([*header, "WikiText-2"], rows)


def quality() -> str:
    """Of the README."""
    return short(
        [
            ("none: the original", 0),
            ("last half, fitted by least squares", 2),
            ("last half, fitted and adapted, 24 M tokens", 13),
            ("all, fitted by least squares", 21),
            ("all, fitted and adapted, 32 M tokens", 27),
        ]
    )


def fit() -> str:
    rows = []
    for name, numbers in (("last half", (1, 2)), ("all", (20, 21))):
        rows.append([name, *(f"{line(number)['valid_perplexity']:,.1f}" for number in (0, *numbers))])
    return markdown(["layers", "original", "rewired", "fitted on 131,072 tokens"], rows)


def by_task() -> str:
    rows = []
    for name, number in BY_TASK:
        found = line(number)
        rows.append([name, *(fixed(100 * found[key], 1) for key in (*TASKS.values(), "tasks"))])
    return markdown(["", *TASKS, "mean"], rows)


def trials() -> str:
    rows = []
    for layers, starts, staleness, rate, remark, arm in TRIED:
        found = one(TRIALS, arm=arm)
        about = [f"{fixed(found['tokens'] / 1e6, 0)} M", str(found["batch"]), rate, remark]
        rows.append([layers, starts, staleness, *about, fixed(found["valid_perplexity"], 1), fixed(found["kl"], 3)])
    return markdown(
        ["layers", "starts", "staleness", "tokens", "sequences a step", "learning rate", "", "perplexity", "KL"], rows
    )


def memory() -> str:
    rows = []
    for name, way in (("all weights", "full"), ("LoRA", "lora"), ("a side network", "side")):
        plain = fixed(one("memory_h200", way=way)["peak_gib"], 1)
        less = "" if way == "side" else f"{one('memory_h200', way=f'{way}, recomputed')['peak_gib']:.1f}"
        rows.append([name, plain, less])
    return markdown(["", "GiB", "recomputed (`--recompute`)"], rows)


def fit_tokens() -> str:
    rows = []
    for name, wiring in (("last half", HALF), ("all", "ladder")):
        found = [
            one(ADAPTED, tokens=None, fit_tokens=None, wiring=wiring, share=None),
            one(ADAPTED, arm=f"fitted {wiring} 131072", data=None),
        ]
        found.append(one(TRIALS, arm=f"fitted {wiring} 1048576"))
        for tokens, run in zip(("nothing", "131,072", "1,048,576"), found, strict=True):
            figures = [
                fixed(run[key], 1) if run[key] < 1000 else fixed(run[key], 0)
                for key in ("wikitext2_perplexity", "valid_perplexity")
            ]
            rows.append(
                [
                    name if tokens == "nothing" else "",
                    tokens,
                    *figures,
                    fixed(run["kl"], 3),
                    f"{fixed(100 * run['agreement'], 1)}%",
                ]
            )
    return markdown(["layers", "fitted on", "WikiText-2", "held out", "KL", "agreement"], rows)


def own_partial() -> str:
    """KL to the original where a rank's sub-blocks also read its own newest partial sum."""
    rows = []
    for name, wiring in (("last half", HALF), ("all", "ladder")):
        for ranks in (2, 4, 8):
            shown = []
            for fitted_on in (0, 32768):
                where = {"wiring": wiring, "ranks": ranks, "fit_tokens": fitted_on}
                found = {line["own"]: line for line in lines(OWN) if where.items() <= line.items()}
                shown += [fixed(found[own]["kl"], 3) if own in found else "" for own in (0, 0.5, 1)]
            rows.append([name, str(ranks), *shown])
    return markdown(["layers", "ranks", "none of it", "half", "all", "fitted: none", "half", "all"], rows)


def halves() -> str:
    names = {
        "the last": HALF,
        "those before the last one": "standard:14 ladder:15 standard:1",
        "by what each costs alone": HALF_BY_SCAN,
        "those in the middle, 8 to 22": "standard:8 ladder:15 standard:7",
        "every other": " ".join(["standard:1 ladder:1"] * 15),
    }
    found = [(name, one("fitting_sets_cpu", wiring=wiring)) for name, wiring in names.items()]
    rows = [[name, fixed(run["rewired_kl"], 2), fixed(run["fitted_kl"], 3)] for name, run in found]
    return markdown(["15 of 30 layers", "KL rewired", "KL fitted"], rows)


def larger(wiring: str) -> str:
    """A pattern of 30 layers for the same shares of Llama-3-70B's 80."""
    parts, begin, end = [], 0, 0
    for name, layers in groupby(Wiring.parse(wiring, 30).layers):
        end += len(list(layers))
        parts.append(f"{name}:{round(80 * end / 30) - round(80 * begin / 30)}")
        begin = end
    return " ".join(parts)


def speeds(wiring: str) -> list[float]:
    """How many times as fast as standard a token of Llama-3-70B is predicted to be, over each link."""
    found = []
    for link in LINKS:
        pair = plan(Deployment("llama-3-70b", "h200", 8, link, 1, 1024, 512, each) for each in ("standard", wiring))
        found.append(pair[0]["tpot_ms"] / pair[1]["tpot_ms"])
    return found


def fitted_wirings() -> str:
    """Wirings of the last half, and of all layers but the first three, before and after a fit."""
    rows = []
    for name in ("ladder", "parallel", "ladder-1-0", "ladder-2", "parallel-1", "ladder-3-2"):
        cells = []
        for kept in (15, 3):
            found = [line for line in lines(WIRINGS) if line["wiring"] == f"standard:{kept} {name}"]
            cells += [fixed(line[key], 3) for line in found for key in ("rewired_kl", "fitted_kl")] or ["", ""]
        # ladder-3-2 stands for the function of another grouping, which has no row of its own: see the page
        fast = [""] * 3 if name == "ladder-3-2" else [times(x) for x in speeds(larger(f"standard:3 {name}"))]
        rows.append([f"`{name}`", *cells, *fast])
    header = ["wiring", "last 15: rewired", "fitted", "last 27: rewired", "fitted"]
    return markdown([*header, *LINKS.values()], rows)


def fitted_hybrids() -> str:
    """`parallel-1` in the last layers, `parallel` in those before."""
    found = [line for line in lines(WIRINGS) if line["wiring"] in ("standard:3 parallel", "standard:3 parallel-1")]
    rows = []
    for line in sorted([*found, *lines(HYBRIDS)], key=lambda line: float(line["fitted_kl"])):
        fast = [times(x) for x in speeds(larger(line["wiring"]))]
        rows.append([f"`{line['wiring']}`", fixed(line["rewired_kl"], 3), fixed(line["fitted_kl"], 3), *fast])
    return markdown(["wiring", "KL rewired", "KL fitted", *LINKS.values()], rows)


def fitted_layers() -> str:
    """The number of ladder layers, after a fit, and what it gives in speed."""
    rows = []
    for line in sorted(ladders(), key=number):
        figures = [fixed(line["rewired_kl"], 3), fixed(line["fitted_kl"], 3), fixed(line["fitted_perplexity"], 2)]
        rows.append([str(number(line)), *figures, *(times(faster) for faster in speeds(larger(line["wiring"])))])
    return markdown(["last layers", "KL rewired", "KL fitted", "perplexity fitted", *LINKS.values()], rows)


def ladders() -> list[Line]:
    """The lines of ladder in the last layers."""
    return [line for line in lines(WIRINGS) if set(Wiring.parse(line["wiring"], 30).layers) <= {"standard", "ladder"}]


def number(line: Line) -> int:
    """Of its rewired layers."""
    return sum(name != "standard" for name in Wiring.parse(line["wiring"], 30).layers)


TABLES: dict[str, Table] = {
    "adaptation": adaptation,
    "adapted": adapted,
    "controls": controls,
    "quality": quality,
    "fit": fit,
    "by-task": by_task,
    "trials": trials,
    "memory": memory,
    "fit-tokens": fit_tokens,
    "own-partial": own_partial,
    "halves": halves,
    "fitted-wirings": fitted_wirings,
    "fitted-layers": fitted_layers,
    "fitted-hybrids": fitted_hybrids,
}
