"""`ladder demo` and `ladder doctor`: what this machine gains, and what it can do."""

import json
from dataclasses import dataclass

import typer
from rich.console import Console

from ladder.bench.demo.options import DemoOptions
from ladder.cli.verbs import verb
from ladder.options import option


@verb(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Show on this machine what Ladder gains: one model writes a text, waiting for its all-reduces and not."""
    from ladder.devices import device_type

    console = Console()
    if device_type(options.device) == "cuda":
        from ladder.bench.demo.gpu import demo_gpu

        return demo_gpu(options, console)
    from ladder.bench.demo.run import demo
    from ladder.bench.demo.screen import end, show

    if options.json:
        *_, found = demo(options)
        typer.echo(json.dumps(found.line()))
        return
    end(show(demo(options), console), console, options.out)


@dataclass(frozen=True)
class DoctorOptions:
    """What is looked at, and how it is printed."""

    measure: bool = option(True, "Time all-reduces, where there are several GPUs.")
    json: bool = option(False, "One JSON object.")


@verb(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Tell what this machine can do, which wiring suits it, and what to install for the rest."""
    from ladder.bench.doctor.doctor import examine, told

    report = examine(options.measure)
    typer.echo(json.dumps(report) if options.json else told(report))
