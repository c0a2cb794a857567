"""Which packages are there, in which version, and what the missing ones are for. Nothing is imported."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from ladder.errors import install

EXTRA = "extra "


@dataclass(frozen=True)
class Package:
    """A row: how it is imported, how it is installed, and what needs it."""

    module: str
    name: str  # its distribution
    source: str  # what to give pip, or EXTRA and the name of the extra that has it
    what: str
    gpu: bool = False  # of no use without one

    @property
    def install(self) -> str:
        """The command that installs it."""
        return install(self.source.removeprefix(EXTRA)) if EXTRA in self.source else f"pip install {self.source}"


PACKAGES = (
    Package("torch", "torch", "torch", "all that computes"),
    Package("transformers", "transformers", "transformers", "tokenizers, and models as transformers has them"),
    Package("triton", "triton", "triton", "our kernels, on NVIDIA GPUs", gpu=True),
    Package("vllm", "vllm", "vllm", "serving wired models in vLLM", gpu=True),
    Package("uvicorn", "uvicorn", EXTRA + "serve", "ladder serve"),
    Package("httpx", "httpx", EXTRA + "load", "ladder load, and ladder chat with an endpoint"),
    Package("accelerate", "accelerate", EXTRA + "train", "ladder adapt and ladder train"),
    Package("peft", "peft", EXTRA + "train", "ladder adapt --method lora"),
    Package("pyarrow", "pyarrow", EXTRA + "data", "ladder data with Parquet files"),
    Package("lm_eval", "lm-eval", EXTRA + "eval", "tasks in ladder eval"),
    Package("vl_convert", "vl-convert-python", EXTRA + "plot", "charts of ladder report, explore and demo"),
    Package("matplotlib", "matplotlib", EXTRA + "plot", "pictures of ladder scan"),
    Package("compressed_tensors", "compressed-tensors", EXTRA + "quantized", "quantized checkpoints"),
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
