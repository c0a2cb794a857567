"""What a kernel reads from the residual stream."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ladder.comm.signalled import Flagged
from ladder.residual import Terms

MOST_SUMS = 2  # all-reduces that a kernel waits for by itself; ladder-1-2 needs so many, seams may need more


@dataclass(frozen=True)
class Source:
    """The stream before a sub-block: base + sums + drift; the first of the sums may still be in flight."""

    base: Tensor  # [rows, hidden], like all the others
    sums: tuple[Tensor, ...] = ()
    flags: tuple[Tensor, ...] = ()  # of the first len(flags) sums
    need: int = 1  # what a flag counts up to
    drift: Tensor | None = None

    @classmethod
    def of(cls, terms: Terms) -> "Source":
        """All-reduces without a flag are waited for here, by the GPU's stream."""
        early, late = terms.pending[:-MOST_SUMS], terms.pending[-MOST_SUMS:]
        base = terms.base
        for pending in early:
            base = base + pending.wait()
        flagged = [p for p in late if isinstance(p, Flagged) and p.flag is not None]
        plain = [p for p in late if not (isinstance(p, Flagged) and p.flag is not None)]
        flags = tuple(p.flag for p in flagged if p.flag is not None)
        sums = (*(p.for_kernel() for p in flagged), *(p.wait() for p in plain))
        drift = torch.stack(terms.more).sum(0) if len(terms.more) > 1 else next(iter(terms.more), None)
        return cls(base, sums, flags, flagged[0].need if flagged else 1, drift)

    def arguments(self, saved: Tensor) -> tuple[Tensor | int | None, ...]:
        """As the kernels take them: base, first, second, drift, flag1, flag2, need, saved."""
        first, second = (*self.sums, None, None)[:2]
        flag1, flag2 = (*self.flags, None, None)[:2]
        return self.base, first, second, self.drift, flag1, flag2, self.need, saved

    def modes(self) -> dict[str, int]:
        return {"SUMS": len(self.sums), "FLAGS": len(self.flags), "DRIFT": int(self.drift is not None)}

    def total(self) -> tuple[Tensor, Tensor]:
        """The reference implementation of the kernels' reading: base + sums, and that + drift."""
        agreed = self.base
        for x in self.sums:
            agreed = agreed + x
        return agreed, agreed if self.drift is None else agreed + self.drift
