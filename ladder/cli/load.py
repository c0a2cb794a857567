"""`ladder load`."""

import json
from typing import Any

import typer
from rich.console import Console

from ladder.cli.verbs import steps_bar, verb
from ladder.load.options import LoadOptions


@verb(LoadOptions)
def load(options: LoadOptions) -> None:
    """Send requests to an OpenAI-compatible endpoint, and measure latencies, throughput and goodput."""
    from ladder.client.endpoint import load_httpx
    from ladder.load.load import load
    from ladder.load.summary import remarks
    from ladder.load.table import table

    load_httpx()  # an error before anything is done
    with steps_bar("starting") as progress:
        lines = load(options, _machine, progress)
    if options.json:
        for line in lines:
            typer.echo(json.dumps(line))
    else:
        console = Console()
        console.width = max(console.width, 132)  # figures that are cut off are none
        console.print(table(lines))
    several = len(lines) > 1
    for number, line in enumerate(lines, 1):
        for remark in remarks(line):
            typer.echo(f"{f'run {number}: ' if several else ''}{remark}", err=True)
    if not options.json:
        typer.echo(f"wrote {options.out}; ladder report {options.out} draws it")
    if any(line["interrupted"] for line in lines):
        raise typer.Exit(130)
    if not any(line["completed"] for line in lines):
        raise typer.Exit(1)


def _machine() -> dict[str, Any]:
    """The client's machine."""
    import torch  # here: it takes seconds

    from ladder.bench.machine import machine

    return machine(torch.device("cpu"))
