"""The ranks of one model, in this process: one directly, several as emulated ranks."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ladder.checkpoint import load
from ladder.comm.base import Comm, Solo
from ladder.comm.emulated import World
from ladder.comm.timed import Timed
from ladder.engine.requests import Opened
from ladder.layers.attention import KVCache
from ladder.model import Decoder

T = TypeVar("T")


class Ranks:
    """Loads the shards and runs forward passes on all ranks at once."""

    def __init__(self, opened: Opened, progress: Callable[[int], None] | None = None) -> None:
        self._opened = opened
        self._world = World(opened.options.tp) if opened.options.tp > 1 else None
        self._models: dict[int, Decoder] = {}
        self._caches: dict[int, KVCache] = {}
        try:
            self._all(lambda comm: self._load(comm, progress))
        except BaseException:
            self.close()
            raise

    def _all(self, work: Callable[[Comm], T]) -> list[T]:
        return [work(Solo())] if self._world is None else self._world.run(work)

    def _load(self, comm: Comm, progress: Callable[[int], None] | None) -> None:
        opened = self._opened
        wire = comm if opened.link is None else Timed(comm, opened.link)
        model = Decoder(opened.config, wire, opened.device)
        self._models[comm.rank] = load(model, opened.directory, opened.options.check, progress)

    def begin(self, batch: int, capacity: int) -> None:
        """Make room for a batch of requests, none longer than `capacity`."""
        for rank, model in self._models.items():
            self._caches[rank] = model.new_cache(batch, capacity)

    def step(self, tokens: Sequence[Sequence[int]], advance: Sequence[bool]) -> Tensor:
        """Feed each line its tokens; returns the logits after each line's last one, [batch, vocab], float32 on the CPU.

        The cache keeps the tokens of those lines that `advance`.
        """
        width = max(len(line) for line in tokens)
        device = self._opened.device
        ids = torch.tensor([[*line, *[0] * (width - len(line))] for line in tokens], device=device)
        last = torch.tensor([len(line) - 1 for line in tokens], device=device)

        def forward(comm: Comm) -> Tensor:
            model, cache = self._models[comm.rank], self._caches[comm.rank]
            with torch.inference_mode():
                logits = model.comm.all_gather(model(ids, cache, last))
            cache.advance([len(line) if moves else 0 for line, moves in zip(tokens, advance, strict=True)])
            return logits[:, 0, : self._opened.config.vocab]

        return self._all(forward)[0].float().cpu()

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
