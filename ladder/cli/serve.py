"""`ladder serve`."""

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

import typer

from ladder.cli.verbs import verb, weights_bar
from ladder.engine.options import EngineOptions
from ladder.errors import LadderError
from ladder.hub import directory_of
from ladder.server.options import ServerOptions


@dataclass(frozen=True)
class Served:
    """Which model."""

    directory: Path | None = field(
        default=None, metadata={"argument": True, "help": "The model's directory; default: that of --model."}
    )


@verb(Served, EngineOptions, ServerOptions, log_level="info")
def serve(served: Served, options: EngineOptions, server: ServerOptions, named: frozenset[str]) -> None:
    """Serve a model over HTTP: OpenAI's API, for its clients."""
    if served.directory is not None:
        if "model" in named:
            raise LadderError(f"two models were given, {served.directory} and {options.model}: give one of them")
        options = replace(options, model=served.directory)
    options = replace(options, model=directory_of(options.model), warm_up=server.warm_up)
    server.key()  # refused before anything is loaded
    logging.getLogger("uvicorn").setLevel("WARNING")
    try:
        from ladder.server import run
    except ModuleNotFoundError as error:
        raise LadderError(f"serving needs {error.name}: pip install 'ladder-residual[serve]'") from None
    from ladder.engine.setup import Setup

    setup = Setup(options)
    with run.bind(server) as listener:
        with weights_bar(setup.weight_bytes) as progress:
            llm = run.load(setup, server, progress)
        name = run.model_name(setup, server)
        listener.listen(run.BACKLOG)
        typer.echo(f"serving {name} at {run.url_of(listener)}/v1")
        run.serve(llm, name, server, listener)
