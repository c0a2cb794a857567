"""Several models or wirings side by side: tasks of EleutherAI's lm-eval, and our own measures on a text.

A task is a name that lm-eval knows, a name from the YAML files of `tasks_dir`, a .yaml file, or a .jsonl file. The
rows of a .jsonl file have one of these forms; in all of them one space stands before what is scored:

    {query, choices, gold}            the likeliest choice after the query: acc; by its length in characters: acc_norm
    {contexts, continuation, gold}    the context that makes the continuation likeliest: acc
    {context, continuation}           whether greedy decoding gives the continuation: acc; exp of its mean negative
                                      log-likelihood, per continuation and not per token: perplexity
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ladder.config import DTYPES
from ladder.config.early import CONTINUED, check_continuations, check_continued
from ladder.config.lock import wiring_of
from ladder.devices import device as find_device
from ladder.errors import LadderError
from ladder.hf.continuations import Continuations, prompts_of
from ladder.hf.families import layout_of, refuse_other_than_decoders
from ladder.hf.harness import Harness
from ladder.hf.load import dtype_for, pretrained, quiet
from ladder.hf.measures import Estimate, begin_of, checked_window, context_of, distance, perplexity, read, shown
from ladder.hf.rewire import rewire
from ladder.progress import Progress
from ladder.wiring import Wiring

CHARACTERS = 64  # of a text that are read for each token that is wanted
CAPTION = "value ± standard error; * of a difference: not paired"


@dataclass(frozen=True)
class Arm:
    """One of what is compared: a directory or a hub id, and how to wire it; None: as the checkpoint says.

    `wrap` makes of the model, loaded and wired, what is measured (a side network beside it), shown as `name`.
    """

    model: str
    wiring: str | None = None
    name: str | None = None
    wrap: Callable[[Any], Any] | None = None

    @property
    def shown_name(self) -> str:
        return self.name or self.model


@dataclass(frozen=True)
class _Prepared:
    """An arm that has been checked, not yet loaded."""

    arm: Arm
    wiring: str
    tokenizer: Any
    vocabulary: int
    window: int
    context: int | None  # None: of any length
    tokens: list[int]  # of the text
    begin: int | None  # what every text of this tokenizer begins with

    @property
    def label(self) -> str:
        return f"{Path(self.arm.shown_name).name} {self.wiring}"


def evaluate(
    arms: Sequence[Arm],
    *,
    tasks: Sequence[str | Path] = (),
    text: str | Path | None = None,
    source: str | None = None,
    batch: int = 8,
    window: int | None = None,
    tokens: int | None = None,
    continuations: int | None = None,
    prompt_tokens: int = CONTINUED,
    new_tokens: int = CONTINUED,
    seed: int = 0,
    limit: int | None = None,
    shots: int | None = 0,
    device: str = "cpu",
    dtype: str = "auto",
    tasks_dir: str | Path | None = None,
    progress: Progress | None = None,
    engine: Callable[[Arm, Any], AbstractContextManager[Any]] | None = None,
) -> list[dict[str, Any]]:
    """One row per arm and measure, with the difference to the first arm.

    `text`: a file to measure perplexity on, `tokens` of it from its start, and with `source` (a model as it stands)
    KL(source || model) and greedy agreement, all in the same windows. `continuations`: so many prompts from the text,
    of `prompt_tokens` tokens, are continued by `new_tokens`, and what is written is compared with what the source
    writes (`ladder.hf.continuations`). `limit`: items per task. `shots`: None for what each task says. Items longer
    than a model's context lose their beginning, as lm-eval has it. `progress` counts each arm's text, its prompts and
    each of its tasks from zero. All input is checked before a model is loaded, and side networks with their models
    before anything is measured; one arm is in memory at a time. `engine`: makes of an arm and its tokenizer one of
    lm-eval's models, in whose place transformers' is not loaded; for tasks.
    """
    if not arms or (not tasks and text is None):
        raise LadderError("nothing to measure: name at least one model, and a task or a text file")
    if source is not None and text is None:
        raise LadderError("the distance to a source is measured on a text: name a text file")
    check_continuations(continuations, text is not None, source is not None, engine is None)
    if engine is not None and (text is not None or any(arm.wrap is not None for arm in arms)):
        raise LadderError("texts and side networks are measured in transformers only: leave out --engine")
    least = {"batch": (batch, 1), "limit": (limit, 1), "shots": (shots, 0), "continuations": (continuations, 1)}
    least |= {"prompt_tokens": (prompt_tokens, 1), "new_tokens": (new_tokens, 1), "seed": (seed, 0)}
    for name, (value, smallest) in least.items():
        if value is not None and value < smallest:
            raise LadderError(f"{name} is {value}: it must be at least {smallest}")
    if dtype not in ("auto", *DTYPES):
        raise LadderError(f"unknown dtype {dtype!r}: known are auto, {', '.join(DTYPES)}")
    find_device(device)
    progress = progress or (lambda done, total, what: None)
    with quiet():
        words = None if text is None else read(Path(text))
        ready = [_prepare(arm, words, window, tokens) for arm in arms]
        origin = None if source is None else _prepare(Arm(source), words, window, tokens)
        if len({(each.arm.shown_name, each.wiring) for each in ready}) < len(ready):
            raise LadderError("a model is named twice with the same wiring")
        for each in ready:
            if origin is not None and (each.vocabulary, each.tokens) != (origin.vocabulary, origin.tokens):
                raise LadderError(f"{each.arm.shown_name} and the source {source} must have the same vocabulary")
        prompts = None
        if continuations is not None and origin is not None:
            for each in (*ready, origin):
                check_continued(prompt_tokens, new_tokens, each.context)
            prompts = prompts_of(origin.tokens, continuations, prompt_tokens, origin.begin)
        harness = Harness(tasks, tasks_dir, shots) if tasks else None
        for each in ready:
            if each.arm.wrap is not None:
                _load(each, "cpu", dtype)
        teacher = None if origin is None else _load(origin, device, dtype)
        sources = None
        if origin is not None and prompts is not None:
            told = _named(progress, f"{origin.label}: continuations")
            sources = Continuations(teacher, prompts, new_tokens, batch=batch, seed=seed, progress=told)
        how = {"batch": batch, "window": min(each.window for each in (*ready, *([origin] if origin else [])))}
        found = []
        for each in ready:
            if engine is not None and harness is not None:
                with engine(each.arm, each.tokenizer) as served:
                    found.append(harness.run_with(each.label, served, limit, progress))
                continue
            model = _load(each, device, dtype)
            estimates = _on_text(each, model, teacher, how, progress) if each.tokens else {}
            if each.tokens != ready[0].tokens:  # other windows: nothing to pair
                estimates = {name: replace(estimate, units=None) for name, estimate in estimates.items()}
            if sources is not None:
                estimates |= sources.of(model, _named(progress, f"{each.label}: continuations"))._asdict()
            if harness is not None:
                estimates |= harness.run(each.label, each.tokenizer, model, batch, limit, progress)
            found.append(estimates)
            del model
            gc.collect()
            torch.cuda.empty_cache()
    return [row for each, estimates in zip(ready, found, strict=True) for row in _rows(each, estimates, found[0])]


def table(rows: Sequence[Mapping[str, Any]], console: Console) -> Table:
    """A line for each measure, a column for each arm; where the console is too narrow, a line for each arm."""
    wide = _side_by_side(rows)
    width = console.measure(wide, options=console.options.update(max_width=10_000)).maximum
    return wide if width <= console.width else _one_below_the_other(rows)


def _side_by_side(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Every arm but the first with its difference to the first."""
    arms = list(dict.fromkeys((row["model"], row["wiring"]) for row in rows))
    cells = {(row["measure"], row["model"], row["wiring"]): row for row in rows}
    grid = Table(caption=CAPTION)
    grid.add_column("measure")
    for index, (model, wiring) in enumerate(arms):
        grid.add_column(f"{Path(model).name}\n{wiring}", justify="right")
        if index:
            grid.add_column("difference", justify="right")
    for measure in dict.fromkeys(row["measure"] for row in rows):
        line = [measure]
        for index, arm in enumerate(arms):
            line += _figures(cells.get((measure, *arm), {}))[: 1 + bool(index)]
        grid.add_row(*line)
    return grid


def _one_below_the_other(rows: Sequence[Mapping[str, Any]]) -> Table:
    grid = Table(caption=CAPTION)
    for head in ("measure", "model", "wiring"):
        grid.add_column(head, overflow="fold")
    for head in ("value", "difference"):
        grid.add_column(head, justify="right", no_wrap=True)
    for measure in dict.fromkeys(row["measure"] for row in rows):
        grid.add_section()
        for index, row in enumerate(row for row in rows if row["measure"] == measure):
            grid.add_row("" if index else measure, Path(row["model"]).name, row["wiring"], *_figures(row))
    return grid


def _figures(row: Mapping[str, Any]) -> list[str]:
    """The value and its difference to the first arm's."""
    mark = " *" if row.get("paired") is False else ""
    difference = shown(row.get("difference"), row.get("difference_stderr"), "+") + mark
    return [shown(row.get("value"), row.get("stderr")), difference]


def _rows(each: _Prepared, estimates: dict[str, Estimate], first: dict[str, Estimate]) -> Iterator[dict[str, Any]]:
    for measure, estimate in estimates.items():
        row: dict[str, Any] = {"model": each.arm.shown_name, "wiring": each.wiring, "measure": measure}
        row |= {"value": estimate.value, "stderr": estimate.stderr, "n": estimate.n}
        difference: tuple[float | None, float | None, bool | None] = (None, None, None)
        if estimates is not first:
            difference = estimate.minus(first[measure])
        yield row | dict(zip(("difference", "difference_stderr", "paired"), difference, strict=True))


def _prepare(arm: Arm, words: str | None, window: int | None, most: int | None) -> _Prepared:
    config = pretrained(AutoConfig, arm.model)
    refuse_other_than_decoders(arm.model, config.model_type)
    inner = config.get_text_config()
    own = wiring_of(vars(inner), inner.num_hidden_layers)
    wiring = own if arm.wiring is None else Wiring.parse(arm.wiring, inner.num_hidden_layers)
    if arm.wiring is not None or not wiring.is_standard:
        layout_of(config.model_type)
    tokenizer = pretrained(AutoTokenizer, arm.model)
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= inner.vocab_size:
        raise LadderError(f"{arm.model}: the tokenizer's ids go up to {largest}, the model has {inner.vocab_size}")
    if words is not None and most is not None:
        words = words[: CHARACTERS * most]  # more than so many tokens have
    tokens = [] if words is None else list(tokenizer(words)["input_ids"])[:most]
    if words is not None and len(tokens) < 2:
        raise LadderError(f"the text has {len(tokens)} tokens for {arm.model}: at least 2 are needed")
    length = checked_window(config, window)
    label = str(wiring)
    if arm.wiring is None and (staleness := getattr(config, "staleness", 1.0)) != 1.0:
        label += f", staleness {staleness}"
    context = context_of(config)
    return _Prepared(arm, label, tokenizer, inner.vocab_size, length, context, tokens, begin_of(tokenizer))


def _load(each: _Prepared, device: str, dtype: str) -> Any:
    kind = dtype_for(each.arm.model, dtype, device)
    model = pretrained(AutoModelForCausalLM, each.arm.model, dtype=kind).to(device).eval()
    model = model if each.arm.wiring is None else rewire(model, each.arm.wiring)
    return model if each.arm.wrap is None else each.arm.wrap(model)


def _on_text(each: _Prepared, model: Any, teacher: Any, how: dict[str, Any], progress: Progress) -> dict[str, Estimate]:
    how = {**how, "begin": each.begin, "progress": _named(progress, f"{each.label}: text")}
    if teacher is None:
        return {"perplexity": perplexity(model, each.tokens, **how)}
    found = distance(model, teacher, each.tokens, **how)
    return {"perplexity": found.perplexity, "kl": found.kl, "greedy_agreement": found.agreement}


def _named(progress: Progress, what: str) -> Progress:
    """The same, of what is done here."""
    return lambda done, total, _: progress(done, total, what)
