"""How a verb is made from a function and dataclasses of options; which options were renamed."""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from functools import wraps
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from typer.core import TyperCommand

from ladder import __version__
from ladder.cli.help import EXAMPLES, GROUPS, MEASURE, STATUS
from ladder.engine.executors.torchrun import torchrun_rank
from ladder.engine.options import RENAMED as ENGINE_RENAMED
from ladder.logs import LEVELS, current_level, level_number, shown

HELP_NAMES = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    pretty_exceptions_enable=False,
    context_settings=HELP_NAMES,
    rich_markup_mode="rich",
    help="Language models whose all-reduces run while the next sub-block computes: run, convert, train, measure them.",
    epilog=STATUS,
)


QUIET = "error"  # the level of the log that --quiet means


def _flag(name: str) -> str:
    """The option of a field."""
    return f"--{name.replace('_', '-')}"


_QUIET_HELP = "Results and errors only: no progress, no warnings, no remarks."
_LOG_HELP = f"Lines of the log on standard error, from this level on: {', '.join(LEVELS)}."
_WINDOW = {"--window": "--seq-len"}
_LINK = {"--link": "--emulate-link"}
_TRAINING = {**_WINDOW, "--micro": "--micro-batch-size"}
# by verb: options of earlier versions, and what they are called now
RENAMED: dict[str, dict[str, str]] = {
    "generate": {_flag(old): _flag(new) for old, new in ENGINE_RENAMED.items()},
    "fit": _WINDOW,
    "scan": _WINDOW,
    "trace": _LINK,
    "bench": _LINK,
    "adapt": {**_TRAINING, "--begin": "--init-from", "--rank": "--lora-rank"},
    "train": _TRAINING,
}


def renamed(error: Exception) -> str | None:
    """The sentence for an option that a verb no longer has, where `error` is click's and its table knows the option."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    new = RENAMED.get(getattr(context, "info_name", None) or "", {}).get(option or "")
    return None if new is None else f"{option} was renamed: use {new}"


def _panel(group: type) -> str:
    """What the options of a dataclass are about: the beginning of its docstring."""
    return re.split(r"[.:;](?:\s|$)", (group.__doc__ or "").strip(), maxsplit=1)[0]


def _parameter(entry: Field[Any], hint: Any, panel: str) -> inspect.Parameter:
    default: Any = ... if entry.default is MISSING else entry.default
    if get_origin(hint) is tuple:  # typer has repeated options as lists
        hint, default = list.__class_getitem__(get_args(hint)[0]), default if default is ... else list(default)
    flag = _flag(entry.name)  # one spelling, so that there is no --no-check beside --check
    if default is True:
        flag += f"/--no{flag[1:]}"
    # the path of the installed package is of no use in --help
    shown = (
        default not in ([], None) and default is not False and not (isinstance(default, Path) and default.is_absolute())
    )
    if entry.metadata.get("argument"):
        value = typer.Argument(... if entry.default is MISSING else default, help=escape(entry.metadata["help"]))
    else:
        value = typer.Option(
            default, flag, help=escape(entry.metadata["help"]), show_default=shown, rich_help_panel=panel
        )
    return inspect.Parameter(entry.name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=hint)


def _passing(passes_on: Callable[[Sequence[str]], bool]) -> type[TyperCommand]:
    """A command that keeps options it does not know, where its arguments say so."""

    class Passing(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            ctx.ignore_unknown_options = ctx.allow_extra_args = passes_on(args)
            return super().parse_args(ctx, args)

    return Passing


def verb(
    *groups: type,
    name: str | None = None,
    log_level: str | None = None,
    passes_on: Callable[[Sequence[str]], bool] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose options are the fields of `groups`; it is called with one filled instance of each, and where it
    takes `named` with the names of the options that were given on the command line. `log_level`: what it shows where
    the command line does not say it. `passes_on`: for which arguments it keeps options that it does not know; it takes
    them as `passed`.
    """

    def decorate(work: Callable[..., None]) -> Callable[..., None]:
        owned = {
            group: [
                (entry, get_type_hints(group)[entry.name])
                for entry in fields(group)
                if not entry.metadata.get("keyword")
            ]
            for group in groups
        }
        takes_named = "named" in inspect.signature(work).parameters

        @wraps(work)
        def command(call: typer.Context, **given: Any) -> None:
            given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
            filled = (group(**{entry.name: given[entry.name] for entry, _ in own}) for group, own in owned.items())
            quiet = given.pop("quiet") or _quiet_before(call)
            level = given.pop("log_level") or (QUIET if quiet else _default_level(call, log_level))
            if level is not None:
                call.with_resource(shown(level_number(level)))
            sources = {name: call.get_parameter_source(name) for name in given}
            named = frozenset(name for name, source in sources.items() if source and source.name == "COMMANDLINE")
            more: dict[str, Any] = {"named": named} if takes_named else {}
            work(*filled, **more, **({"passed": tuple(call.args)} if passes_on else {}))

        parameters = [inspect.Parameter("call", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        parameters += [_parameter(entry, hint, _panel(group)) for group, own in owned.items() for entry, hint in own]
        more: dict[str, tuple[Any, Any]] = {
            "quiet": (bool, typer.Option(False, "--quiet", "-q", help=_QUIET_HELP, show_default=False)),
            "log_level": (str | None, typer.Option(None, "--log-level", help=_LOG_HELP)),
        }
        for option, (kind, default) in more.items():
            parameters.append(
                inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called = name or work.__name__
        examples = "\n\n".join(f"[dim]$[/dim] {escape(example)}" for example in EXAMPLES.get(called, ()))
        app.command(
            called,
            cls=_passing(passes_on) if passes_on else None,
            context_settings=HELP_NAMES,
            epilog=f"[bold]Examples[/bold]\n\n{examples}" if examples else None,
            rich_help_panel=GROUPS.get(called, MEASURE),
        )(command)
        return command

    return decorate


def _quiet_before(call: typer.Context) -> bool:
    """Whether --quiet stood before the verb."""
    return call.parent is not None and bool(call.parent.params.get("quiet"))


def _default_level(call: typer.Context, level: str | None) -> str | None:
    source = None if call.parent is None else call.parent.get_parameter_source("log_level")
    return None if source is not None and source.name == "COMMANDLINE" else level


@app.callback(invoke_without_command=True)
def about(
    call: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help=_QUIET_HELP, show_default=False),
    log_level: str = typer.Option("warning", "--log-level", help=_LOG_HELP),
) -> None:
    call.with_resource(shown(level_number(QUIET if quiet else log_level)))
    if version:
        typer.echo(f"ladder {__version__}")
        raise typer.Exit
    if call.invoked_subcommand is None:
        typer.echo(call.get_help())
        raise typer.Exit


@contextmanager
def bytes_bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar of bytes that are done, where there is a terminal to draw it on."""
    with _bar(*_bytes_columns()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


@contextmanager
def weights_bar(total: int) -> Iterator[Callable[[int], None]]:
    """The same for a model's weights; called with the number of bytes that were loaded since the last call."""
    with _bar(*_bytes_columns()) as bar:
        task = bar.add_task("loading weights", total=total)
        yield lambda count: bar.advance(task, count)


def _bytes_columns() -> tuple[ProgressColumn, ...]:
    return TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()


@contextmanager
def steps_bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar of steps that are done, and what is being done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _bar(*columns) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def told_little() -> bool:
    """Whether results and errors are all that is wanted (--quiet)."""
    return current_level() >= level_number(QUIET)


def _bar(*columns: ProgressColumn) -> Progress:
    console, own = Console(stderr=True), torchrun_rank()
    drawn = console.is_terminal and not told_little() and (own is None or own.rank == 0)
    return Progress(*columns, console=console, transient=True, disable=not drawn)
