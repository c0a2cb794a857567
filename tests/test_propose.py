"""Which set of layers a budget or a speed is answered with."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from ladder.config import ModelConfig
from ladder.errors import LadderError
from ladder.perf.plan import Deployment, predict
from ladder.scan.probe import Damage
from ladder.scan.propose import propose, size_between, size_for
from ladder.scan.scan import Scan, sizes
from ladder.scan.target import TargetMachine
from ladder.wiring import Wiring


def made(costs: dict[int, float], last: dict[int, float] | None = None, layers: int = 8) -> Scan:
    """A scan with these costs by size; the layers that hurt least come first."""

    def damage(some: range, kl: float) -> Damage:
        wiring = Wiring(tuple("ladder" if at in some else "standard" for at in range(layers)))
        return Damage(tuple(some), str(wiring), kl, 0.0, math.exp(kl), 0.0, 0.5)

    grown = tuple(damage(range(size), kl) for size, kl in costs.items())
    others = tuple(damage(range(layers - size, layers), kl) for size, kl in (last or {}).items())
    standard = Wiring(("standard",) * layers)
    return Scan("ladder", standard, damage(range(0), 0.0), 10, tuple(range(layers)), (), grown, others)


def test_a_budget_gives_the_largest_set_within_it() -> None:
    found = made({1: 0.1, 2: 0.3, 4: 0.25, 8: 2.0})
    for budget, size in ((0.1, 1), (0.24, 1), (0.25, 4), (0.5, 4), (2.0, 8), (9.0, 8)):
        proposal = propose(found, budget=budget)
        assert (len(proposal.damage.layers), proposal.over, proposal.predicted) == (size, 0, None)
    better = made({1: 0.1, 4: 0.25, 8: math.nan}, {1: 0.01, 4: 0.2, 8: math.nan})
    assert propose(better, budget=0.3).damage.layers == (4, 5, 6, 7)  # as many, and less harm
    fitted = made({1: 0.1, 4: 0.4, 8: 0.9}, {1: 0.2, 4: 0.2, 8: 0.9})  # more of the last layers than of the others
    assert propose(fitted, budget=0.3).damage.layers == (4, 5, 6, 7)
    assert size_between(fitted, 0.3) == 6
    with pytest.raises(
        LadderError, match=r"no set stays within a budget of 0.05 .* the least is 0.1, with layer 0 alone"
    ):
        propose(found, budget=0.05)


@pytest.mark.parametrize("points", [1, 2, 3, 8])
def test_a_budget_is_halved_towards_the_largest_set_of_all(points: int) -> None:
    """Whatever was sampled, the answer is that of every size, after log2 of the gap more measurements."""
    curve = {size: size**2 / 100 for size in range(1, 31)}
    for budget in (0, *curve.values(), 99):
        costs = {size: curve[size] for size in sizes(30, points)}
        sampled = sorted(costs)
        while (size := size_between(made(costs, layers=30), budget)) is not None:
            assert size not in costs
            costs = dict(sorted({**costs, size: curve[size]}.items()))
        gap = max(high - low for low, high in pairwise(sampled))
        assert len(costs) - len(sampled) <= math.ceil(math.log2(gap))
        if budget:
            every, found = (propose(made(some, layers=30), budget=budget) for some in (curve, costs))
            assert found == every
        else:
            assert sorted(costs) == sampled  # no set is within, and one layer was measured


def test_which_size_is_measured_next() -> None:
    assert size_between(made({1: 0.1, 2: 0.3, 4: 0.25, 8: 2.0}), 0.25) == 6  # from the largest that is within
    assert size_between(made({1: 0.1, 4: math.nan}), 9) == 2  # what is not finite is within no budget
    for costs in ({1: 0.1, 2: 0.3, 8: 2.0}, {1: 0.1, 8: 0.15}, {1: 0.3, 8: 0.4}):
        assert size_between(made(costs), 0.2) is None


def test_a_speed_gives_the_smallest_set_that_has_it() -> None:
    """The speed of a set is counted here: 1 + a tenth for every layer."""
    found = made({1: 0.1, 2: 0.3, 4: 0.6, 8: 2.0}, {1: 0.2, 2: 0.2, 4: 0.7, 8: 2.0})

    def speed(wiring: Wiring) -> float:
        return 1 + wiring.layers.count("ladder") / 10

    proposal = propose(found, speed=1.15, predictor=speed)
    assert (proposal.damage.layers, proposal.predicted, proposal.over) == ((6, 7), 1.2, None)
    both = propose(found, budget=0.5, speed=1.3, predictor=speed)
    assert (len(both.damage.layers), both.over) == (4, pytest.approx(0.1))
    assert propose(found, budget=0.7, speed=1.3, predictor=speed).over == 0
    assert size_for(found, 1.3, speed) == 3  # which was not measured
    assert propose(found, budget=0.3, predictor=speed).predicted == 1.2
    for wish in (lambda: propose(found, speed=1.9, predictor=speed), lambda: size_for(found, 1.9, speed)):
        with pytest.raises(LadderError, match=r"1.9 times standard's speed cannot be reached.*give 1.800"):
            wish()
    for wrong in ({"budget": -0.1}, {"budget": math.nan}, {"speed": 1.0}, {"speed": math.inf}, {"speed": 1.5}, {}):
        with pytest.raises(LadderError, match=r"must be|give a"):
            propose(found, **wrong)


@pytest.mark.parametrize("pattern", ["ladder", "standard:48 ladder:32", "ladder@1,5-9,70", "ladder-2@40-79"])
@pytest.mark.parametrize("machine", [TargetMachine(), TargetMachine("h200", 4, "50us,10GB/s", 16)])
def test_the_speed_is_what_ladder_plan_says(pattern: str, machine: TargetMachine) -> None:
    config = ModelConfig.named("llama-3-70b")
    where = (machine.chip, machine.tp, machine.link, machine.requests, 1024, 512)
    standard, wired = (predict(Deployment("llama-3-70b", *where, each))["tpot_ms"] for each in ("standard", pattern))
    found = machine.predictor(config)(Wiring.parse(pattern, 80))
    assert found == pytest.approx(standard / wired, rel=1e-4)  # a plan has five digits
    assert found > 1.001


def test_refused_machines() -> None:
    config = ModelConfig.named("llama-3-70b")
    for machine, sentence in (
        (TargetMachine(tp=7), "7 ranks cannot share"),
        (TargetMachine(tp=0), "tp must be from 1"),
        (TargetMachine(requests=0), "requests must be from 1"),
        (TargetMachine(chip="h1000"), "unknown chip 'h1000'"),
        (TargetMachine(link="nvlink"), "unknown link 'nvlink'"),
        (TargetMachine(tp=1), "needs 141.6 GB on each h100"),
    ):
        with pytest.raises(LadderError, match=re.escape(sentence)):
            machine.predictor(config)
    short = replace(config, context=300)  # a plan for as much as the model can see
    assert TargetMachine().predictor(short)(Wiring(("ladder",) * 80)) > 1
