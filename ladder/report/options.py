"""Options of `ladder report`. No torch here."""

from dataclasses import dataclass
from pathlib import Path

from ladder.errors import LadderError
from ladder.options import argument, option


@dataclass(frozen=True)
class ReportOptions:
    """Which measurements, and where their report goes."""

    inputs: tuple[Path, ...] = argument(
        "Files of JSON lines, as `ladder bench`, `ladder trace` and `ladder load` write them."
    )
    out: Path = option(Path("report"), "Folder for report.html and the pictures.")

    def __post_init__(self) -> None:
        if not self.inputs:
            raise LadderError("no file of measurements: make one with `ladder bench`")
