"""Options of generation. The command line is generated from these classes."""

import math
from dataclasses import dataclass
from pathlib import Path

from ladder.config import DTYPES
from ladder.errors import LadderError
from ladder.options import check_types, option

EMBEDDED = Path(__file__).parent.parent / "embedded"  # a small model that comes with this package
COMM_BACKENDS = ("auto", "symmetric", "nccl", "gloo")
LONGEST = 1e6  # seconds of a time-out, twelve days
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

    model: Path = option(EMBEDDED, "Directory with config.json and safetensors weights; default: the embedded model.")
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
    max_num_seqs: int = option(16, "Sequences that are computed at once, at most.")
    prefill_chunk: int = option(512, "Tokens of a prompt that are read in one step, at most; decoding goes on between.")
    expert_parallel: bool = option(False, "Each rank has some experts as a whole, instead of a slice of every expert.")
    timeout: float = option(60.0, "Seconds after which a rank that does not answer has failed.")
    kernels: bool = option(True, "On a GPU: our kernels and CUDA graphs. Off: plain torch.")
    tuned: Path | None = option(None, "Configurations of kernels for this GPU, as `ladder tune` writes them.")
    check: bool = option(False, "Refuse weights that are not finite.")

    def __post_init__(self) -> None:
        check_types(self)
        if self.dtype not in ("auto", *DTYPES):
            raise LadderError(f"unknown dtype {self.dtype!r}: known are auto, {', '.join(DTYPES)}")
        if self.comm_backend not in COMM_BACKENDS:
            raise LadderError(f"unknown comm_backend {self.comm_backend!r}: known are {', '.join(COMM_BACKENDS)}")
        for name in ("tp", "max_num_seqs", "prefill_chunk", "timeout"):
            if not getattr(self, name) >= 1:
                raise LadderError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.timeout > LONGEST:
            raise LadderError(f"timeout must be at most {LONGEST:.0f} seconds, not {self.timeout:g}")


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are sampled. The filters apply in the order temperature, top-k, top-p."""

    max_new_tokens: int = option(128, "Stop after this many new tokens.")
    temperature: float = option(0.0, "0: the likeliest token; 1: sample from the model's distribution.")
    top_k: int = option(0, "Sample among the k likeliest tokens; 0: all.")
    top_p: float = option(1.0, "Sample among the likeliest tokens that together have this probability.")
    seed: int | None = option(None, "Makes sampling repeatable.")
    stop: tuple[str, ...] = option((), "End before this text (may be given several times).")

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        elif isinstance(self.stop, list):
            object.__setattr__(self, "stop", tuple(self.stop))
        check_types(self)
        if self.max_new_tokens < 1:
            raise LadderError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise LadderError(f"temperature must be 0 or more, not {self.temperature}")
        if self.top_k < 0:
            raise LadderError(f"top_k must be 0 or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise LadderError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise LadderError(f"seed must be from 0 to 2^63 - 1, not {self.seed}")
        if "" in self.stop:
            raise LadderError("stop must not be an empty text")
