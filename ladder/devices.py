"""Devices by name, checked before they are used; which dtypes a CPU supports."""

import logging
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from ladder.errors import LadderError, check_known

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
# what a GPU's driver makes in /dev: NVIDIA's, also on its small boards and under Windows, and AMD's
_DRIVERS = ("nvidia*", "nvhost*", "nvgpu*", "nvmap", "dxg", "kfd")


def check_name(name: str) -> None:
    """Refuse a name that is no device's, before torch is imported."""
    if not re.fullmatch(r"(cpu|cuda)(:[0-9]{1,3})?", name):
        raise LadderError(f"unknown device {name!r}: use cpu, cuda or cuda:N")


def surely_cpu(name: str, dev: Path = Path("/dev")) -> bool:
    """Whether a device's name, or auto, means the CPU as far as can be told without torch: there is no GPU's driver."""
    return name == "cpu" or (name == "auto" and not any(True for driver in _DRIVERS for _ in dev.glob(driver)))


def device(name: str) -> "torch.device":
    """A device by its name, if this machine has it."""
    import torch  # here, as below: what needs names alone does without it

    check_name(name)
    found = torch.device(name)
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise LadderError(f"device {name!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    return found


def upload(x: "torch.Tensor", to: "torch.device") -> "torch.Tensor":
    """A tensor of the CPU on another device, without waiting for what that computes."""
    return x.pin_memory().to(to, non_blocking=True) if to.type == "cuda" else x.to(to)


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 products; without them torch converts, which is slow."""
    import torch

    if hasattr(torch.cpu, "get_capabilities"):  # not in the oldest versions that are supported
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def computing_dtype(asked: str, stored: str, device: "torch.device") -> str:
    """The dtype to compute in: the one that was asked for; auto: the checkpoint's, where this device has its products.
    In bfloat16 a CPU without them is about three times as slow as in float32.
    """
    if asked != "auto":
        return asked
    if stored != "bfloat16" or device.type != "cpu" or cpu_multiplies_bfloat16():
        return stored
    logger.info("dtype auto: float32 instead of bfloat16, this CPU has no bf16 products")
    return "float32"


def converts_fp8(device: "torch.device") -> bool:
    """Whether kernels can read and write fp8 (e4m3) there; plain torch can anywhere."""
    import torch

    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def silence_bfloat16_fallback() -> None:
    """Let torch give its one warning about bfloat16 products on a CPU without them here, where it is ignored.

    On ARM its first product of more than 8 rows tries oneDNN, fails, and warns with a C++ stack trace.
    """
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed", category=UserWarning)
        square = torch.zeros(32, 32, dtype=torch.bfloat16)
        torch.nn.functional.linear(square, square)


def device_type(name: str) -> str:
    """cpu or cuda, by a name that may also be auto: a GPU where there is one."""
    import torch

    check_known("device", name, ("auto", "cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise LadderError("device 'cuda' is not there: torch sees no GPU; use --device cpu")
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
