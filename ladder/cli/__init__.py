"""The command line: one verb per job, its options generated from the dataclasses they fill."""

import sys
from typing import NoReturn

import typer

from ladder.cli import chat, data, explore, generate, load, machine, measure, models, plan, scan, serve, train
from ladder.cli.verbs import app, renamed
from ladder.errors import LadderError, RankError

__all__ = ["app", "chat", "data", "explore", "generate", "load", "machine", "main", "measure", "models", "plan"]
__all__ += ["scan", "serve", "train"]

REQUIRED = ("torch", "transformers", "safetensors", "tokenizers", "huggingface_hub")  # what computes needs these

# click's, which typer carries under a private name
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def main() -> NoReturn:
    """The command `ladder`: bad input costs one sentence and exit status 2, a rank that fails or memory that ends one
    sentence and 1.
    """
    try:
        sys.exit(app(prog_name="ladder", standalone_mode=False))
    except _UsageError as error:  # an unknown option, a number that is none
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        call = getattr(error, "ctx", None)
        _leave(renamed(error) or f"{message} (see {call.command_path if call else 'ladder'} --help)", 2)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)  # Ctrl-C
    except LadderError as error:
        _leave(str(error), 2)
    except (RankError, OSError) as error:
        _leave(str(error), 1)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":  # torch's, of a GPU
            raise
        _leave(f"there is not enough memory: {str(error).splitlines()[0] if str(error) else 'allocation failed'}", 1)
    except ModuleNotFoundError as error:
        if error.name not in REQUIRED:
            raise
        _leave(f"{error.name} is not installed: pip install {error.name}; ladder doctor says what else is missing", 1)


def _leave(reason: str, status: int) -> NoReturn:
    typer.echo(f"ladder: {' '.join(reason.split())}", err=True)
    sys.exit(status)
