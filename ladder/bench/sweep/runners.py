"""One arm of `ladder bench`, ready to run: by the decoder's own layers, or by our kernels as CUDA graphs."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ladder.bench.model import CAPTURED_PROMPT, FusedModel
from ladder.bench.sweep.cells import Cell
from ladder.comm.base import Comm
from ladder.kernels.launch import Launch
from ladder.layers.cache import KVCache
from ladder.model import Decoder

PIECE = 16_384  # tokens of prompts in one pass, as a server would cut them


class Runner(Protocol):
    """One arm, ready to run."""

    lanes: int  # that the sub-blocks of a step run on

    def prompt(self) -> None:
        """Read all prompts and choose each one's first token."""
        ...

    def step(self) -> None:
        """One more token of each sequence."""
        ...


class PlainRunner:
    """The decoder's own layers."""

    lanes = 1

    def __init__(self, model: Decoder, cache: KVCache, cell: Cell, comm: Comm) -> None:
        self._model, self._cache, self._cell, self._comm = model, cache, cell, comm
        self._ids = torch.zeros(cell.batch, cell.prompt, dtype=torch.long, device=cache.keys[0].device)
        self._choice: Tensor | None = None

    def prompt(self) -> None:
        self._enter(0)
        for slots in pieces(self._cell):
            ids = self._ids[slots[0] : slots[-1] + 1]
            last = torch.full((len(slots),), self._cell.prompt - 1, device=ids.device)
            self._choose(self._model(ids, self._cache, last, slots))

    def step(self) -> None:
        self._enter(self._cell.context - 1)
        self._choose(self._model(self._ids[:, :1], self._cache))

    def _enter(self, length: int) -> None:
        """Arms share one model, which is this arm's from here on."""
        self._model.rewire(self._cell.wiring)
        self._model.comm = self._comm
        self._cache.lengths = [length] * len(self._cache.lengths)

    def _choose(self, block: Tensor) -> None:
        self._choice = self._comm.all_gather(block[:, -1])[:, : self._model.config.vocab].argmax(-1)


class GraphRunner:
    """Our kernels: decode steps, and a single short prompt, as CUDA graphs."""

    def __init__(self, model: Decoder, cache: KVCache, cell: Cell, comm: Comm, launch: Launch) -> None:
        self._model, self._cache, self._cell, self._comm = model, cache, cell, comm
        self._enter()
        self._fused = FusedModel(model, cache, launch)
        self._decode_step = self._fused.decode_step(cell.batch, cell.context)
        self.lanes = self._fused.lanes(cell.batch)
        self._ids = torch.zeros(cell.batch, cell.prompt, dtype=torch.long, device=cache.keys[0].device)
        self._choice: Tensor | None = None

    def prompt(self) -> None:
        self._enter()
        if self._cell.batch == 1 and self._cell.prompt <= CAPTURED_PROMPT:
            return self._choose(self._fused.prompt([0] * self._cell.prompt))
        for slots in pieces(self._cell):
            ids = self._ids[slots[0] : slots[-1] + 1]
            last = torch.full((len(slots),), self._cell.prompt - 1, device=ids.device)
            self._choose(self._fused.prompts(ids, last, slots))

    def step(self) -> None:
        self._decode_step()

    def _enter(self) -> None:
        self._model.rewire(self._cell.wiring)
        self._model.comm = self._comm
        self._cache.lengths = [0] * len(self._cache.lengths)

    def _choose(self, block: Tensor) -> None:
        self._choice = self._comm.all_gather(block)[:, : self._model.config.vocab].argmax(-1)


def pieces(cell: Cell) -> Iterator[list[int]]:
    """The slots whose prompts are read in one pass, pass by pass."""
    each = max(1, PIECE // cell.prompt)
    for first in range(0, cell.batch, each):
        yield list(range(first, min(first + each, cell.batch)))
