"""Options of generation. The command line is generated from these classes."""

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

from ladder.config import DTYPES
from ladder.errors import LadderError
from ladder.options import check_types, keyword, option

EMBEDDED = Path(__file__).parent.parent / "embedded"  # a small model that comes with this package
CACHE_DTYPES = ("auto", "fp8")
COMM_BACKENDS = ("auto", "symmetric", "nccl", "gloo")
LONGEST = 1e6  # seconds of a time-out, twelve days
MOST_SEQUENCES = 1_000_000  # at once: each has entries in some lists, whether it is used or not
# keywords of earlier versions, refused with the present one named
RENAMED = {
    "wire": "comm_backend",
    "link": "emulate_link",
    "batch": "max_num_seqs",
    "chunk": "prefill_chunk",
}


@dataclass(frozen=True)
class EngineOptions:
    """Which model, and how it is run."""

    model: Path = option(
        EMBEDDED,
        "Directory with config.json and safetensors weights, or a model of the hub as in org/name; default: the "
        "embedded model.",
    )
    wiring: str | None = option(None, "Wiring, as in 'ladder' or 'standard:16 ladder:16'; default: the checkpoint's.")
    dtype: str = option(
        "auto",
        "auto (the checkpoint's; float32 for bfloat16 on a CPU without bf16 products), float32, bfloat16, float16 or "
        "float64.",
    )
    device: str = option("cpu", "cpu, cuda or cuda:N.")
    tp: int = option(1, "Number of tensor-parallel ranks, a process each; under torchrun: its world size.")
    comm_backend: str = option("auto", "Backend of the all-reduces between GPUs: auto, symmetric, nccl or gloo.")
    emulate_link: str | None = option(
        None, "Make the all-reduces as slow as this link: a name, or alpha,beta as in 50us,10GB/s."
    )
    max_num_seqs: int = option(None, "Sequences that are computed at once, at most; default: 256 on a GPU, else 16.")
    memory: float | None = option(
        None, "GB of the KV cache on each rank; default: most of what is free once the model is loaded."
    )
    cache_dtype: str = option(
        "auto",
        "Of keys and values in the KV cache: auto (the model's), or fp8 (e4m3, no scales): twice the tokens of bf16.",
    )
    prefill_chunk: int = option(
        None,
        "Tokens of prompts that are read in one step, at most, beside a token of every other request; default: 4096 on "
        "a GPU, else 512.",
    )
    expert_parallel: bool = option(False, "Each rank has some experts as a whole, instead of a slice of every expert.")
    timeout: float = option(60.0, "Seconds after which a rank that does not answer has failed.")
    kernels: bool = option(True, "On a GPU: our kernels and CUDA graphs. Off: plain torch.")
    tuned: Path | None = option(None, "Configurations of kernels for this GPU, as `ladder tune` writes them.")
    check: bool = option(False, "Refuse weights that are not finite.")
    warm_up: bool = keyword(False)  # on a GPU: compile and capture what decoding needs before the first request
    token_file: Path | None = option(
        None, "A file with a secret that all ranks share; ranks of torchrun refuse those that do not have it."
    )

    def __post_init__(self) -> None:
        gpu = str(self.device).startswith("cuda")
        for name, default in (("max_num_seqs", 256 if gpu else 16), ("prefill_chunk", 4096 if gpu else 512)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        check_types(self)
        if self.dtype not in ("auto", *DTYPES):
            raise LadderError(f"unknown dtype {self.dtype!r}: known are auto, {', '.join(DTYPES)}")
        if self.cache_dtype not in CACHE_DTYPES:
            raise LadderError(f"unknown cache_dtype {self.cache_dtype!r}: known are {', '.join(CACHE_DTYPES)}")
        if self.comm_backend not in COMM_BACKENDS:
            raise LadderError(f"unknown comm_backend {self.comm_backend!r}: known are {', '.join(COMM_BACKENDS)}")
        for name in ("tp", "max_num_seqs", "prefill_chunk", "timeout"):
            if not getattr(self, name) >= 1:
                raise LadderError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_seqs > MOST_SEQUENCES:
            raise LadderError(f"max_num_seqs must be at most {MOST_SEQUENCES}, not {self.max_num_seqs}")
        if self.memory is not None and not 0 < self.memory < 1e6:
            raise LadderError(f"memory must be above 0 GB, not {self.memory}")
        if self.timeout > LONGEST:
            raise LadderError(f"timeout must be at most {LONGEST:.0f} seconds, not {self.timeout:g}")


MOST_LOGPROBS = 20  # likeliest tokens that a request can ask for beside each of its own
MOST_STOPS = 16  # token ids that can end one request
MOST_BIASES = 1024  # tokens whose logits one request can change


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are sampled: bias and penalties, then temperature, min-p, top-k and top-p in this order.

    `max_tokens` is another name of `max_new_tokens`, and a `top_k` of -1 another of 0, as in vLLM.
    """

    max_new_tokens: int = option(128, "Stop after this many new tokens.")
    temperature: float = option(0.0, "0: the likeliest token; 1: sample from the model's distribution.")
    top_k: int = option(0, "Sample among the k likeliest tokens; 0: all.")
    top_p: float = option(1.0, "Sample among the likeliest tokens that together have this probability.")
    seed: int | None = option(None, "Makes sampling repeatable.")
    stop: tuple[str, ...] = option((), "End before this text (may be given several times).")
    min_p: float = option(0.0, "Sample among tokens that are at least this times as likely as the likeliest.")
    repetition_penalty: float = option(
        1.0, "Divides the positive logits of tokens that the text has already, and multiplies the negative ones."
    )
    presence_penalty: float = option(0.0, "Subtracted from the logits of tokens that were generated before.")
    frequency_penalty: float = option(0.0, "The same, once for each time that they were generated.")
    logit_bias: tuple[tuple[int, float], ...] = keyword(())  # added to the logits of tokens; a dict will do
    n: int = keyword(1)  # results of each prompt
    stop_token_ids: tuple[int, ...] = option((), "End with this token (may be given several times).")
    ignore_eos: bool = option(False, "Go on after the model's end-of-text token.")
    min_tokens: int = option(0, "No token ends the text before there are so many new ones.")
    logprobs: int | None = option(
        None, "Log-probabilities of the new tokens, each beside those of so many of the likeliest."
    )
    max_tokens: InitVar[int | None] = None

    def __post_init__(self, max_tokens: int | None) -> None:
        if isinstance(max_tokens, int):  # `replace` gives the default, which is this class's attribute
            object.__setattr__(self, "max_new_tokens", max_tokens)
        for name in ("stop", "stop_token_ids"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
            elif isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        bias: Any = self.logit_bias
        if isinstance(bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(bias.items()))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._check_bias()
        check_types(self)
        for name, least in (("max_new_tokens", 1), ("top_k", 0), ("n", 1), ("min_tokens", 0), ("logprobs", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise LadderError(f"{name} must be at least {least}, not {value}")
        if (self.logprobs or 0) > MOST_LOGPROBS:
            raise LadderError(f"logprobs must be at most {MOST_LOGPROBS}, not {self.logprobs}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise LadderError(f"temperature must be 0 or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise LadderError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise LadderError(f"min_p must be from 0 to 1, not {self.min_p}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise LadderError(f"repetition_penalty must be above 0, not {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise LadderError(f"{name} must be from -2 to 2, not {getattr(self, name)}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise LadderError(f"seed must be from -2^63 to 2^63 - 1, not {self.seed}")
        if "" in self.stop:
            raise LadderError("stop must not be an empty text")
        if len(self.stop_token_ids) > MOST_STOPS:
            raise LadderError(f"stop_token_ids has {len(self.stop_token_ids)} ids: at most {MOST_STOPS}")
        if self.min_tokens > self.max_new_tokens:
            raise LadderError(f"min_tokens is {self.min_tokens}, more than max_new_tokens, {self.max_new_tokens}")

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, tuple):
            raise LadderError(f"logit_bias must map token ids to numbers, not be {self.logit_bias!r}")
        if len(self.logit_bias) > MOST_BIASES:
            raise LadderError(f"logit_bias has {len(self.logit_bias)} tokens: at most {MOST_BIASES}")
        for pair in self.logit_bias:
            token, bias = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, None)
            known = isinstance(token, int) and not isinstance(token, bool) and isinstance(bias, int | float)
            if not known or not math.isfinite(bias) or abs(bias) > 100:
                raise LadderError(f"logit_bias must map token ids to numbers from -100 to 100, not be {pair!r}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token of the model is taken, whatever came before."""
        return self.temperature == 0 and not self.adjusts

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before anything is chosen from them."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        return penalties or bool(self.logit_bias) or self.min_tokens > 0
