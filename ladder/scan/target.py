"""What a scan is to end with, and the machine that speeds are predicted for. No torch here."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite

from ladder.config import ModelConfig
from ladder.errors import LadderError
from ladder.perf.chips import Chip
from ladder.perf.memory import check_memory, more_ranks
from ladder.perf.plan import MOST_RANKS, OWN_LINK, ROOM, known_link
from ladder.perf.predict import Setting, decoding, engine_of
from ladder.perf.reach import usual_link
from ladder.wiring import Wiring

PROMPT, NEW = 1024, 512  # tokens of a request, as `ladder plan` has them; the same parts of a context that is shorter
Predictor = Callable[[Wiring], float]  # how many times as fast as the standard wiring a token is made


@dataclass(frozen=True)
class TargetMachine:
    """Where the model is to run, with the names and defaults of `ladder plan`."""

    chip: str = "h100"
    tp: int = 8
    link: str = OWN_LINK
    requests: int = 1  # at a time

    def predictor(self, config: ModelConfig) -> Predictor:
        """Predicts speeds on this machine; what is not possible is refused."""
        for what, value in (("tp", self.tp), ("requests", self.requests)):
            if not 1 <= value <= 1_000_000:
                raise LadderError(f"{what} must be from 1 to a million, not {value}")
        chip = Chip.parse(self.chip)
        link, name = known_link(usual_link(chip.links, self.tp) if self.link == OWN_LINK else self.link)
        config.check_degree(self.tp)
        prompt = min(PROMPT, config.context * PROMPT // (PROMPT + NEW))
        new = min(NEW, config.context - prompt)
        s = Setting(config, self.tp, self.requests, prompt, new, chip, engine_of(chip), link, name)
        room = ROOM * chip.memory_gb * 1e9

        def ways() -> list[str]:
            found = more_ranks(config, self.tp, MOST_RANKS, lambda tp: replace(s, tp=tp).memory.total <= room)
            return found or ["a larger --chip or fewer --requests"]

        check_memory(f"the model at TP {self.tp}", s.memory, room, f"each {chip.name}", ways)

        def seconds(wiring: Wiring) -> float:
            return decoding(replace(s, config=replace(config, wiring=wiring))).seconds

        standard = seconds(Wiring(("standard",) * config.layers))
        return lambda wiring: standard / seconds(wiring)


def check_wishes(budget: float | None, speed: float | None) -> None:
    """Refuse what no set can keep."""
    if budget is not None and not (isfinite(budget) and budget >= 0):
        raise LadderError(f"the budget is {budget:g} nats per token: it must be 0 or more")
    if speed is not None and not (isfinite(speed) and speed > 1):
        raise LadderError(f"the speed is {speed:g} times standard's: it must be more than 1, which standard has")
