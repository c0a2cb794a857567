"""Plain text in the notation of WikiText-2: words and punctuation apart, @-@ for hyphens, <unk> for what is rare.

python -m experiments.notation TEXT.xz OUT.txt [--every N]

A model that is adapted on plain text alone forgets that notation sooner than others, and its perplexity is measured on
it. Every N-th document of TEXT (two empty lines between documents) is written, to be adapted on beside the rest.
"""

import argparse
import lzma
import re
from collections import Counter
from pathlib import Path

WORDS = 33_278  # WikiText-2's vocabulary
RULES = (
    (r"(?<=\d)([.,])(?=\d)", r" @\1@ "),
    (r"(?<=\w)[-\u2013](?=\w)", " @-@ "),
    (r"(?<=\w)['\u2019](?=\w)", " '"),
    (r"[\u201c\u201d]", '"'),
    (r"(?<![@ ])([.,;:!?()\[\]\"/%$&])(?!@)", r" \1"),
    (r"([.,;:!?()\[\]\"/%$&])(?![@ ])", r"\1 "),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=8)
    given = parser.parse_args()
    with lzma.open(given.text, "rt", encoding="utf-8") as file:
        documents = [written(text) for text in file.read().split("\n\n\n")[:: given.every] if text.strip()]
    seen = Counter(word for text in documents for word in text.split(" "))
    known = {word for word, _ in seen.most_common(WORDS)} | {"\n", ""}
    rare = (" ".join(word if word in known else "<unk>" for word in text.split(" ")) for text in documents)
    given.out.write_text("\n\n\n".join(rare), encoding="utf-8")


def written(text: str) -> str:
    """A document: its first line is its title, short lines are headings."""
    lines = []
    for number, line in enumerate(line.strip() for line in text.strip().split("\n")):
        if not line:
            continue
        heading = line.endswith(".") and len(line.split()) < 6
        for pattern, into in RULES:
            line = re.sub(pattern, into, line)
        line = " ".join(line.split())
        if number == 0:
            line = f"= {line} ="
        elif heading:
            line = f"= = {line.rstrip(' .')} = ="
        lines.append(f" {line} \n \n" if number == 0 or heading else f" {line} \n")
    return "".join(lines)


if __name__ == "__main__":
    main()
