"""Options of `ladder fit` and `ladder scan`. The command line is generated from these classes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ladder.config.early import SEQ_LEN_HELP
from ladder.errors import LadderError, check_known
from ladder.files import PICTURES, check_file
from ladder.options import argument, check_least, check_types, option

FIT_TOKENS = 1 << 17  # those of the models that docs/quality.md has measured, and that `ladder adapt` fits on


@dataclass(frozen=True)
class FitOptions:
    """What is fitted, to what, on what."""

    model: str = argument("Directory of a checkpoint, or a model of the hub as in org/name: the original.")
    out: Path = argument("New folder for the fitted checkpoint.")
    wiring: str = option("ladder", "As in 'ladder' or 'standard:16 ladder:16'; see `ladder scan`.")
    data: Path = option(
        Path("data"),
        "Folder of token shards, made by `ladder data`; for models that are no decoders a .safetensors file of inputs.",
    )
    tokens: int | None = option(
        None, "Tokens to fit on, spread over the data; default: 64 for each input of the widest projection."
    )
    seq_len: int | None = option(None, SEQ_LEN_HELP)
    batch: int = option(8, "Sequences at a time.")
    ridge: float = option(0.01, "Ridge regression: how strongly weights are kept near the original's.")
    dtype: str = option(
        "auto", "dtype of the computation: auto (the checkpoint's, on a CPU float32), bfloat16 or float32."
    )
    device: str = option("auto", "auto (a GPU where there is one), cpu or cuda.")

    def __post_init__(self) -> None:
        check_types(self)
        check_solving(self)
        check_known("device", self.device, ("auto", "cpu", "cuda"))
        if self.device == "cuda":
            _ = self.device_type  # refused where there is none

    @property
    def device_type(self) -> str:
        from ladder.devices import device_type  # here: it takes torch with it

        return device_type(self.device)


def check_solving(options: Any) -> None:
    """Of what is solved by least squares: how many tokens, and how."""
    check_least(options, seq_len=2, batch=1, tokens=1)
    if not 1e-6 <= options.ridge <= 1e3:
        raise LadderError(f"ridge must be from 1e-06 to 1000, not {options.ridge}")
    check_known("dtype", options.dtype, ("auto", "bfloat16", "float32"))


@dataclass(frozen=True)
class ScanOptions:
    """What is tried, on what, and what is wanted of the result."""

    data: Path = field(metadata={"help": "A text to measure on: a file as `ladder data` takes them."})
    model: str = argument("Directory of a checkpoint, or a model of the hub as in org/name: the original.")
    field: str = option("text", "Key of the text in a JSON line, or column of a parquet file.")
    wiring: str = option("ladder", "The row to try on the layers, as in ladder, ladder-2 or parallel.")
    tokens: int = option(32_768, "Measure on this many tokens, from the start of the text.")
    seq_len: int | None = option(None, SEQ_LEN_HELP)
    batch: int = option(8, "Sequences at a time.")
    points: int = option(8, "About this many sizes of sets, and those that --budget or --speed needs; 0: all.")
    fit: int | None = option(None, "Fit each set first, on about this many further tokens (see `ladder fit`).")
    greedy: bool = option(False, "Choose each next layer by trying all that remain: slow, for small models.")
    budget: float | None = option(None, "Propose the largest set with at most this KL, in nats per token.")
    speed: float | None = option(None, "Propose the smallest set that is this many times as fast as standard.")
    chip: str = option("h100", "For --speed: a chip as in ladder plan.")
    tp: int = option(8, "For --speed: ranks that share the model.")
    link: str = option(
        "auto", "For --speed: a link's name, alpha,beta as in 50us,10GB/s, or auto: the chip's usual one."
    )
    requests: int = option(1, "For --speed: requests at a time (--batch of ladder plan).")
    device: str = option("cpu", "cpu, cuda or cuda:N.")
    dtype: str = option(
        "auto",
        "auto (the checkpoint's; float32 for bfloat16 on a CPU without bf16 products), float32, bfloat16 or float16.",
    )
    plot: Path | None = option(None, "A file for the picture, as in scan.png.")
    json: bool = option(False, "One JSON line per measurement, as it comes, instead of the tables.")

    def __post_init__(self) -> None:
        check_least(self, tokens=1, seq_len=1, batch=1, points=0, fit=1)
        if self.plot is not None:
            check_file(self.plot, *PICTURES)  # known before a scan, which takes long
