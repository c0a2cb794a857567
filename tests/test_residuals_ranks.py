"""Emulated ranks of models that are not decoders: what so many tensor-parallel ranks would compute."""

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.errors import LadderError
from ladder.hf import rewire
from tests import oracle
from tests.residuals import FORWARD, MODELS, POST_NORM, build, inputs, lists_of_layers, replaced, result, sub_blocks
from tests.test_hf import close
from tests.test_hf_residuals import gradients

DIVIDED = [name for name in MODELS if name not in POST_NORM]
PROJECTIONS = ("o_proj", "out_proj", "fc2", "output.dense", "Wo", "SelfAttention.o", "EncDecAttention.o", "wo")
DRIFTING = {  # each ends with an all-reduce, whether layers have two sub-blocks or three
    "desync-3x": ["desync-3x"] * 3,
    "desync-2x:2 ladder:1": ["desync-2x", "desync-2x", "ladder"],
    "desync-3x-1:1 ladder-2:2": ["desync-3x-1", "ladder-2", "ladder-2"],
}


def share(model: Any, rank: int, ranks: int) -> Any:
    """A copy with one rank's columns of the output projections; a bias is the first rank's."""
    own = copy.deepcopy(model)
    with torch.no_grad():
        for layers in lists_of_layers(own):
            for name, module in (each for layer in layers for each in layer.named_modules()):
                if not name.endswith(PROJECTIONS):
                    continue
                step = module.weight.shape[1] // ranks
                module.weight[:, : rank * step] = 0
                module.weight[:, (rank + 1) * step :] = 0
                if module.bias is not None and rank:
                    module.bias.zero_()
    return own


def naive(model: Any, rows: list[str], ranks: int, given: dict[str, Tensor]) -> Tensor:
    copies = [share(model, rank, ranks) for rank in range(ranks)]

    def stream_of(place: int, start: Tensor, layers: list[Any], calls: list[dict[str, Any]]) -> Tensor:
        streams, count = oracle.Streams(start, ranks), 0
        for index, (name, call) in enumerate(zip(rows, calls, strict=True)):
            count = 0 if index and rows[index - 1] != name else count
            each = [sub_blocks(lists_of_layers(own)[place][index], call) for own in copies]
            for blocks in zip(*each, strict=True):
                lag, out = oracle.fact(name, count)
                count += 1
                read = streams.read(lag)
                streams.write([block(x) for (block, _), x in zip(blocks, read, strict=True)], out)
        return streams.read(0)[0]

    with ExitStack() as stack:
        for place, layers in enumerate(lists_of_layers(model)):
            replaced(stack, layers, lambda start, layers, calls, place=place: stream_of(place, start, layers, calls))
        return result(model, given)


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("name", DIVIDED)
def test_against_copies_that_have_a_share(name: str, ranks: int) -> None:
    plain, model, given = build(name), build(name), inputs(name)
    for text, rows in DRIFTING.items():
        found = result(rewire(model, text, ranks=ranks), given)
        assert close(found, naive(plain, rows, ranks, given), FORWARD), text
        assert (found - result(rewire(model, text), given)).abs().max() > 100 * FORWARD  # ranks matter
    one, rows = {key: value[:1] for key, value in given.items()}, ["desync-3x"] * 3  # it looks like what all share
    assert close(result(rewire(model, rows[0], ranks=ranks), one), naive(plain, rows, ranks, one), FORWARD)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_change_nothing_without_drift(name: str) -> None:
    """Not one bit: all of them read the same."""
    model, given = build(name), inputs(name)
    for text in ("ladder", "standard:1 ladder:2", *(["parallel"] if name not in POST_NORM else [])):
        expected = result(rewire(model, text), given)
        assert torch.equal(result(rewire(model, text, ranks=2), given), expected)
        assert model.config.wiring_ranks == 2


@pytest.mark.parametrize("name", ("vit", "whisper", "t5"))
def test_gradients(name: str) -> None:
    """Of a wiring that drifts: by finite differences along one direction."""
    model, given = rewire(build(name).double(), "desync-3x", ranks=2), inputs(name)
    given = {key: value.double() if value.is_floating_point() else value for key, value in given.items()}
    found = result(model, given)
    slopes = gradients(model, found)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    g = torch.Generator().manual_seed(8)
    direction = {key: torch.randn(value.shape, generator=g).double() for key, value in slopes.items()}
    expected = sum(float((slopes[key] * direction[key]).sum()) for key in slopes)
    ends = []
    for sign in (1, -1):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for key, parameter in moved.named_parameters():
                if key in direction:
                    parameter += sign * 1e-5 * direction[key]
            ends.append(float((result(moved, given) * weights).sum()))
    assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(expected, rel=2e-3)  # some norms are in float32


def test_generation_with_ranks() -> None:
    model, given = rewire(build("t5"), "desync-3x", ranks=2), inputs("t5")
    given.pop("decoder_input_ids")
    options = {"max_new_tokens": 8, "do_sample": False}
    found = [model.generate(**given, use_cache=use_cache, **options) for use_cache in (True, False)]
    assert torch.equal(*found) and found[0].shape[1] > 3
    with pytest.raises(LadderError, match="use use_cache=False"):
        model.generate(**given, num_beams=3, **options)


@pytest.mark.parametrize("name, text, ranks, message", [
    ("vit", "desync-3x", 3, "3 ranks cannot share 4 heads, 4 key/value heads and ffn 48 evenly"),
    ("whisper", "desync-3x", 5, "5 ranks cannot share 4 heads"),
    ("clip", "desync-3x", 3, "3 ranks cannot share"),
    ("vit", "desync-4x-local", 2, "wiring 'desync-4x-local' ends with partial sums that are kept local"),
    ("t5", "desync-4x-local", 2, "wiring 'desync-4x-local' ends with partial sums that are kept local"),
    ("bert", "desync-3x", 2, "impossible in a post-norm model"),
    ("bert", "ladder", 3, "3 ranks cannot share 4 heads"),
])  # fmt: skip
def test_refused(name: str, text: str, ranks: int, message: str) -> None:
    with pytest.raises(LadderError, match=message) as refused:
        rewire(build(name), text, ranks=ranks)
    assert "\n" not in str(refused.value)
