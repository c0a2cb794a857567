"""`ladder generate`."""

import json
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from ladder.cli.verbs import told_little, verb, weights_bar
from ladder.config.fields import read_text
from ladder.engine.early import prepared
from ladder.engine.options import EngineOptions, SamplingParams
from ladder.errors import LadderError
from ladder.options import option

if TYPE_CHECKING:
    from ladder.engine.requests import Chunk, Request, Result


@dataclass(frozen=True)
class Prompts:
    """Prompts and output: on a terminal each prompt stands before its text, and the speed after all."""

    prompt: tuple[str, ...] = option((), "A prompt (may be given several times).")
    prompts_file: Path | None = option(None, "A file with one prompt per line; empty lines are skipped.")
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
            if not re.fullmatch(r" *[0-9]{1,9} *(, *[0-9]{1,9} *)*", text):
                raise LadderError(f"token ids {text!r} are not numbers with commas between, as in 5,17,9")
            prompts.append([int(part) for part in text.split(",")])
        if not prompts:
            prompts = _from_standard_input()
        if not prompts:
            raise LadderError("no prompt: give --prompt, --prompts-file or --token-ids, or a text on standard input")
        return prompts


def _from_standard_input() -> list[str | list[int]]:
    """All of it is one prompt, where it is not a terminal."""
    try:
        text = "" if sys.stdin.isatty() else sys.stdin.read()
    except (OSError, AttributeError):  # there is none
        return []
    except UnicodeDecodeError as error:
        raise LadderError(f"standard input is no UTF-8 text: {error}") from None
    return [text.removesuffix("\n")] if text.strip() else []


@verb(EngineOptions, Prompts, SamplingParams)
def generate(engine: EngineOptions, prompts: Prompts, sampling: SamplingParams) -> None:
    """Continue prompts with a model from a Hugging Face directory or the hub, under any wiring."""
    given = prompts.all()
    engine = prepared(engine)
    from ladder.engine.llm import LLM  # torch takes seconds to import
    from ladder.engine.setup import Setup

    setup = Setup(engine)
    requests = setup.requests(given, sampling)
    with weights_bar(setup.weight_bytes) as progress:
        llm = LLM.load(setup, progress)
    with llm:
        # results are printed one after the other, the first unfinished one as it grows
        turn, waiting, finished = 0, [""] * len(requests), [False] * len(requests)
        shown = None if prompts.json or told_little() or not sys.stdout.isatty() else Console(highlight=False)
        speed = Speed()
        if shown is not None:
            _show_prompt(shown, given, requests[0])
        for chunk in llm.run(requests):
            speed.add(len(chunk.token_ids))
            waiting[chunk.index] += _shown(chunk)
            finished[chunk.index] = chunk.finish_reason is not None
            while turn < len(requests):
                if not prompts.json:
                    typer.echo(waiting[turn], nl=False)
                    waiting[turn] = ""
                if not finished[turn]:
                    break
                typer.echo(_json_line(requests[turn].result()) if prompts.json else "")
                turn += 1
                if shown is not None and turn < len(requests):
                    _show_prompt(shown, given, requests[turn])
    if shown is not None:
        Console(stderr=True, highlight=False).print(str(speed), style="dim")
    if broken := [request.index for request in requests if request.finish_reason == "error"]:
        why = "the model's output is not finite: try --check for its weights, or a wider --dtype"
        raise LadderError(f"prompt {broken[0]}: {why}")


class Speed:
    """Tokens since the first one came, by the clock: what reading the prompts took does not count."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.count, self._first, self._since = 0, 0, 0.0

    def add(self, count: int) -> None:
        self.count += count
        if not self._since:
            self._first, self._since = count, time.perf_counter()

    def __str__(self) -> str:
        now = time.perf_counter()
        text = f"{self.count} tokens in {now - self.begin:.2f} s"
        if self.count > self._first:
            text += f", {(self.count - self._first) / (now - self._since):.1f} tokens/s after the first"
        return text


def _show_prompt(console: Console, prompts: list[str | list[int]], request: "Request") -> None:
    """Before its continuation, so that they read as one text."""
    prompt = prompts[request.index]
    text = prompt if isinstance(prompt, str) else " ".join(map(str, prompt)) + " "
    console.print(Text(text, style="bold"), end="", soft_wrap=True)


def _shown(chunk: "Chunk") -> str:
    """Without a tokenizer the terminal shows the ids."""
    return "".join(f"{token} " for token in chunk.token_ids) if chunk.text is None else chunk.text


def _json_line(result: "Result") -> str:
    return json.dumps(asdict(result), ensure_ascii=False)
