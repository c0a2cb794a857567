"""`ladder serve`."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import typer

from ladder.cli.verbs import verb, weights_bar
from ladder.config.early import check_model_named
from ladder.engine.early import prepared
from ladder.engine.options import EngineOptions
from ladder.errors import LadderError, install
from ladder.server.options import ServerOptions


@dataclass(frozen=True)
class Served:
    """Which model."""

    directory: Path | None = field(
        default=None, metadata={"argument": True, "help": "The model's directory; default: that of --model."}
    )


def _for_vllm(arguments: Sequence[str]) -> bool:
    """Whether options that we do not know are vLLM's."""
    pairs = pairwise([*arguments, ""])
    return any(one == "--engine=vllm" or (one, two) == ("--engine", "vllm") for one, two in pairs)


@verb(Served, EngineOptions, ServerOptions, log_level="info", passes_on=_for_vllm)
def serve(
    served: Served, options: EngineOptions, server: ServerOptions, named: frozenset[str], passed: tuple[str, ...]
) -> None:
    """Serve a model over HTTP: OpenAI's API, for its clients."""
    if str(served.directory or "").startswith("-"):
        raise LadderError(f"name the model before vLLM's own options: {served.directory} was found in its place")
    if served.directory is not None:
        if "model" in named:
            raise LadderError(f"two models were given, {served.directory} and {options.model}: give one of them")
        options = replace(options, model=served.directory)
    if server.engine == "vllm":
        from ladder.vllm.serve import become, handover

        check_model_named(options.model, hub=False)
        become(handover(options, server, named, passed))
    server.key()  # refused before anything is loaded
    options = prepared(replace(options, warm_up=server.warm_up))
    logging.getLogger("uvicorn").setLevel("WARNING")
    try:
        from ladder.server import run
    except ModuleNotFoundError as error:
        raise LadderError(f"serving needs {error.name}: {install('serve')}") from None
    from ladder.engine.setup import Setup

    setup = Setup(options)
    with run.bind(server) as listener:
        with weights_bar(setup.weight_bytes) as progress:
            llm = run.load(setup, server, progress)
        name = run.model_name(setup, server)
        listener.listen(run.BACKLOG)
        typer.echo(f"serving {name} at {run.url_of(listener)}/v1")
        run.serve(llm, name, server, listener)
