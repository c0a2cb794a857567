"""What a kernel reads of the residual stream."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ladder.comm.signalled import Flagged
from ladder.residual import ResidualStream

MOST_SUMS = 2  # that a kernel waits for by itself; ladder-1-2 needs so many, seams may need more


@dataclass(frozen=True)
class Source:
    """The stream before a sub-block: base + sums + drift; the first of the sums may still be on the wire."""

    base: Tensor  # [rows, hidden], like all the others
    sums: tuple[Tensor, ...] = ()
    flags: tuple[Tensor, ...] = ()  # of the first len(flags) sums
    need: int = 1  # what a flag counts up to
    drift: Tensor | None = None
    local: bool = False  # base + sums is this rank's drift, and `drift` what the ranks agree on

    def arguments(self, saved: Tensor) -> tuple[Tensor | int | None, ...]:
        """As the kernels take them: base, first, second, drift, flag1, flag2, need, saved."""
        first, second = (*self.sums, None, None)[:2]
        flag1, flag2 = (*self.flags, None, None)[:2]
        return self.base, first, second, self.drift, flag1, flag2, self.need, saved

    def modes(self) -> dict[str, int]:
        return {"SUMS": len(self.sums), "FLAGS": len(self.flags), "DRIFT": int(self.drift is not None)}

    def total(self) -> tuple[Tensor, Tensor]:
        """The torch twin of the kernels' reading: base + sums, and that + drift."""
        agreed = self.base
        for x in self.sums:
            agreed = agreed + x
        return agreed, agreed if self.drift is None else agreed + self.drift


def source(stream: ResidualStream, lag: int) -> Source:
    """The stream as a sub-block of this lag reads it. Sums without a flag are waited for here, by the GPU's stream."""
    terms = stream.terms(lag)
    early, late = terms.sums[:-MOST_SUMS], terms.sums[-MOST_SUMS:]
    base = terms.agreed
    for pending in early:
        base = base + pending.wait()
    flagged = [p for p in late if isinstance(p, Flagged) and p.flag is not None]
    plain = [p for p in late if not (isinstance(p, Flagged) and p.flag is not None)]
    flags = tuple(p.flag for p in flagged if p.flag is not None)
    sums = (*(p.for_kernel() for p in flagged), *(p.wait() for p in plain))
    if terms.fresh is not None and not terms.sums and len(terms.drifts) == 1:
        # the reader joins the fresh term to the drift, as it would a sum to what the ranks agree on
        return Source(terms.drifts[0], (terms.fresh,), drift=base, local=True)
    drifts = [*terms.drifts, *([] if terms.fresh is None else [terms.fresh])]
    drift = torch.stack(drifts).sum(0) if len(drifts) > 1 else next(iter(drifts), None)
    return Source(base, sums, flags, flagged[0].need if flagged else 1, drift)


def settle(stream: ResidualStream, read: Source, saved: Tensor) -> None:
    """Tell the stream what its reader has added up: base + sums."""
    (stream.settle_drift if read.local else stream.settle)(saved)
