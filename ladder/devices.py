"""Devices by their names, checked before anything is put on them."""

import torch

from ladder.errors import LadderError, check_known


def device(name: str) -> torch.device:
    """A device by its name, if this machine has it."""
    try:
        found = torch.device(name)
    except RuntimeError:
        raise LadderError(f"unknown device {name!r}: use cpu, cuda or cuda:N") from None
    if found.type not in ("cpu", "cuda"):
        raise LadderError(f"device {name!r} is not supported: use cpu, cuda or cuda:N")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise LadderError(f"device {name!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    return found


def device_type(name: str) -> str:
    """cpu or cuda, by a name that may also be auto: a GPU where there is one."""
    check_known("device", name, ("auto", "cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise LadderError("device 'cuda' is not there: torch sees no GPU; use --device cpu")
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
