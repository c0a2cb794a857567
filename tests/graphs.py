"""What stands for CUDA graphs where there is no GPU."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from ladder.engine.graphs import prompts, steps


class Recorded:
    """Stands for a CUDA graph: a replay computes again, from the same inputs into the same results."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        self.results = step()
        self.kind = "step" if isinstance(self.results, tuple) else "prompts"
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for old, new in zip(self.tensors(self.results), self.tensors(self._step()), strict=True):
            old.copy_(new)

    @staticmethod
    def tensors(results: Any) -> tuple[Tensor, ...]:
        return results if isinstance(results, tuple) else (results,)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Graphs are recorded, from now on; those that are made."""
    made: list[Recorded] = []

    def capture(step: Callable[[], Any], *_: object) -> tuple[Recorded, Any]:
        made.append(Recorded(step))
        return made[-1], made[-1].results

    for module in (steps, prompts):
        monkeypatch.setattr(module, "capture", capture)
    return made
