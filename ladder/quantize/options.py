"""Options of `ladder quantize`. The command line is generated from these classes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladder.config.early import SEQ_LEN_HELP
from ladder.config.quantization import GROUPS, NAMED, Storage
from ladder.errors import LadderError, check_known
from ladder.options import argument, check_types, option, required
from ladder.scan.options import check_solving

FORMATS = {name: NAMED[name] for name in ("fp8", "fp8-block", "int8", "int4")}


@dataclass(frozen=True)
class QuantizeOptions:
    """What is quantized, and to which format."""

    model: Path = argument("Directory of a checkpoint, of any wiring.")
    out: Path = argument("New folder for the quantized checkpoint.")
    format: str = required("fp8 and int8 (a scale for each output), fp8-block (for each 128 x 128 weights) or int4.")
    group: int | None = option(
        None, "Of int4: inputs that share a scale, 32, 64 or 128; 0: all of an output; default: 128."
    )
    asymmetric: bool = option(False, "Of int4: each group has a zero point, too.")
    fp8_activations: bool = option(
        False, "Of fp8 and fp8-block: products of many rows, as of prompts, may take activations in fp8, too."
    )
    json: bool = option(False, "One JSON line with sizes, time and error instead of the text.")

    def __post_init__(self) -> None:
        check_types(self)
        check_known("format", self.format, FORMATS)
        for name in ("group", "asymmetric"):
            if self.format != "int4" and getattr(self, name) not in (None, False):
                raise LadderError(f"--{name} is for int4, not for {self.format}")
        if self.fp8_activations and FORMATS[self.format].kind != "fp8":
            raise LadderError(f"--fp8-activations is for fp8 and fp8-block, not for {self.format}")
        if self.group not in (None, 0, *GROUPS):
            raise LadderError(f"--group must be {', '.join(map(str, GROUPS))}, or 0 for all inputs, not {self.group}")

    @property
    def storage(self) -> Storage:
        found = FORMATS[self.format]
        group = found.group if self.group is None else self.group
        return replace(found, group=group, zero=self.asymmetric, activations=self.fp8_activations)


@dataclass(frozen=True)
class CalibrationOptions:
    """On which text the error is minimized, if on any."""

    calibrate: Path | None = option(
        None, "Minimize the error on this text (GPTQ): a file as `ladder data` takes them, or a folder of token shards."
    )
    wiring: str | None = option(
        None, "With --calibrate: give the model, which is standard, this wiring, and fit it to both in one go."
    )
    tokens: int | None = option(
        None, "Tokens to calibrate on, spread over the text; default: 64 for each input of the widest projection."
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
        for name in ("wiring", "tokens"):
            if self.calibrate is None and getattr(self, name) is not None:
                raise LadderError(f"--{name} needs a text: give --calibrate")


def check_not_quantized(model: Path, raw: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose config.json says that its matrices are quantized."""
    if raw.get("quantization_config"):
        raise LadderError(f"{model} is quantized already: name the checkpoint it was made from")
