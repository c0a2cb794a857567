"""Options of `ladder chat`."""

from dataclasses import dataclass, field
from pathlib import Path

from ladder.client.endpoint import is_url
from ladder.engine.options import EMBEDDED, EngineOptions, SamplingParams
from ladder.errors import LadderError
from ladder.options import check_types, keyword, option


@dataclass(frozen=True)
class ChatOptions:
    """With whom, and how the conversation begins."""

    target: str | None = field(
        default=None,
        metadata={
            "help": "Directory of a model, or URL of an endpoint; default: the embedded model.",
            "argument": True,
        },
    )
    system: str | None = option(None, "A first message that says how to answer.")
    name: str | None = option(None, "Endpoints: name of the model; default: the first that the endpoint lists.")
    api_key: str | None = option(None, "Endpoints: sent as a bearer token.")

    def __post_init__(self) -> None:
        check_types(self)
        if self.remote is None and (self.name is not None or self.api_key is not None):
            raise LadderError("--name and --api-key are for endpoints: give a URL, as in http://127.0.0.1:8000")

    @property
    def remote(self) -> str | None:
        """The URL, where there is one."""
        return self.target if self.target is not None and is_url(self.target) else None


@dataclass(frozen=True)
class LocalOptions(EngineOptions):
    """How a local model is run: the engine's options. The model is an argument, and there is one sequence."""

    model: Path = keyword(EMBEDDED)
    max_num_seqs: int = keyword(1)


@dataclass(frozen=True)
class ChatSampling(SamplingParams):
    """How answers are sampled. Endpoints are sent what is given, and have their own defaults."""

    max_new_tokens: int = option(512, "Stop an answer after this many new tokens.")
    temperature: float = option(0.7, "0: the likeliest token; 1: sample from the model's distribution.")
    top_p: float = option(0.95, "Sample among the likeliest tokens that together have this probability.")
    n: int = keyword(1)
    logprobs: int | None = keyword(None)
