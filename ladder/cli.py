"""The command line: one verb per job, its options generated from the dataclasses they fill."""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from ladder import __version__
from ladder.config.fields import read_text
from ladder.engine.options import EngineOptions, SamplingParams, argument, option
from ladder.errors import LadderError, RankError

if TYPE_CHECKING:
    from ladder.engine.requests import Chunk, Result

# click's, which typer carries under a private name
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Tensor-parallel language models that never wait for the network.",
)


@dataclass(frozen=True)
class Prompts:
    """Where the prompts come from, and the form of the answers."""

    prompt: tuple[str, ...] = option((), "A prompt (may be given several times).")
    prompts_file: Path | None = option(None, "A file with one prompt per line; empty lines are passed over.")
    token_ids: tuple[str, ...] = option((), "A prompt as ids, as in 5,17,9 (may be given several times).")
    json: bool = field(default=False, metadata={"help": "One JSON line per prompt instead of text."})

    def all(self) -> list[str | list[int]]:
        """Every prompt: the texts, the file's lines, the ids."""
        prompts: list[str | list[int]] = [*self.prompt]
        if self.prompts_file is not None:
            lines = [line.rstrip("\r") for line in read_text(self.prompts_file).split("\n") if line.strip()]
            if not lines:
                raise LadderError(f"{self.prompts_file} has no prompts: write one per line")
            prompts += lines
        for text in self.token_ids:
            if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text.replace(" ", "")):
                raise LadderError(f"token ids {text!r} are not numbers with commas between, as in 5,17,9")
            prompts.append([int(part) for part in text.split(",")])
        if not prompts:
            raise LadderError("no prompt: give --prompt, --prompts-file or --token-ids")
        return prompts


def _parameter(entry: Field[Any], hint: Any) -> inspect.Parameter:
    default: Any = ... if entry.default is MISSING else entry.default
    if get_origin(hint) is tuple:  # typer speaks of repeated options as lists
        hint, default = list.__class_getitem__(get_args(hint)[0]), default if default is ... else list(default)
    flag = f"--{entry.name.replace('_', '-')}"  # one spelling, so that there is no --no-check beside --check
    if default is True:
        flag += f"/--no{flag[1:]}"
    told = default not in ([], None) and default is not False
    if entry.metadata.get("argument"):
        value = typer.Argument(... if entry.default is MISSING else default, help=entry.metadata["help"])
    else:
        value = typer.Option(default, flag, help=entry.metadata["help"], show_default=told)
    return inspect.Parameter(entry.name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=hint)


def verb(*groups: type, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose options are the fields of `groups`; it is called with one filled instance of each."""

    def decorate(work: Callable[..., None]) -> Callable[..., None]:
        owned = {group: [(entry, get_type_hints(group)[entry.name]) for entry in fields(group)] for group in groups}

        @wraps(work)
        def command(**given: Any) -> None:
            given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
            work(*(group(**{entry.name: given[entry.name] for entry, _ in own}) for group, own in owned.items()))

        parameters = [_parameter(entry, hint) for own in owned.values() for entry, hint in own]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        app.command(name)(command)
        return command

    return decorate


@app.callback(invoke_without_command=True)
def about(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        typer.echo(f"ladder {__version__}")
        raise typer.Exit


@verb(EngineOptions, Prompts, SamplingParams)
def generate(engine: EngineOptions, prompts: Prompts, sampling: SamplingParams) -> None:
    """Continue prompts with a model from a Hugging Face directory, under any wiring."""
    from ladder.engine.executors import adopt_world  # torch takes seconds to import: not for --help
    from ladder.engine.llm import LLM, result
    from ladder.engine.requests import Opened

    given = prompts.all()
    opened = Opened(adopt_world(engine))
    requests = opened.requests(given, sampling)
    loaded = 0
    with _bar("loading weights") as show:

        def progress(count: int) -> None:
            nonlocal loaded
            loaded += count
            show(loaded, opened.weight_bytes)

        llm = LLM.load(opened, progress)
    with llm:
        # answers are shown one after the other, the first unfinished one live
        turn, waiting, finished = 0, [""] * len(given), [False] * len(given)
        for chunk in llm.run(requests):
            waiting[chunk.index] += _shown(chunk)
            finished[chunk.index] = chunk.finish_reason is not None
            while turn < len(given):
                if not prompts.json:
                    typer.echo(waiting[turn], nl=False)
                    waiting[turn] = ""
                if not finished[turn]:
                    break
                typer.echo(_json_line(result(given[turn], requests[turn])) if prompts.json else "")
                turn += 1
    if broken := [request.index for request in requests if request.finish_reason == "error"]:
        why = "the model's output is not finite: try --check for its weights, or a wider --dtype"
        raise LadderError(f"prompt {broken[0]}: {why}")


@dataclass(frozen=True)
class TraceOptions:
    """What is traced, and where the files go."""

    model: Path | None = option(None, "Directory with config.json and weights; default: --size with random weights.")
    size: str = option("tiny", "A named size, where no model is given.")
    wiring: tuple[str, ...] = option(("standard", "ladder"), "A wiring to draw (may be given several times).")
    tp: int = option(2, "Number of ranks, a process each.")
    link: str | None = option(None, "Time the sums as on this link: a name, or alpha,beta as in 50us,10GB/s.")
    device: str = option("cpu", "cpu, cuda or cuda:N.")
    batch: int = option(8, "Requests in the step.")
    context: int = option(128, "Positions of each request, the step's included.")
    out: Path = option(Path("trace"), "Folder for the traces, the picture and the spans.")
    json: bool = option(False, "The account as JSON lines.")

    def __post_init__(self) -> None:
        for name in ("tp", "batch", "context"):
            if getattr(self, name) < 1:
                raise LadderError(f"{name} must be at least 1, not {getattr(self, name)}")


@verb(TraceOptions)
def trace(options: TraceOptions) -> None:
    """Record one decoding step per wiring: traces for Chrome or Perfetto, a picture of the lanes, and the account."""
    from ladder.bench.lanes import plotting
    from ladder.bench.trace import Plan, trace
    from ladder.checkpoint import Directory, Random
    from ladder.comm.link import Link
    from ladder.config import ModelConfig
    from ladder.engine.requests import device

    plotting()
    source = Random() if options.model is None else Directory(options.model)
    config = source.config if isinstance(source, Directory) else ModelConfig.named(options.size)
    config.check_degree(options.tp)
    if options.context > config.context:
        raise LadderError(f"context {options.context} is more than the model's {config.context}")
    wirings = tuple(str(config.rewired(pattern).wiring) for pattern in options.wiring)
    link = None if options.link is None else Link.parse(options.link)
    plan = Plan(config, source, wirings, link, device(options.device), options.batch, options.context, options.out)
    table = Table("wiring", "sums", "step ms", "wire ms", "exposed ms", "hidden")
    for step in trace(plan, options.tp):
        account = step.account()
        if options.json:
            typer.echo(json.dumps(account))
        figures = [f"{account[key]:.2f}" for key in ("step_ms", "wire_ms", "exposed_ms")]
        hidden = "-" if account["hidden"] is None else f"{account['hidden']:.0%}"
        table.add_row(step.wiring, str(account["sums"]), *figures, hidden)
    if not options.json:
        Console().print(table)
        typer.echo(
            f"wrote {options.out}: lanes.png, steps.rank*.jsonl, *.trace.json (for chrome://tracing or Perfetto)"
        )


@dataclass(frozen=True)
class TuneOptions:
    """Which kernels, for whom."""

    out: Path = argument("File of JSON lines; its other lines stay. `ladder generate --tuned` reads it.")
    size: str = option("llama-3-70b", "A named size: its weights' shapes are tuned for.")
    tp: int = option(8, "Number of ranks that share it.")
    batch: tuple[int, ...] = option((1, 4, 16, 64), "Requests at a time, up to 64 (may be given several times).")


@verb(TuneOptions)
def tune(options: TuneOptions) -> None:
    """Find the shapes of our kernels that suit this GPU, for one rank of a model."""
    from ladder.bench.tune import tuned

    for line in tuned(options.out, options.size, options.tp, options.batch):
        typer.echo(json.dumps(line))


@dataclass(frozen=True)
class ConvertOptions:
    """What becomes of which checkpoint."""

    model: str = argument("Directory of a checkpoint, or a model of the hub as in org/name.")
    out: Path = argument("Folder for the wired checkpoint; a new one.")
    wiring: str | None = option(None, "As in 'ladder' or 'standard:16 ladder:16'; default: what its config names.")
    revision: str | None = option(None, "Branch, tag or commit of a model of the hub.")


@verb(ConvertOptions)
def convert(options: ConvertOptions) -> None:
    """Rewire a checkpoint of Hugging Face's: same weights, another wiring. It needs adaptation afterwards."""
    from ladder.hf.convert import convert

    with _bar("copying") as progress:
        wiring = convert(options.model, options.out, options.wiring, options.revision, progress)
    typer.echo(f"wrote {options.out}: {wiring}")
    if not wiring.is_standard:
        typer.echo("Its weights were trained under another wiring: adapt them before use.")


@dataclass(frozen=True)
class EvalOptions:
    """What is compared, and by what."""

    model: tuple[str, ...] = argument(
        "Directories or models of the hub; the first is what the others are compared with."
    )
    wiring: tuple[str, ...] = option(
        (), "Put every model under this wiring (may be given several times); default: its own."
    )
    task: tuple[str, ...] = option((), "A task of lm-eval, a .yaml task or a .jsonl file (may be given several times).")
    text: Path | None = option(None, "A text file: perplexity, and with --source KL and greedy agreement.")
    source: str | None = option(None, "The model that KL and greedy agreement are measured against.")
    batch: int = option(8, "Sequences at a time.")
    window: int | None = option(None, "Tokens of text at a time; default: the model's context, at most 1024.")
    limit: int | None = option(None, "Only so many items of each task.")
    shots: int | None = option(None, "Examples before each item; default: what the task says.")
    tasks_dir: Path | None = option(None, "A folder with YAML files of tasks.")
    device: str = option("cpu", "cpu, cuda or cuda:N.")
    dtype: str = option("auto", "auto (the checkpoint's), float32, bfloat16 or float16.")
    json: bool = option(False, "One JSON line per model, wiring and measure instead of the table.")


@verb(EvalOptions, name="eval")
def evaluate(options: EvalOptions) -> None:
    """Measure models and wirings side by side: tasks of lm-eval, perplexity, KL and greedy agreement."""
    from ladder.hf.evaluate import Arm, evaluate, table

    arms = [Arm(model, wiring) for model in options.model for wiring in options.wiring or (None,)]
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    for name in ("model", "wiring", "json"):
        del given[name]
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=None)
        rows = evaluate(
            arms,
            tasks=given.pop("task"),
            progress=lambda done, total, what: bar.update(task, completed=done, total=total, description=what),
            **given,
        )
    if options.json:
        for row in rows:
            typer.echo(json.dumps(row))
    else:
        Console().print(table(rows))


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes that are done, where there is a terminal to draw it on."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _shown(chunk: "Chunk") -> str:
    """Without a tokenizer the terminal shows the ids."""
    return "".join(f"{token} " for token in chunk.token_ids) if chunk.text is None else chunk.text


def _json_line(result: "Result") -> str:
    return json.dumps(asdict(result), ensure_ascii=False)


def main() -> NoReturn:
    """The command `ladder`: bad input costs one sentence and exit status 2, a rank that fails one sentence and 1."""
    try:
        sys.exit(app(standalone_mode=False))
    except _UsageError as error:  # an unknown flag, a number that is none
        _leave(f"{error.format_message()} (see --help)", 2)  # type: ignore[attr-defined]
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)  # Ctrl-C
    except LadderError as error:
        _leave(str(error), 2)
    except (RankError, OSError) as error:
        _leave(str(error), 1)


def _leave(reason: str, status: int) -> NoReturn:
    typer.echo(f"ladder: {' '.join(reason.split())}", err=True)
    sys.exit(status)
