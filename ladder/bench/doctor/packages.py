"""Which packages are there, in which version, and what the missing ones are for. Nothing is imported."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


@dataclass(frozen=True)
class Package:
    """A row: how it is imported, how it is installed, and what needs it."""

    module: str
    name: str  # its distribution
    install: str  # what to give pip
    what: str
    gpu: bool = False  # of no use without one


OURS = "ladder-residual[{}]"
PACKAGES = (
    Package("torch", "torch", "torch", "all that computes"),
    Package("transformers", "transformers", "transformers", "tokenizers, and models as transformers has them"),
    Package("triton", "triton", "triton", "our kernels, on NVIDIA GPUs", gpu=True),
    Package("vllm", "vllm", "vllm", "serving wired models in vLLM", gpu=True),
    Package("uvicorn", "uvicorn", OURS.format("serve"), "ladder serve"),
    Package("httpx", "httpx", OURS.format("load"), "ladder load, and ladder chat with an endpoint"),
    Package("accelerate", "accelerate", OURS.format("train"), "ladder adapt and ladder train"),
    Package("peft", "peft", OURS.format("train"), "ladder adapt --method lora"),
    Package("pyarrow", "pyarrow", OURS.format("data"), "ladder data with Parquet files"),
    Package("lm_eval", "lm-eval", OURS.format("eval"), "tasks in ladder eval"),
    Package("vl_convert", "vl-convert-python", OURS.format("plot"), "charts of ladder report, explore and demo"),
    Package("matplotlib", "matplotlib", OURS.format("plot"), "pictures of ladder scan"),
    Package("compressed_tensors", "compressed-tensors", OURS.format("quantized"), "quantized checkpoints"),
)


def found(package: Package, version_of: Callable[[str], str] = version) -> str | None:
    """The version that is installed; None: it is missing."""
    try:
        spec = find_spec(package.module)
        if spec is None or spec.origin is None:  # nothing, or a folder that happens to have this name
            return None
    except (ImportError, ValueError):  # half removed
        return None
    try:
        return version_of(package.name)
    except PackageNotFoundError:
        return "of unknown version"
