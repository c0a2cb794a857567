"""`ladder scan`: which layers of a model bear another wiring."""

import json
import os
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from ladder.cli.verbs import steps_bar, verb
from ladder.errors import LadderError
from ladder.options import argument, option

if TYPE_CHECKING:
    from torch import Tensor

    from ladder.scan.probe import Damage, Heard
    from ladder.scan.propose import Predictor, Proposal
    from ladder.scan.scan import Scan

CHARACTERS = 64  # of a text for each token that is wanted: more than any text needs, and less than a library of it


@dataclass(frozen=True)
class ScanOptions:
    """What is tried, on what, and what is wanted of the result."""

    data: Path = field(metadata={"help": "A text to measure on: a file as `ladder data` takes them."})
    model: str = argument("Directory of a checkpoint, or a model of the hub as in org/name; as it is: the original.")
    field: str = option("text", "Where the text stands: the key of a JSON line, the column of a parquet file.")
    wiring: str = option("ladder", "The row to try on the layers, as in ladder, ladder-2 or parallel.")
    tokens: int = option(32_768, "Predict the first so many tokens of the text.")
    window: int | None = option(None, "Tokens of text at a time; default: the model's context, at most 1024.")
    batch: int = option(8, "Windows at a time.")
    points: int = option(8, "About so many sizes of sets, and those that --budget or --speed needs; 0 for all.")
    fit: int | None = option(
        None, "Fit each set on about so many tokens behind those (see `ladder fit`), and measure what is left."
    )
    greedy: bool = option(False, "Choose each next layer by trying all that remain: slow, for small models.")
    budget: float | None = option(None, "Propose the largest set with at most this KL, in nats per token.")
    speed: float | None = option(None, "Propose the smallest set that makes tokens so many times as fast as standard.")
    chip: str = option("h100", "For --speed: a chip as in ladder plan.")
    tp: int = option(8, "For --speed: ranks that share the model.")
    link: str = option("nvlink_nccl", "For --speed: a link's name, or alpha,beta as in 50us,10GB/s.")
    requests: int = option(1, "For --speed: requests at a time (--batch of ladder plan).")
    device: str = option("cpu", "cpu, cuda or cuda:N.")
    dtype: str = option("auto", "auto (the checkpoint's), float32, bfloat16 or float16.")
    plot: Path | None = option(None, "A file for the picture, as in scan.png.")
    json: bool = option(False, "One JSON line per measurement, as it comes, instead of the tables.")

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("batch", 1), ("points", 0), ("fit", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise LadderError(f"{name} is {value}: it must be at least {least}")
        if self.plot is not None:
            _check_plot(self.plot)


def _check_plot(file: Path) -> None:
    """Whether a picture can be written there: known before a scan, which takes long."""
    if not file.absolute().parent.is_dir():
        raise LadderError(f"{file} cannot be written: there is no folder {file.parent}")
    if file.is_dir() or not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise LadderError(f"{file} cannot be written")
    if file.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise LadderError(f"{file} is no picture's name: let it end with .png, .pdf or .svg")


@verb(ScanOptions)
def scan(options: ScanOptions) -> None:
    """Find the layers that bear another wiring best: damage of each alone, of growing sets, and a set to adapt."""
    from ladder.plotting import load_pyplot, plot_style
    from ladder.scan.plot import draw
    from ladder.scan.propose import propose

    pyplot = None if options.plot is None else load_pyplot()
    found, predictor = _measured(options)
    proposal, refused = None, None
    if options.budget is not None or options.speed is not None:
        try:
            proposal = propose(found, options.budget, options.speed, predictor)
        except LadderError as error:  # what was measured is shown all the same
            refused = error
    if not options.json:
        _print(options.model, found, predictor)
        if proposal is not None:
            typer.echo(_told(proposal))
    elif proposal is not None:
        wish = {"budget": proposal.budget, "over_budget": _finite(proposal.over), "speed": proposal.speed}
        wish |= {"predicted_speed": proposal.predicted}
        _teller(options, found.tokens, found.fitted, wish)("proposal", proposal.damage, found.original)
    if pyplot is not None and options.plot is not None:
        with plot_style(pyplot):
            draw(pyplot, found, options.plot, Path(options.model).name, options.budget, proposal)
        typer.echo(f"wrote {options.plot}", err=options.json)
    if refused is not None:
        raise refused


def _measured(options: ScanOptions) -> tuple["Scan", "Predictor | None"]:
    """All input is checked before a weight is read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from ladder.config import DTYPES
    from ladder.devices import device
    from ladder.hf.load import pretrained, quiet
    from ladder.scan.probe import checked_row, original_wiring, tried
    from ladder.scan.propose import check_reach, check_wishes, size_between, size_for
    from ladder.scan.scan import extended, scan

    check_wishes(options.budget, options.speed)
    row = checked_row(options.wiring)
    if options.dtype not in ("auto", *DTYPES):
        raise LadderError(f"unknown dtype {options.dtype!r}: known are auto, {', '.join(DTYPES)}")
    device(options.device)
    with quiet(), steps_bar("loading") as progress:
        config = pretrained(AutoConfig, options.model)
        own = original_wiring(config)
        layers = tried(own, row)
        if options.fit is not None and not own.is_standard:
            raise LadderError(f"--fit is for a model that was trained as standard, and {options.model} is {own}")
        windows, rows = _windows(options, config)
        predictor = _predictor(options, config)
        if options.speed is not None and predictor is not None:
            check_reach(options.speed, own, layers, row, predictor)
        model = pretrained(AutoModelForCausalLM, options.model, dtype=options.dtype).to(options.device)
        counted = (windows[:, 1:].numel(), 0 if rows is None else rows.numel())
        heard = _teller(options, *counted, {}) if options.json else None
        found = scan(model, windows, row, options.points, options.greedy, options.batch, progress, rows, heard)
        if options.speed is not None and predictor is not None:
            size = size_for(found, options.speed, predictor)
            found = extended(model, windows, found, size, options.batch, progress, rows, heard)
        elif options.budget is not None:
            while (between := size_between(found, options.budget)) is not None:
                found = extended(model, windows, found, between, options.batch, progress, rows, heard)
    return found, predictor


def _windows(options: ScanOptions, config: Any) -> tuple["Tensor", "Tensor | None"]:
    """The text as this model's tokens: windows to measure on, and rows to fit on."""
    from transformers import AutoTokenizer

    from ladder.hf.load import pretrained
    from ladder.hf.measures import begin_of, checked_window
    from ladder.scan.scan import rows_of, windows_of

    window = checked_window(config, options.window)
    words = _words(options.data, options.field, CHARACTERS * (options.tokens + (options.fit or 0) + 1))
    tokenizer = pretrained(AutoTokenizer, options.model)
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= config.vocab_size:
        raise LadderError(f"{options.model}: the tokenizer's ids go up to {largest}, the model has {config.vocab_size}")
    ids, begin = list(tokenizer(words)["input_ids"]), begin_of(tokenizer)
    windows = windows_of(ids, window, options.tokens, begin)
    return windows, None if options.fit is None else rows_of(ids, windows, options.fit, options.batch, begin)


def _words(file: Path, field: str, most: int) -> str:
    """The beginning of a text. Where `ladder data` unpacks it or picks it out of rows, its documents stand apart."""
    from ladder.data.documents import check_files, documents
    from ladder.hf.measures import read

    if file.is_dir():
        raise LadderError(f"{file} is a folder: a scan wants a file of text, such as ladder data reads")
    if file.suffix.lower() not in (".xz", ".gz", ".jsonl", ".parquet"):
        return read(file)[:most]
    check_files([file], field)
    words, gap = "", ""
    for piece in documents([file], field):
        words += gap + piece.text
        gap = "\n\n\n" if piece.last else ""
        if len(words) >= most:
            break
    return words[:most]


def _predictor(options: ScanOptions, config: Any) -> "Predictor | None":
    from ladder.config import ModelConfig
    from ladder.scan.propose import Machine

    if options.speed is None:
        return None
    try:
        known = ModelConfig.from_hf(config.to_dict())
    except LadderError as error:
        raise LadderError(f"the speed of {options.model} cannot be predicted: {error}") from None
    return Machine(options.chip, options.tp, options.link, options.requests).predictor(known)


def _teller(options: ScanOptions, tokens: int, fitted: int, more: dict[str, Any]) -> "Heard":
    """Prints a line for each measurement as it comes; figures that are not finite are null."""
    import torch

    from ladder.bench.machine import machine

    about = {"model": options.model, "tokens": tokens, "fit_tokens": fitted}
    here = machine(torch.device(options.device))

    def tell(kind: str, damage: "Damage", original: "Damage") -> None:
        first = {"original_perplexity": _finite(original.perplexity)}
        typer.echo(json.dumps({"kind": kind, **_figures(damage), **about, **first, **here, **more}))

    return tell


def _figures(damage: "Damage") -> dict[str, Any]:
    return {key: _finite(value) if isinstance(value, float) else value for key, value in asdict(damage).items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _print(model: str, found: "Scan", predictor: "Predictor | None") -> None:
    from ladder.hf.measures import shown

    console = Console()
    console.width = max(console.width, 110)  # figures that are cut off are none
    first = found.original
    typer.echo(
        f"{Path(model).name}, {first.wiring}: perplexity {shown(first.perplexity, first.perplexity_stderr)} on "
        f"{found.tokens} tokens; KL is to this original, in nats per token, {found.state}"
    )
    heads = ("layer", "KL", "perplexity", "same token")
    table = Table(
        *(Column(head, justify="right", no_wrap=True) for head in heads),
        box=SIMPLE_HEAD,
        title=f"{found.row}, one layer",
    )
    for damage in found.alone:
        table.add_row(str(damage.layers[0]), *_cells(damage))
    console.print(table)
    _print_sets(console, found, predictor)


def _print_sets(console: Console, found: "Scan", predictor: "Predictor | None") -> None:
    from ladder.wiring import Wiring

    heads = ["layers", "KL, least damage first", "perplexity", "KL, last n", "perplexity"]
    heads += [] if predictor is None else ["times as fast"]
    table = Table(
        *(Column(head, justify="right", no_wrap=True) for head in heads), box=SIMPLE_HEAD, title="growing sets"
    )
    for grown, last in zip(found.grown, found.last, strict=True):
        cells = [*_cells(grown)[:2], *_cells(last)[:2]]
        if predictor is not None:
            cells.append(f"{predictor(Wiring.parse(grown.wiring, len(found.wiring.layers))):.3f}")
        table.add_row(str(len(grown.layers)), *cells)
    console.print(table)


def _cells(damage: "Damage") -> list[str]:
    from ladder.hf.measures import shown

    pairs = ((damage.kl, damage.kl_stderr), (damage.perplexity, damage.perplexity_stderr))
    return [*(shown(value, _finite(error)) for value, error in pairs), f"{damage.agreement:.1%}"]


def _told(proposal: "Proposal") -> str:
    damage = proposal.damage
    lines = [f"proposed: {len(damage.layers)} layers, KL {damage.kl:.4g}, perplexity {damage.perplexity:.5g}"]
    if proposal.predicted is not None:
        lines[0] += f", predicted to be {proposal.predicted:.3f} times as fast as standard"
    if proposal.budget is not None and proposal.over:
        lines.append(f"the budget of {proposal.budget:g} is missed by {proposal.over:.4g} nats per token")
    return "\n".join([*lines, f'--wiring "{damage.wiring}"'])
