"""Options of `ladder demo`. No torch here."""

from dataclasses import dataclass
from pathlib import Path

from ladder.errors import LadderError, check_known
from ladder.files import PICTURES, check_file
from ladder.options import check_types, option

DEVICES = ("auto", "cpu", "cuda")
LONGEST = 600.0  # seconds of writing


@dataclass(frozen=True)
class DemoOptions:
    """What is written, for how long, and where the picture goes."""

    prompt: str = option("It was a dark and stormy night", "What the embedded model continues.")
    seconds: float = option(8.0, "Seconds that each side writes.")
    device: str = option("auto", "cpu: two ranks write a text; cuda: decode steps of this GPU; auto: what is there.")
    out: Path = option(Path("ladder-demo.png"), "File for the picture of the timeline.")
    json: bool = option(False, "One JSON object with what was measured, and nothing else.")

    def __post_init__(self) -> None:
        check_types(self)
        check_known("device", self.device, DEVICES)
        if not 1 <= self.seconds <= LONGEST:
            raise LadderError(f"seconds must be from 1 to {LONGEST:g}, not {self.seconds:g}")
        check_file(self.out, *PICTURES)
