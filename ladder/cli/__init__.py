"""The command line: one verb per job, its options generated from the dataclasses they fill."""

import sys
from typing import NoReturn

import typer

from ladder.cli import chat, data, explore, generate, load, measure, models, plan, scan, serve, train
from ladder.cli.verbs import app, renamed
from ladder.errors import LadderError, RankError

__all__ = [
    "app",
    "chat",
    "data",
    "explore",
    "generate",
    "load",
    "main",
    "measure",
    "models",
    "plan",
    "scan",
    "serve",
    "train",
]

# click's, which typer carries under a private name
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def main() -> NoReturn:
    """The command `ladder`: bad input costs one sentence and exit status 2, a rank that fails one sentence and 1."""
    try:
        sys.exit(app(standalone_mode=False))
    except _UsageError as error:  # an unknown option, a number that is none
        _leave(renamed(error) or f"{error.format_message()} (see --help)", 2)  # type: ignore[attr-defined]
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)  # Ctrl-C
    except LadderError as error:
        _leave(str(error), 2)
    except (RankError, OSError) as error:
        _leave(str(error), 1)


def _leave(reason: str, status: int) -> NoReturn:
    typer.echo(f"ladder: {' '.join(reason.split())}", err=True)
    sys.exit(status)
