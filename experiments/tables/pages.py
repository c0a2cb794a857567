"""The pages that have tables of measurements, and their marks: `<!-- table: NAME -->`, the table, `<!-- end -->`."""

import re
from pathlib import Path

from experiments.tables import adapting, models, paper, predicted, quality, speed, vllm

ROOT = Path(__file__).parent.parent.parent
TABLES = {
    **speed.TABLES,
    **quality.TABLES,
    **models.TABLES,
    **paper.TABLES,
    **predicted.TABLES,
    **vllm.TABLES,
    **adapting.TABLES,
}
MARK = re.compile(r"<!-- table: (?P<name>[\w-]+) -->\n(?P<text>.*?)<!-- end -->", re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """With every table as its lines have it today."""

    def table(mark: re.Match[str]) -> str:
        return f"<!-- table: {mark['name']} -->\n{TABLES[mark['name']]()}\n<!-- end -->"

    return MARK.sub(table, text)
