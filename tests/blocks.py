"""Blocks of code in README.md and docs/, and the figures of their tables and of their prose."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    (?:ladder|python|torchrun|make|pip) [a-z-]", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(language: str, pages: list[Path] | None = None) -> Iterator[Block]:
    for page in pages or PAGES:
        text = page.read_text(encoding="utf-8")
        for found in FENCE.finditer(text):
            if found[1] == language:
                yield Block(str(page.relative_to(ROOT)), text[: found.start()].count("\n") + 2, found[2])


def commands(pages: list[Path] | None = None) -> Iterator[tuple[Block, list[str]]]:
    """Every command of the shell blocks, as words; `> FILE` at its end is left out."""
    for block in blocks("sh", pages):
        number = block.line
        for line in block.text.replace("\\\n", "  ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield Block(block.page, number, line), words[: words.index(">")] if ">" in words else words
            number += 1


def without_code(text: str) -> str:
    return FENCE.sub("", text)
