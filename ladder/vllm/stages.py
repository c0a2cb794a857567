"""Pipeline parallelism: what of the residual stream crosses the border between two stages.

All-reduces that are in flight there are completed, and cross it as sums that no reader has waited for yet: the next
stage's sub-blocks read the stream exactly as late as on one stage. A rank's drift crosses together with those of all
other ranks, since vLLM sends tensors that are the same on all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ladder.comm.base import Comm
from ladder.residual import ResidualStream
from ladder.wiring import Out, SubBlock

AGREED = "agreed"


@dataclass(frozen=True)
class Border:
    """What crosses: whether each sum carries a drift; and at the end whether there is one that none carries yet."""

    drifts: tuple[bool, ...] = (False,)

    @property
    def sums(self) -> int:
        return len(self.drifts) - 1

    @classmethod
    def after(cls, blocks: Sequence[SubBlock], ranks: int) -> "Border":
        """Behind these sub-blocks, the first of the model on."""
        carried: list[bool] = []  # of each all-reduce that has begun
        read, drift = 0, False
        for block in blocks:
            read = max(read, len(carried) - block.lag)
            if block.out is Out.REDUCE:
                carried.append(drift)
                drift = False
            elif block.out is Out.LOCAL:
                drift = ranks > 1
        return cls((*carried[read:], drift))

    def widths(self, hidden: int, ranks: int) -> dict[str, int]:
        """The tensors by name, and their widths: each has a row for each token."""
        drifts = {f"drift{number}": hidden * ranks for number, there in enumerate(self.drifts) if there}
        return {AGREED: hidden, **{f"sum{number}": hidden for number in range(self.sums)}, **drifts}


def send(stream: ResidualStream) -> dict[str, Tensor]:
    """The stream's tensors by name, the same on all ranks."""
    agreed, sums, drifts = stream.rest_of_all_ranks()
    found = {AGREED: agreed, **{f"sum{number}": x for number, x in enumerate(sums)}}
    return found | {f"drift{number}": x for number, x in enumerate(drifts) if x is not None}


def receive(comm: Comm, tensors: Mapping[str, Tensor], border: Border) -> ResidualStream:
    """The stream as it was before the border; its tensors belong to it from here on."""
    hidden = tensors[AGREED].shape[-1]
    own = slice(comm.rank * hidden, (comm.rank + 1) * hidden)
    drifts = [
        tensors[f"drift{number}"][:, own].contiguous() if there else None for number, there in enumerate(border.drifts)
    ]
    return ResidualStream(comm, tensors[AGREED], [tensors[f"sum{number}"] for number in range(border.sums)], drifts)
