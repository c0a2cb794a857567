"""Predicted figures as tables for a terminal: what is the same in all rows stands above them; and what has a name.
No torch here.
"""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from ladder.comm.link import LINKS
from ladder.config import SIZES
from ladder.config.quantization import NAMED
from ladder.perf.arms import ARMS
from ladder.perf.chips import CHIPS
from ladder.perf.costs import RankCosts
from ladder.wiring import EXAMPLES, Wiring

Row = dict[str, Any]
Cells = tuple[list[list[str]], int]  # heads and rows; how many of the columns were given
GAP = 2  # between two columns, and before the first and behind the last together

GIVEN = {"wiring": "wiring", "tp": "TP", "batch": "batch", "link": "link", "alpha_us": "alpha us", "pp": "PP"}
GIVEN |= {"nodes": "nodes", "gpus": "GPUs", "prompt": "prompt", "new": "new", "weights": "weights"}
USUAL = {"pp": 1, "nodes": 1}  # what is not worth a word
IMPLIED = {"alpha_us": "link", "gpus": "tp"}  # by what is shown beside it
FIGURES = {"tpot_ms": "ms per\ntoken", "speedup": "times\nstandard", "exposed_ms": "exposed\nms"}
FIGURES |= {"tokens_per_s": "tokens/s\nin all", "tokens_per_s_user": "tokens/s\nper user"}
FIGURES |= {"tokens_per_s_gpu": "tokens/s\nper GPU"}
HEADS = (
    "exposed: what waits for all-reduces, in each token's time; tokens/s in all and per GPU: of all requests, with the "
    "time that their prompts take; per user: of one request once its prompt is read"
)
NONE = "none is no model: no communication, one sub-block after the other; a wiring on two lanes can be faster"
DETAILS = {"attention_us": "attn us", "mlp_us": "MLP us", "all_reduce_us": "all-reduce us", "lanes": "lanes"}
DETAILS |= {"comm_ms": "comm ms", "prefill_s": "prefill s"}
FOOT = {
    "bytes_per_weight": "bytes per weight of the layers' matrices",
    "weights_gb": "GB of weights on each GPU",
    "cache_gb": "GB of keys and values on each GPU",
}
GRID = "ms/token, and how many times as fast as standard with the same weights (predicted):"


def print_plan(rows: Sequence[Row], console: Console, details: bool = False) -> None:
    """For each model on each chip a table: a row for each prediction where there are few or `details` are wanted, else
    a row for each setting with a column for each wiring.
    """
    for some in _grouped(rows):
        shared = _shared(some)
        _say(console, f"{some[0]['size']} on {some[0]['chip']}, engine {some[0]['engine']}, {_common(some, shared)}")
        varied = [key for key in GIVEN if key not in shared and key != "wiring"]
        wirings = list(dict.fromkeys(row["wiring"] for row in some))
        settings = _settings(some, varied)
        if not details and len(wirings) > 1 and len(settings) > 1 and len(some) == len(wirings) * len(settings):
            _say(console, GRID)
            _print(console, *_grid(settings, varied, wirings))
        else:
            _print(console, *_list(some, shared, details))
            _say(console, HEADS)
        _print_foot(some, console)


def _grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one model on one chip."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["size"], row["chip"], row["engine"]), []).append(row)
    return list(found.values())


def _shared(rows: Sequence[Row]) -> list[str]:
    """What was given and is the same in all rows, or in all of the same number of ranks."""
    found = [key for key in GIVEN if key != "wiring" and len({row[key] for row in rows}) == 1]
    if "link" not in found and len({row["tp"] for row in rows}) == len({(row["tp"], row["link"]) for row in rows}):
        found += ["link", "alpha_us"]  # each number of ranks has one
    return found


def _common(rows: Sequence[Row], shared: Sequence[str]) -> str:
    worth = [key for key in shared if USUAL.get(key) != rows[0][key]]
    return ", ".join(f"{GIVEN[key]} {'/'.join(dict.fromkeys(_shown(row[key]) for row in rows))}" for key in worth)


def _settings(rows: Sequence[Row], varied: Sequence[str]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """The rows of each setting, by wiring."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in varied), {})[row["wiring"]] = row
    return found


def _grid(settings: dict[tuple[Any, ...], dict[str, Row]], varied: Sequence[str], wirings: Sequence[str]) -> Cells:
    kept = [number for number, key in enumerate(varied) if not _follows(key, varied)]
    lines = [[*(GIVEN[varied[number]] for number in kept), *wirings]]
    for given, rows in settings.items():
        cells = []
        for wiring in wirings:
            row = rows[wiring]
            over = "" if row["speedup"] is None or wiring == "standard" else f" {row['speedup']:.2f}x"
            cells.append(f"{_shown(row['tpot_ms'])}{over}")
        lines.append([*(_shown(given[number]) for number in kept), *cells])
    return lines, len(kept)


def _follows(key: str, varied: Sequence[str]) -> bool:
    """Whether what is given follows from something else that is shown."""
    return IMPLIED.get(key) in varied


def _list(rows: Sequence[Row], shared: Sequence[str], details: bool) -> Cells:
    varied = [key for key in GIVEN if key not in shared]
    given = {key: GIVEN[key] for key in varied if details or not _follows(key, varied)}
    columns = {**given, **FIGURES, **(DETAILS if details else {})}
    if all(row["speedup"] is None for row in rows):
        del columns["speedup"]
    return [list(columns.values()), *([_shown(row[key]) for key in columns] for row in rows)], len(given)


def _print(console: Console, lines: Sequence[Sequence[str]], given: int) -> None:
    """Heads and rows, of which the first columns are `given`. What is wider than the console goes on below, the given
    columns again: nothing is cut off.
    """
    before = console.width
    for number, columns in enumerate(_blocks(lines, given, before)):
        if number:
            _say(console, "the same rows, further columns:")
        heads = (Column(lines[0][column], justify="right", no_wrap=True) for column in columns)
        table = Table(*heads, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for line in lines[1:]:
            table.add_row(*(line[column] for column in columns))
        console.width = max(before, console.measure(table, options=console.options.update(max_width=10_000)).maximum)
        console.print(table)
        console.width = before


def _blocks(lines: Sequence[Sequence[str]], given: int, width: int) -> list[list[int]]:
    """The columns of each part of a table: the given ones, and as many others as the width has room for, at least
    one.
    """
    widths = [max(len(part) for line in lines for part in line[column].split("\n")) for column in range(len(lines[0]))]
    first = list(range(given))
    blocks, room = [[*first]], width - sum(widths[column] + GAP for column in first)
    left = room
    for column in range(given, len(widths)):
        if widths[column] + GAP > left and len(blocks[-1]) > given:
            blocks.append([*first])
            left = room
        blocks[-1].append(column)
        left -= widths[column] + GAP
    return blocks


def _print_foot(rows: Sequence[Row], console: Console) -> None:
    parts = []
    for key, what in FOOT.items():
        values = [row[key] for row in rows]
        many = f"{_shown(min(values))} to {_shown(max(values))}" if len(set(values)) > 1 else _shown(values[0])
        parts.append(f"{what}: {many}")
    _say(console, "; ".join(parts))
    for remark in dict.fromkeys(row["remark"] for row in rows if row["remark"]):
        _say(console, f"remark: {remark}")
    for assumed in dict.fromkeys(row["assumed"] for row in rows if row["assumed"]):
        names = dict.fromkeys(row["weights"] for row in rows if row["assumed"] == assumed)
        _say(console, f"remark: {', '.join(names)}: {assumed}")
    if any(row["wiring"] == "none" for row in rows):
        _say(console, NONE)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


LISTED = ("sizes", "chips", "links", "wirings", "weights")
_LAYERS = 60  # of the model whose all-reduces are counted: whole cycles of all rows
_UNITS = {"tb_s": "TB/s", "tflop_s": "TFLOP/s", "gb_s": "GB/s", "memory_gb": "GB"}
_UNITS |= {"all_reduces_per_layer": "all-reduces a layer"}


def named(what: str) -> list[Row]:
    """What has a name that options take."""
    match what:
        case "sizes":
            return [
                {
                    "name": name,
                    "billion": float(f"{RankCosts(size, 1, element_bytes=1).weight_bytes / 1e9:.3g}"),
                    "layers": size.layers,
                    "hidden": size.hidden,
                    "heads": size.heads,
                    "kv_heads": size.kv_heads,
                    "context": size.context,
                }
                for name, size in SIZES.items()
            ]
        case "chips":
            return [
                {
                    "name": chip.name,
                    "memory_gb": chip.memory_gb,
                    "tb_s": chip.read_tb_s,
                    "tflop_s": chip.bf16_tflop_s,
                    "links": ", ".join(chip.links),
                }
                for chip in CHIPS.values()
            ]
        case "links":
            return [
                {"name": name, "us": round(link.alpha * 1e6, 3), "gb_s": round(link.beta / 1e9, 3), "what": link.what}
                for name, link in LINKS.items()
            ]
        case "wirings":
            names = dict.fromkeys([*EXAMPLES, *(name for name, arm in ARMS.items() if len(arm.rows) == 1)])
            return [_wiring(name) for name in names if name not in ARMS or ARMS[name].link is None]
        case _:
            return [{"name": name, "storage": str(storage)} for name, storage in NAMED.items()]


def _wiring(name: str) -> Row:
    """A row of the table, by its two facts in each of its sub-blocks."""
    found = set(Wiring((name,) * _LAYERS).sub_blocks()[:-1])  # the last layer may end in its own way
    if len(found) == 1:
        attention, mlp = (f"lag {block.lag}, {block.out}" for block in found.pop())
    else:
        attention = mlp = "not the same in all layers"
    each = Wiring((name,) * _LAYERS).all_reduces() / _LAYERS
    return {"name": name, "attention": attention, "mlp": mlp, "all_reduces_per_layer": round(each, 2)}


def print_named(what: str, rows: Sequence[Row], console: Console) -> None:
    """A table; names come first, and are never cut off."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=what, title_justify="left")
    for number, key in enumerate(rows[0]):
        text = isinstance(rows[0][key], str)
        head = _UNITS.get(key) or key.replace("_", " ")
        table.add_column(head, justify="left" if text else "right", no_wrap=number == 0 or not text)
    for row in rows:
        table.add_row(*map(_shown, row.values()))
    console.print(table)
