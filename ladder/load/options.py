"""Options of `ladder load`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder.client.endpoint import APIS, Endpoint
from ladder.errors import LadderError, check_known
from ladder.load.arrivals import Arrivals
from ladder.load.lengths import FORMS, Lengths
from ladder.load.slo import parse_slo
from ladder.options import argument, check_least, check_types, option

PROMPT_KINDS = ("auto", "tokens", "words")
MOST = 10_000_000  # requests of a run
FASTEST = 1e6  # requests per second
LONGEST = 1e6  # seconds of a time-out
REQUESTS = 100
LOWEST_ID = 16  # ids below it are special tokens in many vocabularies
# options that are sent where they were given: their names in a request
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True)
class LoadOptions:
    """Which endpoint, which requests, when they are sent, and where the results go."""

    url: str = argument("The endpoint, as in http://127.0.0.1:8000 (with or without /v1).")
    api: str = option("completions", "completions or chat. Both are streamed.")
    model: str | None = option(None, "Name of the model; default: the first that the endpoint lists.")
    api_key: str | None = option(None, "Sent as a bearer token.")
    rate: tuple[float, ...] = option(
        (), "Requests per second, at Poisson times; inf: all at once. May be given several times, a run each."
    )
    concurrency: tuple[int, ...] = option(
        (), "Closed loop: so many requests at any time. May be given several times, a run each."
    )
    requests: int | None = option(None, f"Requests of each run; default: those of --requests-file, else {REQUESTS}.")
    prompt_length: str = option("128-1024", f"Tokens of a prompt: {FORMS}.")
    output_length: str = option("64-512", "New tokens of a request, at most: in the same forms.")
    requests_file: Path | None = option(
        None, "JSON lines with prompt, messages or prompt_tokens, and max_tokens, instead of lengths."
    )
    prompt_kind: str = option(
        "auto",
        "Prompts are random token ids (tokens), random words (words), or ids where the endpoint takes them (auto).",
    )
    vocab: int = option(1000, f"Random token ids are from {LOWEST_ID} to below this.")
    seed: int = option(0, "Makes prompts, lengths and times repeatable.")
    temperature: float | None = option(None, "Sampling temperature; default: the endpoint's, as for the following.")
    top_p: float | None = option(None, "Sample among the likeliest tokens that together have this probability.")
    top_k: int | None = option(None, "Sample among the k likeliest tokens (not an option of OpenAI's).")
    min_p: float | None = option(
        None, "Sample among tokens at least this times as likely as the likeliest (not OpenAI's)."
    )
    presence_penalty: float | None = option(None, "Subtracted from the logits of tokens that were generated before.")
    frequency_penalty: float | None = option(None, "The same, once for each time that they were generated.")
    repetition_penalty: float | None = option(
        None, "Divides the logits of tokens that the text has already (not OpenAI's)."
    )
    ignore_eos: bool = option(False, "Ask for outputs of full length (not an option of OpenAI's).")
    slo: str | None = option(None, "Goodput counts requests within these times, as in ttft=200ms,tpot=50ms,e2e=3s.")
    timeout: float = option(600.0, "Seconds after which a request has failed.")
    warm_up: int = option(1, "Requests that are sent and not counted before the first run.")
    label: str | None = option(None, "Name of what is measured, in tables and pictures; default: the model's.")
    out: Path = option(Path("load.jsonl"), "File of JSON lines, appended: one for each request, one for each run.")
    json: bool = option(False, "A JSON line for each run instead of the table.")

    def __post_init__(self) -> None:
        check_types(self)
        for what, known in (("api", APIS), ("prompt_kind", PROMPT_KINDS)):
            check_known(what.replace("_", "-"), getattr(self, what), list(known))
        check_least(self, requests=1, vocab=LOWEST_ID + 1, seed=0, warm_up=0)
        if max(self.requests or 0, self.warm_up) > MOST:
            raise LadderError(f"requests and warm-up must be at most {MOST}")
        for rate in self.rate:
            if not (0 < rate <= FASTEST or math.isinf(rate)):
                raise LadderError(f"rate must be above 0 and at most {FASTEST:.0f} requests/s, or inf, not {rate:g}")
        for concurrency in self.concurrency:
            if not 1 <= concurrency <= MOST:
                raise LadderError(f"concurrency must be from 1 to {MOST}, not {concurrency}")
        if not 0 < self.timeout <= LONGEST:
            raise LadderError(f"timeout must be above 0 and at most {LONGEST:.0f} seconds, not {self.timeout:g}")
        for name in SAMPLING:
            if (value := getattr(self, name)) is not None and not math.isfinite(value):
                raise LadderError(f"{name.replace('_', '-')} must be a number, not {value}")
        if self.api == "chat" and self.prompt_kind == "tokens":
            raise LadderError("the chat API takes no token ids: use --prompt-kind words, or --api completions")
        if self.out.is_dir():
            raise LadderError(f"{self.out} is a directory: name a file, as in --out {self.out / 'load.jsonl'}")
        if "" in (self.label, self.model, self.api_key):
            raise LadderError("label, model and api-key must not be empty")
        _ = self.endpoint, self.prompt_lengths, self.output_lengths, self.objectives  # refused here, where wrong

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint.parse(self.url, self.api_key)

    @property
    def prompt_lengths(self) -> Lengths:
        return Lengths.parse(self.prompt_length, "prompt-length")

    @property
    def output_lengths(self) -> Lengths:
        return Lengths.parse(self.output_length, "output-length")

    @property
    def objectives(self) -> dict[str, float]:
        """Milliseconds by name."""
        return {} if self.slo is None else parse_slo(self.slo)

    @property
    def runs(self) -> list[Arrivals]:
        """A run for each rate and each concurrency; where none is given, all requests at once."""
        runs = [Arrivals(rate=float(rate)) for rate in self.rate]
        runs += [Arrivals(concurrency=number) for number in self.concurrency]
        return runs or [Arrivals(rate=math.inf)]

    @property
    def sampling(self) -> dict[str, Any]:
        """What a request says about sampling."""
        given = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        return {**given, "ignore_eos": True} if self.ignore_eos else given
