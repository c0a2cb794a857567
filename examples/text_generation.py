"""Generates text with a wired checkpoint through transformers' pipeline.

python examples/text_generation.py DIRECTORY PROMPT
"""

import sys
from pathlib import Path

from transformers import pipeline

import ladder.hf  # noqa: F401  without it, DIRECTORY cannot be loaded


def main(directory: Path, prompt: str, new_tokens: int = 16) -> str:
    """The prompt and its continuation."""
    generate = pipeline("text-generation", model=str(directory), device="cpu")
    (found,) = generate(prompt, max_new_tokens=new_tokens, do_sample=False)
    print(found["generated_text"])
    return str(found["generated_text"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
