"""The explorer as one file: the answers to everything that it offers, computed before. No torch here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ladder.errors import LadderError
from ladder.explore.answers import Answers
from ladder.explore.choices import Choice, Offer
from ladder.explore.page import page

MOST = 5000  # settings: the file has all of their answers
Progress = Callable[[int, int, str], None]


def write(offer: Offer, answers: Answers, path: Path, progress: Progress) -> int:
    """The page with all answers; how many settings it has."""
    choices = list(offer.choices())
    if len(choices) > MOST:
        raise LadderError(
            f"{len(choices):,} settings are too many for a file ({MOST:,} at most): offer fewer sizes, chips or links"
        )
    if not path.parent.is_dir() or path.is_dir():
        raise LadderError(f"{path} cannot be written: name an HTML file in a folder that exists")
    path.touch()  # an error before the work
    found: dict[str, dict[str, Any]] = {"answer": {}, "curve": {}, "frontier": {}, "refused": {}}
    for number, choice in enumerate(choices):
        progress(number, len(choices), f"{choice.size} on {choice.chip}")
        _add(found, choice, answers)
    path.write_text(page(offer, found), encoding="utf-8")
    return len(choices)


def _add(found: dict[str, dict[str, Any]], choice: Choice, answers: Answers) -> None:
    answer = answers.of(choice)
    if "refused" in answer:
        found["refused"][choice.key] = answer["refused"]
        return
    found["answer"][choice.key] = answer
    found["curve"][choice.key] = answers.curve(choice) if choice.tp > 1 else {}
    if choice.frontier_key not in found["frontier"]:
        found["frontier"][choice.frontier_key] = answers.frontier(choice)
