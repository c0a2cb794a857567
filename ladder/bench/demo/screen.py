"""What `ladder demo` shows on a CPU: the sides as they write, then the account, the timeline and what to try next."""

from collections.abc import Iterable
from pathlib import Path

from rich.box import ROUNDED, SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from ladder.bench.demo.run import LIKE, LIKE_NAME, RANKS, Found
from ladder.bench.demo.timeline import timeline
from ladder.bench.demo.write import SHOWN, TRACED
from ladder.bench.trace.lanes import draw
from ladder.errors import LadderError

HEADS = {"waiting": "waiting, as standard does", "overlapping": "Ladder, computing meanwhile"}
NAMES = {"waiting": "waiting", "overlapping": "Ladder"}
LINES = 9  # of text in a panel
NARROW = 76  # columns from which on the sides stand side by side
NEXT = (
    ('ladder generate --tp 2 --prompt "Once upon a time"', "this model, or your own with --model DIR"),
    ("ladder doctor", "what this machine can do, and which wiring suits it"),
    (f"ladder plan --chip {LIKE.chip} --tp {LIKE.tp} --link {LIKE.link}", "what a 70B model would gain on GPUs"),
)


def show(steps: Iterable[Found], console: Console) -> Found:
    """Everything but the end, as it comes: side by side on a terminal, else line by line."""
    found: Found | None = None
    if console.is_terminal:
        with Live(console=console, refresh_per_second=8, transient=False) as live:
            for found in steps:
                live.update(_sides(found, console.width))
    else:
        told = False
        for found in steps:
            if found.chosen is not None and not told:
                console.print(_about(found))
                told = True
        assert found is not None
        for name in SHOWN:
            console.print(f"\n[bold]{HEADS[name]}[/bold]\n{_speed(found, name)}")
            console.print(Text(found.prompt + found.sides[name].written))
    assert found is not None
    return found


def _about(found: Found) -> str:
    lines = [
        f"The embedded model ({found.parameters / 1e6:.0f} million parameters, trained as a Ladder model) on {RANKS} "
        "ranks, a process each. Both sides are this same model and write the same text; they take turns."
    ]
    if found.chosen is None:
        return lines[0] + "\nstarting the ranks ..."
    micro, link = found.chosen.sub_block * 1e6, found.chosen.link.alpha * 1e6
    lines.append(
        f"The link between the ranks is emulated: an all-reduce takes {link / 1e3:.2f} ms, "
        f"{found.link_in_sub_blocks:.2f} times as long as a sub-block takes of a core here ({micro / 1e3:.2f} ms). The "
        f"proportion is that of {LIKE_NAME}, by `ladder plan`, where an all-reduce takes "
        f"{found.like['all_reduce_us']:.0f} us."
    )
    return "\n".join(lines)


def _sides(found: Found, width: int) -> RenderableType:
    beside = width >= NARROW
    each = (width // 2 if beside else width) - 4
    panels = [_panel(found, name, each) for name in SHOWN]
    grid = Table.grid(expand=True)
    for _ in range(len(panels) if beside else 1):
        grid.add_column(ratio=1)
    if beside:
        grid.add_row(*panels)
    else:
        for panel in panels:
            grid.add_row(panel)
    return Group(Text(_about(found)), grid)


def _panel(found: Found, name: str, width: int) -> Panel:
    """The end of what a side has written, and how fast."""
    text = Text(found.prompt, "dim").append(found.sides[name].written, "not dim")
    lines = list(text.wrap(Console(width=width), width))[-LINES:]
    lines += [Text()] * (LINES - len(lines))
    speed = Text(_speed(found, name), "bold")
    return Panel(Group(*lines, Text(), speed), title=HEADS[name], title_align="left", box=ROUNDED)


def _speed(found: Found, name: str) -> str:
    side = found.sides[name]
    if side.per_second is None:
        return "-"
    return f"{side.timed} tokens in {side.seconds:.1f} s: {side.per_second:.1f} tokens/s"


def end(found: Found, console: Console, out: Path) -> None:
    """The account, the timeline and its picture, and what to try next."""
    bound = "" if found.bound is None else f"; without any communication it would be {found.bound:.2f} times"
    console.print(
        f"\n[bold]Ladder was {found.speedup:.2f} times as fast[/bold] as waiting, measured just now{bound}.",
        highlight=False,
    )
    same = "The texts are the same, token by token" if found.same_text else "The texts differ: that is a defect"
    console.print(
        f"{same}: both sides are one function, and all that differs is when it waits. A model has to be trained or "
        "adapted for that, as this one was. (Wired standard, the same weights would write nonsense, with "
        f"{found.rate('standard'):.1f} tokens/s.)\n",
        highlight=False,
    )
    if set(found.steps) == set(SHOWN):
        console.print(_account(found))
        _timeline(found, console)
        _picture(found, console, out)
    console.print("\n[bold]Next[/bold]")
    for command, what in NEXT:
        console.print(f"  {command}", style="bold", highlight=False, soft_wrap=True)
        console.print(f"      {what}", highlight=False)


def _account(found: Found) -> Table:
    heads = ("one decode step", "ms", "all-reduces", "ms on the link", "exposed ms", "hidden")
    table = Table(*(Column(head, justify="left" if head == heads[0] else "right") for head in heads), box=SIMPLE_HEAD)
    for name in SHOWN:
        account = found.steps[name].account()
        step, comm, exposed = (f"{account[key]:.1f}" for key in ("step_ms", "comm_ms", "exposed_ms"))
        table.add_row(NAMES[name], step, str(account["all_reduces"]), comm, exposed, f"{account['hidden']:.0%}")
    table.caption = (
        f"of the layers, on rank 0, the fastest of {TRACED} steps; tokens/s above are of all steps. Exposed: a "
        "sub-block had to wait"
    )
    return table


def _timeline(found: Found, console: Console) -> None:
    ms = max(step.ms for step in found.steps.values())
    console.print(
        f"\n[bold]One decode step[/bold] of each (the fastest of {TRACED}), {ms:.1f} ms from left to right",
        highlight=False,
    )
    timeline([(f"{NAMES[name]}: {found.steps[name].ms:.1f} ms", found.steps[name]) for name in SHOWN], console, ms)


def _picture(found: Found, console: Console, out: Path) -> None:
    assert found.chosen is not None
    title = f"One decode step of the embedded model, rank 0 of {RANKS}, cpu; emulated link"
    title += f", {found.chosen.link.alpha * 1e3:.2f} ms an all-reduce"
    titles = [f"{HEADS[name]}: {found.steps[name].ms:.1f} ms" for name in SHOWN]
    try:
        draw([found.steps[name] for name in SHOWN], title, out, titles)
    except LadderError as error:  # no library for charts
        console.print(f"no picture file: {error}", markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(f"wrote {out}: the same as a picture", markup=False, highlight=False, soft_wrap=True)
