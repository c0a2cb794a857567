"""Blocks of code in README.md and docs/, and the figures of their tables and of their prose."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LANGUAGES = ("sh", "python", "text")  # of blocks; those of text are looked at by nobody
PROGRAMS = ("ladder", "python", "torchrun", "make", "pip", "vllm")
# that would begin a command, too
OTHERS = ("apt", "cd", "conda", "curl", "docker", "export", "git", "kubectl", "ray", "ssh", "sudo", "uv", "wget")
INDENTED = re.compile(rf"(?:^    (?:{'|'.join(PROGRAMS + OTHERS)}) \S.*\n(?:    .*\n)*)+", re.MULTILINE)


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


def shell_blocks(pages: list[Path] | None = None) -> Iterator[Block]:
    """Between fences, or indented and beginning with a program."""
    yield from blocks("sh", pages)
    for page in pages or PAGES:
        text = page.read_text(encoding="utf-8")
        for found in INDENTED.finditer(FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)):
            lines = "".join(line[4:] for line in found[0].splitlines(keepends=True))
            yield Block(str(page.relative_to(ROOT)), text[: found.start()].count("\n") + 1, lines)


def commands(pages: list[Path] | None = None) -> Iterator[tuple[Block, list[str]]]:
    """Every command of the shell blocks, as words; `> FILE` at its end is left out."""
    for block in shell_blocks(pages):
        number = block.line
        for line in block.text.replace("\\\n", "  ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield Block(block.page, number, line), words[: words.index(">")] if ">" in words else words
            number += 1


def without_code(text: str) -> str:
    return FENCE.sub("", text)
