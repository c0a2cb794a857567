"""Settings of wired models in vLLM: what is read from `--additional-config '{"ladder": {...}}'`, and the wiring itself.

They are part of vLLM's config (or of the Hugging Face config inside it), so that its caches of compiled code see them.
No vLLM here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ladder.config.lock import ranks_of, shared_norm_of, wiring_of
from ladder.errors import LadderError
from ladder.options import check_types
from ladder.wiring import Out, SubBlock, Wiring

KEY = "ladder"
PADDING = 64  # vLLM fills the vocabulary up to a multiple of this before it shares it


@dataclass(frozen=True)
class Settings:
    """How wired models are computed."""

    reference: bool = False  # every all-reduce is waited for where it begins: no overlap, the same numbers
    lanes: int | None = (
        None  # 2: sub-blocks that do not depend on each other at the same time, in captured decode steps
    )

    def __post_init__(self) -> None:
        check_types(self)
        if self.lanes not in (None, 1, 2):
            raise LadderError(f"ladder.lanes must be 1 or 2, not {self.lanes}")

    def lanes_where(self, known: bool) -> int:
        """`known`: the model is of a kind that two lanes have been measured with. Others take them if they are told."""
        return self.lanes or (2 if known and not self.reference else 1)

    @classmethod
    def read(cls, additional: Any) -> "Settings":
        """From vLLM's additional_config; what others keep there is theirs."""
        given = additional.get(KEY) if isinstance(additional, Mapping) else None
        if given is None:
            return cls()
        known = [entry.name for entry in fields(cls)]
        if not isinstance(given, Mapping):
            raise LadderError(f"additional_config has {KEY!r}: {given!r}, which must be an object with {known}")
        for name in given:
            if name not in known:
                raise LadderError(f"additional_config has the unknown setting {KEY}.{name}: known are {known}")
        return cls(**given)


@dataclass(frozen=True)
class Wired:
    """What a model's Hugging Face config says of its wiring, checked."""

    wiring: Wiring
    blocks: tuple[tuple[SubBlock, SubBlock], ...]  # of every layer
    shared_norm: bool

    @classmethod
    def of(cls, keys: Mapping[str, Any], layers: int, ranks: int) -> "Wired":
        """`keys`: of the Hugging Face config in memory. `ranks`: of vLLM's tensor parallelism."""
        wiring = wiring_of(keys, layers)
        _check_head(wiring, int(keys["vocab_size"]), ranks)
        made_for = ranks_of(keys)
        if made_for not in (1, ranks):
            raise LadderError(
                f"the model was trained for {made_for} ranks, not {ranks}: give --tensor-parallel-size {made_for}"
            )
        if keys.get("staleness") not in (None, 1):
            raise LadderError("the model's adaptation is not finished: its layers' staleness is not 1 yet")
        return cls(wiring, wiring.sub_blocks(), shared_norm_of(keys))


def _check_head(wiring: Wiring, vocab: int, ranks: int) -> None:
    """Where the last sub-block is local, a token's logit is that of the rank whose block of the vocabulary it is in:
    the blocks must be those of the native engine.
    """
    local = wiring.sub_blocks()[-1][-1].out is Out.LOCAL
    if local and ranks > 1 and -(-vocab // PADDING) * PADDING / ranks != -(-vocab // ranks):
        raise LadderError(
            f"wiring {str(wiring)!r} ends without an all-reduce, so its function depends on how {ranks} ranks share "
            f"the vocabulary of {vocab}; vLLM shares it in another way: end with a wiring that reduces"
        )
