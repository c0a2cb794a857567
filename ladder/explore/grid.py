"""The explorer as one file: the answers to everything that it offers, computed before. No torch here."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

from ladder.errors import LadderError
from ladder.explore.answers import Answers
from ladder.explore.choices import Choice, Offer
from ladder.explore.measured import Measured
from ladder.explore.page import page
from ladder.files import check_file, write_text
from ladder.perf.plan import SWEEPS
from ladder.progress import workers

MOST = 5000  # settings: the file has all of their answers
ALPHAS = tuple(SWEEPS["link"][::2])  # of a curve: fewer than those of a server
Progress = Callable[[int, int, str], None]
Found = dict[str, dict[str, Any]]


def write(offer: Offer, inputs: Sequence[Path], path: Path, progress: Progress) -> int:
    """The page with all answers; how many settings it has."""
    choices = list(offer.choices())
    if len(choices) > MOST:
        raise LadderError(
            f"{len(choices):,} settings are too many for a file ({MOST:,} at most): offer fewer sizes, chips or links"
        )
    check_file(path)  # an error before the work
    groups: dict[str, list[Choice]] = {}
    for choice in choices:
        groups.setdefault(choice.frontier_key, []).append(choice)
    found: Found = {"answer": {}, "curve": {}, "frontier": {}, "refused": {}}
    done = 0
    with workers(min(len(groups), os.cpu_count() or 1)) as submit:
        parts = [submit(answered, offer, inputs, group) for group in groups.values()]
        for part in as_completed(parts):
            for name, answers in part.result().items():
                found[name] |= answers
            done += len(part.result()["answer"]) + len(part.result()["refused"])
            progress(done, len(choices), "predicting")
    write_text(path, page(offer, found))
    return len(choices)


def answered(offer: Offer, inputs: Sequence[Path], choices: Sequence[Choice]) -> Found:
    """The answers to choices that have one frontier, by question and key."""
    answers = Answers(offer, Measured.of(inputs), ALPHAS)
    found: Found = {"answer": {}, "curve": {}, "frontier": {}, "refused": {}}
    for choice in choices:
        answer = answers.of(choice)
        if "refused" in answer:
            found["refused"][choice.key] = answer["refused"]
            continue
        found["answer"][choice.key] = answer
        found["curve"][choice.key] = answers.curve(choice) if choice.tp > 1 else {}
    if found["answer"]:
        found["frontier"][choices[0].frontier_key] = answers.frontier(choices[0])
    return found
