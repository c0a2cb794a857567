"""`ladder explore`."""

import webbrowser

import typer

from ladder.cli.verbs import steps_bar, verb
from ladder.explore.options import ExploreOptions


@verb(ExploreOptions)
def explore(options: ExploreOptions) -> None:
    """Choose a deployment on a page: what each wiring gives, what waits for what, and whether Ladder is worth it."""
    from ladder.charts.library import load_library
    from ladder.explore.answers import Answers
    from ladder.explore.grid import write
    from ladder.explore.measured import Measured
    from ladder.explore.page import page
    from ladder.explore.server import Server

    offer = options.offer()
    load_library()
    measured = Measured.of(options.inputs)  # refused before anything is done
    if options.out is not None:
        with steps_bar("predicting") as progress:
            count = write(offer, options.inputs, options.out, progress)
        typer.echo(f"wrote {options.out}: {count} settings")
        return
    answers = Answers(offer, measured)
    with Server(options.port, page(offer), answers) as server:
        try:
            typer.echo(f"exploring at {server.url} (Ctrl-C ends it)")
            if options.open:
                webbrowser.open(server.url)
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("stopped")
