"""The notebook of `examples/`: its cells run one after the other on a CPU, and what they show is so."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "first_steps.ipynb"


@pytest.fixture(scope="module")
def space() -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "notebook"}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), found)
    return found


def test_it_is_a_notebook() -> None:
    """Of the format's version 4.5, whose cells have names; kept without outputs."""
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code")


@pytest.mark.filterwarnings("ignore")
def test_the_cells_run(space: dict[str, Any]) -> None:
    assert len(space["result"].token_ids) == 40
    assert float(space["apart"]) < 1e-4


@pytest.mark.filterwarnings("ignore")
def test_what_it_says_of_wirings_is_so(space: dict[str, Any]) -> None:
    losses = space["losses"]
    assert losses["ladder"] < losses["standard:4 ladder:4"] - 0.5 and losses["ladder"] < losses["standard"] - 0.5
    different = (space["logits"]["ladder"] - space["logits"]["standard"]).abs().max()
    assert float(different) > 0.01
    for found in space["speedups"].values():
        assert found["ladder"] > 1 and found["parallel-1"] > 1
