"""`ladder generate`."""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ladder.cli.verbs import verb, weights_bar
from ladder.config.fields import read_text
from ladder.engine.options import EngineOptions, SamplingParams
from ladder.errors import LadderError
from ladder.options import option

if TYPE_CHECKING:
    from ladder.engine.requests import Chunk, Result


@dataclass(frozen=True)
class Prompts:
    """Where the prompts come from, and how the results are printed."""

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
            if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text.replace(" ", "")):
                raise LadderError(f"token ids {text!r} are not numbers with commas between, as in 5,17,9")
            prompts.append([int(part) for part in text.split(",")])
        if not prompts:
            raise LadderError("no prompt: give --prompt, --prompts-file or --token-ids")
        return prompts


@verb(EngineOptions, Prompts, SamplingParams)
def generate(engine: EngineOptions, prompts: Prompts, sampling: SamplingParams) -> None:
    """Continue prompts with a model from a Hugging Face directory, under any wiring."""
    given = prompts.all()
    from ladder.engine.executors.start import adopt_torchrun_size  # torch takes seconds to import
    from ladder.engine.llm import LLM
    from ladder.engine.setup import Setup

    setup = Setup(adopt_torchrun_size(engine))
    requests = setup.requests(given, sampling)
    with weights_bar(setup.weight_bytes) as progress:
        llm = LLM.load(setup, progress)
    with llm:
        # results are printed one after the other, the first unfinished one as it grows
        turn, waiting, finished = 0, [""] * len(requests), [False] * len(requests)
        for chunk in llm.run(requests):
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
    if broken := [request.index for request in requests if request.finish_reason == "error"]:
        why = "the model's output is not finite: try --check for its weights, or a wider --dtype"
        raise LadderError(f"prompt {broken[0]}: {why}")


def _shown(chunk: "Chunk") -> str:
    """Without a tokenizer the terminal shows the ids."""
    return "".join(f"{token} " for token in chunk.token_ids) if chunk.text is None else chunk.text


def _json_line(result: "Result") -> str:
    return json.dumps(asdict(result), ensure_ascii=False)
