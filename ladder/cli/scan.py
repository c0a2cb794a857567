"""`ladder scan`: what another wiring costs, layer by layer."""

import json
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from ladder.cli.verbs import steps_bar, verb
from ladder.config import DTYPES
from ladder.config.early import check_model_named, early_config, sequence_length
from ladder.devices import check_name
from ladder.errors import LadderError, check_known
from ladder.scan.early import checked_row, layers_to_scan
from ladder.scan.options import ScanOptions
from ladder.scan.target import TargetMachine, check_wishes

if TYPE_CHECKING:
    from torch import Tensor

    from ladder.scan.probe import Damage, OnMeasured
    from ladder.scan.propose import Proposal
    from ladder.scan.scan import Scan
    from ladder.scan.target import Predictor

CHARACTERS = 64  # of a text that are read for each token that is wanted: more than any text needs


@verb(ScanOptions)
def scan(options: ScanOptions) -> None:
    """Find the layers that another wiring damages least: each alone, growing sets, and a set to adapt."""
    _check(options)
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
            typer.echo(_proposed(proposal, found.fitted))
    elif proposal is not None:
        more = {"budget": proposal.budget, "over_budget": _finite(proposal.over), "speed": proposal.speed}
        more |= {"predicted_speed": proposal.predicted}
        _json_printer(options, found.tokens, found.fitted, more)("proposal", proposal.damage, found.original)
    if pyplot is not None and options.plot is not None:
        with plot_style(pyplot):
            draw(pyplot, found, options.plot, Path(options.model).name, options.budget, proposal)
        typer.echo(f"wrote {options.plot}", err=options.json)
    if refused is not None:
        raise refused


def _check(options: ScanOptions) -> None:
    """What can be refused before torch is imported."""
    check_model_named(options.model)
    check_known("dtype", options.dtype, ("auto", *DTYPES))
    check_name(options.device)
    row = checked_row(options.wiring)
    check_wishes(options.budget, options.speed)
    if not options.data.exists():
        raise LadderError(f"no such file: {options.data}")
    if options.data.is_dir():
        raise LadderError(f"{options.data} is a folder: a scan wants a file of text, such as ladder data reads")
    if (config := early_config(options.model)) is not None:
        sequence_length(options.seq_len, config.context)
        layers_to_scan(config.wiring, row)
        if options.speed is not None:
            _target(options).predictor(config)


def _target(options: ScanOptions) -> TargetMachine:
    return TargetMachine(options.chip, options.tp, options.link, options.requests)


def _measured(options: ScanOptions) -> tuple["Scan", "Predictor | None"]:
    """All input is checked before a weight is read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from ladder.devices import device
    from ladder.hf.families import refuse_other_than_decoders
    from ladder.hf.load import dtype_for, pretrained, quiet
    from ladder.scan.checkpoints import refuse_not_finite, refuse_quantized
    from ladder.scan.probe import original_wiring
    from ladder.scan.propose import check_reach, size_between, size_for
    from ladder.scan.scan import extend, scan

    row = checked_row(options.wiring)
    device(options.device)
    with quiet(), steps_bar("loading") as progress:
        config = pretrained(AutoConfig, options.model)
        refuse_other_than_decoders(options.model, config.model_type)
        own = original_wiring(config)
        layers = layers_to_scan(own, row)
        if options.fit is not None and not own.is_standard:
            raise LadderError(f"--fit is for a model that was trained as standard, and {options.model} is {own}")
        if options.fit is not None:
            refuse_quantized(options.model, config, "scan without --fit, or the model that they were made from")
        sequences, to_fit = _sequences(options, config)
        predictor = _predictor(options, config)
        if options.speed is not None and predictor is not None:
            check_reach(options.speed, own, layers, row, predictor)
        dtype = dtype_for(options.model, options.dtype, options.device)
        model = pretrained(AutoModelForCausalLM, options.model, dtype=dtype).to(options.device)
        refuse_not_finite(model, options.model)
        counted = (sequences[:, 1:].numel(), 0 if to_fit is None else to_fit.numel())
        report = _json_printer(options, *counted, {}) if options.json else None
        found = scan(model, sequences, row, options.points, options.greedy, options.batch, progress, to_fit, report)
        if options.speed is not None and predictor is not None:
            size = size_for(found, options.speed, predictor)
            found = extend(model, sequences, found, size, options.batch, progress, to_fit, report)
        elif options.budget is not None:
            while (between := size_between(found, options.budget)) is not None:
                found = extend(model, sequences, found, between, options.batch, progress, to_fit, report)
    return found, predictor


def _sequences(options: ScanOptions, config: Any) -> tuple["Tensor", "Tensor | None"]:
    """The text as this model's tokens: sequences to measure on, and sequences to fit on."""
    from transformers import AutoTokenizer

    from ladder.hf.load import pretrained
    from ladder.hf.measures import begin_of
    from ladder.scan.checkpoints import context_of
    from ladder.scan.scan import fit_sequences, scan_sequences

    seq_len = sequence_length(options.seq_len, context_of(config.get_text_config()))
    text = _beginning(options.data, options.field, CHARACTERS * (options.tokens + (options.fit or 0) + 1))
    tokenizer = pretrained(AutoTokenizer, options.model)
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= config.vocab_size:
        raise LadderError(f"{options.model}: the tokenizer's ids go up to {largest}, the model has {config.vocab_size}")
    ids, begin = list(tokenizer(text)["input_ids"]), begin_of(tokenizer)
    sequences = scan_sequences(ids, seq_len, options.tokens, begin)
    return sequences, None if options.fit is None else fit_sequences(ids, sequences, options.fit, options.batch, begin)


def _beginning(file: Path, field: str, most: int) -> str:
    """The beginning of a text; of a packed file or one of many documents, these with empty lines between them."""
    from ladder.data.documents import check_files, documents
    from ladder.hf.measures import read

    if file.suffix.lower() not in (".xz", ".gz", ".jsonl", ".parquet"):
        return read(file)[:most]
    check_files([file], field)
    text, gap = "", ""
    for piece in documents([file], field):
        text += gap + piece.text
        gap = "\n\n\n" if piece.last else ""
        if len(text) >= most:
            break
    return text[:most]


def _predictor(options: ScanOptions, config: Any) -> "Predictor | None":
    from ladder.config import ModelConfig

    if options.speed is None:
        return None
    try:
        known = ModelConfig.from_hf(config.to_dict())
    except LadderError as error:
        raise LadderError(f"the speed of {options.model} cannot be predicted: {error}") from None
    return _target(options).predictor(known)


def _json_printer(options: ScanOptions, tokens: int, fitted: int, more: dict[str, Any]) -> "OnMeasured":
    """Prints a line for each measurement as it comes; figures that are not finite are null."""
    import torch

    from ladder.bench.machine import machine

    about = {"model": options.model, "tokens": tokens, "fit_tokens": fitted}
    here = machine(torch.device(options.device))

    def report(kind: str, damage: "Damage", original: "Damage") -> None:
        first = {"original_perplexity": _finite(original.perplexity)}
        typer.echo(json.dumps({"kind": kind, **_figures(damage), **about, **first, **here, **more}))

    return report


def _figures(damage: "Damage") -> dict[str, Any]:
    return {key: _finite(value) if isinstance(value, float) else value for key, value in asdict(damage).items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _print(model: str, found: "Scan", predictor: "Predictor | None") -> None:
    from ladder.hf.measures import shown

    console = Console()
    console.width = max(console.width, 110)  # so that no figure is cut off
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


def _proposed(proposal: "Proposal", fitted: int) -> str:
    damage = proposal.damage
    lines = [f"proposed: {len(damage.layers)} layers, KL {damage.kl:.4g}, perplexity {damage.perplexity:.5g}"]
    if proposal.predicted is not None:
        lines[0] += f", predicted to be {proposal.predicted:.3f} times as fast as standard"
    if proposal.budget is not None and proposal.over:
        lines.append(f"the budget of {proposal.budget:g} is missed by {proposal.over:.4g} nats per token")
    if not fitted:
        lines.append("before fitting, which can change the order of sets: --fit 131072 proposes by what is left then")
    return "\n".join([*lines, f'--wiring "{damage.wiring}"'])
