"""The arms of experiments/adaptation.py: what their names say, and that `ladder adapt` takes what they ask for."""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from experiments.adaptation import WAYS, Experiment, adapt_options, checked, is_fitted, way_of
from ladder.errors import LadderError

WIRINGS = {
    "half-distill": "standard:15 ladder:15", "all-fit": "ladder", "none-fittext": "standard", "30-text": "ladder",
    "27-fittext": "standard:3 ladder:27", "27:parallel-1-fittext": "standard:3 parallel-1:27",
    "1:desync-2x-1-schedule": "standard:29 desync-2x-1:1",
}  # fmt: skip


@pytest.mark.parametrize("arm", WIRINGS)
def test_the_wiring_of_an_arm(arm: str) -> None:
    model = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=30))
    assert Experiment.wiring(cast(Any, SimpleNamespace(_original=model)), checked(arm)) == WIRINGS[arm]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_one_of_ladder_adapt(way: str, tmp_path: Path) -> None:
    begun = tmp_path if way.startswith("fit") else None
    options = adapt_options(tmp_path, tmp_path / "out", "ladder", way, begun)
    assert (options.init_from, options.lm_weight) == (begun, WAYS[way].get("lm_weight", 0.0))


def test_the_control_begins_with_the_original() -> None:
    assert is_fitted("27:parallel-1-fittext") and not is_fitted("none-fittext") and way_of("none-fittext") == "fittext"


@pytest.mark.parametrize("arm", ("half", "half-fitted", "third-fit", "half:ladder-fit", "27:laddr-fit", "-fit"))
def test_other_arms_are_refused(arm: str) -> None:
    with pytest.raises((argparse.ArgumentTypeError, LadderError)):
        checked(arm)
