"""What a kernel reads from the residual stream."""

from dataclasses import dataclass

from torch import Tensor

from ladder.comm.signalled import Flagged
from ladder.residual import Terms

# all-reduces that a kernel waits for by itself: ladder-1-2 needs so many, and so does each of two lanes; and terms of
# drift that it adds, as desync-Nx-1 needs them. Seams and longer lags may need more.
MOST_SUMS = MOST_DRIFTS = 2


@dataclass(frozen=True)
class Source:
    """The stream before a sub-block: base + sums + drifts; the first of the sums may still be in flight."""

    base: Tensor  # [rows, hidden], like all the others
    sums: tuple[Tensor, ...] = ()
    flags: tuple[Tensor, ...] = ()  # of the first len(flags) sums
    need: int = 1  # what a flag counts up to
    drifts: tuple[Tensor, ...] = ()
    spared: int = 0  # multiprocessors that a kernel which polls the flags must leave to the all-reduces

    @classmethod
    def of(cls, terms: Terms) -> "Source":
        """All-reduces without a flag are waited for here, by the GPU's stream."""
        early, late = terms.pending[:-MOST_SUMS], terms.pending[-MOST_SUMS:]
        base = terms.base
        for pending in early:
            base = base + pending.wait()
        flagged = [p for p in late if terms.polls and isinstance(p, Flagged) and p.flag is not None]
        plain = [p for p in late if p not in flagged]
        flags = tuple(p.flag for p in flagged if p.flag is not None)
        sums = (*(p.for_kernel() for p in flagged), *(p.wait() for p in plain))
        drifts = terms.more
        while len(drifts) > MOST_DRIFTS:
            drifts = (drifts[0] + drifts[1], *drifts[2:])
        need = flagged[0].need if flagged else 1
        assert all(p.need == need for p in flagged), "one number for all flags that a kernel polls"
        return cls(base, sums, flags, need, drifts, max((p.multiprocessors for p in flagged), default=0))

    def arguments(self, saved: Tensor) -> tuple[Tensor | int | None, ...]:
        """As the kernels take them: base, first, second, drift1, drift2, flag1, flag2, need, saved."""
        pairs = [(*each, None, None)[:2] for each in (self.sums, self.drifts, self.flags)]
        return self.base, *pairs[0], *pairs[1], *pairs[2], self.need, saved

    def modes(self) -> dict[str, int]:
        return {"SUMS": len(self.sums), "FLAGS": len(self.flags), "DRIFTS": len(self.drifts)}

    def total(self) -> tuple[Tensor, Tensor]:
        """The reference implementation of the kernels' reading: base + sums, and that + drifts."""
        agreed = self.base
        for x in self.sums:
            agreed = agreed + x
        stream = agreed
        for x in self.drifts:
            stream = stream + x
        return agreed, stream
