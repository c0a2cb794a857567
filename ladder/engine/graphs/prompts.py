"""Passes with prompts: launched one by one, their kernels would keep the GPU waiting."""

import logging
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ladder.engine.forward import Forward
from ladder.engine.graphs.steps import capture
from ladder.kernels.attention.attend_prompts import tokens_of_tile
from ladder.kernels.table import beside, reach
from ladder.layers.attention import Attention
from ladder.layers.cache import BLOCK, Metadata, PrefillMetadata, tiles

SHORTEST, LONGEST = 16, 2048  # rows of a pass that is worth a graph; longer ones keep the GPU busy by themselves
STEPS = ((256, 128), (1024, 256))  # beyond so many rows, what lies between two sizes; up to there, powers of two
MOST = 16  # prompts of a pass
USES = 2  # passes of a size before it is captured, which takes as long as several of them

logger = logging.getLogger(__name__)

Key = tuple[int, int, int]  # rows, sequences that are decoded, positions that their attention is configured for


def rows_of(count: int) -> int:
    """What a pass of `count` rows is filled up to."""
    for above, step in reversed(STEPS):
        if count > above:
            return -(-count // step) * step
    return max(SHORTEST, 1 << (count - 1).bit_length())


def sizes(most_rows: int, most_decoded: int) -> list[Key]:
    """Of all passes of up to so many rows and decoded sequences, none of which is long; the largest first."""
    rows = {rows_of(count) for count in range(1, min(most_rows, LONGEST) + 1)}
    decoded = {beside(count) for count in range(most_decoded + 1)}
    return sorted(((r, d, reach(1)) for r in rows for d in decoded if r >= rows_of(d)), reverse=True)


class PromptGraphs:
    """`forward`'s passes of prompts, and of sequences that are decoded beside them. Their rows and sequences are filled
    up to the next of a few sizes, with tokens of `spare`, a slot of the cache that no sequence has.
    """

    def __init__(self, forward: Forward, spare: int, last: Tensor) -> None:
        """`last`: by slot, the newest tokens of sequences that are decoded."""
        self._forward, self._spare, self._last = forward, spare, last
        self._captured: dict[Key, _Captured] = {}
        self._asked: Counter[Key] = Counter()
        self._shared: _Shared | None = None
        self._logged: set[str] = set()

    def captured(self, key: Key) -> "_Captured":
        if key not in self._captured:
            if self._shared is None:
                self._shared = _Shared(self._forward, self._spare)
            self._captured[key] = _Captured(self._forward, key, self._shared, self._spare, self._last)
        return self._captured[key]

    def find(self, counts: Sequence[int], starts: Sequence[int], decoded: int) -> "_Captured | None":
        """The graph for a pass of so many tokens of each sequence that follow `starts`, the first `decoded` of which
        are decoded; None: it is launched kernel by kernel.
        """
        if why := self._why_not(sum(counts), len(counts) - decoded):
            if why not in self._logged:
                logger.info("passes with %s are launched kernel by kernel, not as CUDA graphs", why)
                self._logged.add(why)
            return None
        most = beside(decoded)
        key = (max(rows_of(sum(counts)), rows_of(most)), most, reach(max(starts[:decoded], default=0) + 1))
        self._asked[key] += 1
        return self.captured(key) if key in self._captured or self._asked[key] >= USES else None

    def _why_not(self, rows: int, prompts: int) -> str | None:
        if not self._forward.capturable:
            return "prompts, in a model of which no graph can be captured,"
        if rows > LONGEST:
            return f"more than {LONGEST} tokens"
        return f"more than {MOST} prompts" if prompts > MOST else None


class _Shared:
    """What all graphs have in common, as one is replayed after the other: memory, and where their logits are."""

    def __init__(self, forward: Forward, spare: int) -> None:
        device = forward.cache.keys[0].device
        cuda = device.type == "cuda"
        self.pool = torch.cuda.graph_pool_handle() if cuda else None
        self.stream = torch.cuda.Stream(device) if cuda else None
        self._rows = beside(spare) + MOST  # there are as many slots as the spare one's number
        self._logits: Tensor | None = None

    def keep(self, logits: Tensor) -> Tensor:
        if self._logits is None:  # before anything is captured
            self._logits = logits.new_empty(self._rows, logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)


class _Captured:
    def __init__(self, forward: Forward, key: Key, shared: _Shared, spare: int, last: Tensor) -> None:
        rows, decoded, reach = key
        model, cache = forward.model, forward.cache
        attention, device = model.layers[0].attention, cache.keys[0].device
        assert isinstance(attention, Attention)
        heads = (attention.heads, attention.kv_heads, attention.head_dim)
        self._tokens_of_tile = tokens_of_tile(*heads, attention.dtype.itemsize)
        self._fill = min(self._tokens_of_tile, BLOCK)  # tokens of a tile of the spare slot, which has one block
        self._tiles = -(-rows // self._tokens_of_tile) + MOST + -(-STEPS[-1][1] // self._fill)
        self._rows, self._decoded, self._spare, self._last = rows, decoded, spare, last
        # tokens, slots and positions of all rows; positions of decoded sequences; rows with an answer; tiles
        self._sizes = [rows, rows, rows, decoded, decoded + MOST, 2 * self._tiles]
        self._inputs = torch.zeros(sum(self._sizes), dtype=torch.long, device=device)
        self._tokens, slots, positions, newest, answered, parts = self._inputs.split(self._sizes)
        self._slots_of_rows = slots
        slots.fill_(spare)
        newest.fill_(-1)

        def step() -> Tensor:
            cos, sin = model.ropes.angles(positions)
            first = Metadata(slots[:decoded], newest, cos[:, :decoded], sin[:, :decoded], cache.tables, reach)
            metadata = PrefillMetadata(
                slots, positions, cos, sin, cache.tables, reach, (), model.config.windows,
                first if decoded else None, {self._tokens_of_tile: parts.view(-1, 2)},
            )  # fmt: skip
            return shared.keep(forward.prefill_of(self._tokens, metadata, answered))

        self._graph, self._results = capture(step, device, shared.stream, shared.pool)

    def _write(
        self, pieces: Sequence[Sequence[int]], slots: Sequence[int], starts: Sequence[int], decoded: int,
        answered: Sequence[int],
    ) -> None:  # fmt: skip
        """The inputs of a pass, in one copy. What fills it up stands at the beginning of the spare slot."""
        counts = [len(piece) or 1 for piece in pieces]
        fill = self._rows - sum(counts)
        prompts = list(zip(starts, counts, strict=True))
        parts = tiles(prompts[decoded:], decoded, self._tokens_of_tile)
        parts += tiles([(0, self._fill)] * (fill // self._fill), sum(counts), self._fill)
        if rest := fill % self._fill:
            parts.append((self._rows - rest, rest))
        given: list[list[int]] = [
            [token for piece in pieces for token in piece or (0,)] + [0] * fill,
            [slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)] + [self._spare] * fill,
            [at for start, count in prompts for at in range(start, start + count)] + [0] * fill,
            [*starts[:decoded], *[-1] * (self._decoded - decoded)],
            [*answered, *[0] * (self._sizes[4] - len(answered))],
            [number for part in parts for number in part] + [0] * (2 * (self._tiles - len(parts))),
        ]
        flat = torch.tensor([number for each in given for number in each], pin_memory=self._inputs.is_cuda)
        self._inputs.copy_(flat, non_blocking=True)
        torch.index_select(self._last, 0, self._slots_of_rows[:decoded], out=self._tokens[:decoded])

    def replay(
        self, pieces: Sequence[Sequence[int]], slots: Sequence[int], starts: Sequence[int], decoded: int,
        answered: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """Tokens `pieces[i]` that follow what `slots[i]` holds, `starts[i]` tokens; of the first `decoded` sequences
        their newest tokens. Logits of the rows `answered`, which the next replay overwrites.
        """
        self._write(pieces, slots, starts, decoded, answered)
        self._graph.replay()
        return self._results[: len(answered)]
