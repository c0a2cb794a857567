"""Muon: its steps against a naive loop in float64 and against torch's own, whose weights they are, and runs with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig

from ladder.adapt.distill import adapt
from ladder.adapt.muon import LIKE_ADAMW, MOMENTUM, NEWTON_SCHULZ, STEPS, Muon, groups
from ladder.adapt.options import AdaptOptions, TrainingOptions
from ladder.errors import LadderError
from tests import training as tiny
from tests.training import Stop, log, same, silent, training, until, weights

RATE, DECAY = 1e-2, 0.1


def steps(shape: tuple[int, ...], dtype: torch.dtype, count: int = 4) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Two weights, and their gradients of some steps."""
    draw = torch.Generator().manual_seed(1)
    first = [torch.randn(shape, generator=draw, dtype=dtype) for _ in range(2)]
    return first, [[torch.randn(shape, generator=draw, dtype=dtype) for _ in first] for _ in range(count)]


def moved(optimizer: Any, parameters: list[Tensor], slopes: list[list[Tensor]]) -> list[Tensor]:
    for step in slopes:
        for weight, slope in zip(parameters, step, strict=True):
            weight.grad = slope.clone()
        optimizer.step()
    return [weight.detach() for weight in parameters]


def naive(weight: Tensor, slopes: list[Tensor]) -> Tensor:
    """One matrix, step by step, from the singular values: five times s <- a s + b s^3 + c s^5."""
    a, b, c = NEWTON_SCHULZ
    mean, weight = torch.zeros_like(weight), weight.clone()
    for slope in slopes:
        mean = MOMENTUM * mean + (1 - MOMENTUM) * slope
        left, values, right = torch.linalg.svd(MOMENTUM * mean + (1 - MOMENTUM) * slope, full_matrices=False)
        values = values / values.square().sum().sqrt()
        for _ in range(STEPS):
            values = a * values + b * values**3 + c * values**5
        turned = left @ torch.diag(values) @ right
        weight = (1 - RATE * DECAY) * weight - RATE * LIKE_ADAMW * max(weight.shape) ** 0.5 * turned
    return weight


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (3, 4, 9)])
def test_against_singular_values(shape: tuple[int, ...]) -> None:
    first, slopes = steps(shape, torch.float64)
    own = [torch.nn.Parameter(weight.clone()) for weight in first]
    optimizer = Muon([{"params": own, "matrices": True, "weight_decay": DECAY}], lr=RATE)
    for at, found in enumerate(moved(optimizer, own, slopes)):  # type: ignore[arg-type]
        each = first[at].reshape(-1, *shape[-2:])
        given = [step[at].reshape(-1, *shape[-2:]) for step in slopes]
        wanted = [naive(matrix, [slope[row] for slope in given]) for row, matrix in enumerate(each)]
        torch.testing.assert_close(found.reshape(-1, *shape[-2:]), torch.stack(wanted))


def test_against_torchs() -> None:
    """Which turns in bfloat16."""
    first, slopes = steps((16, 24), torch.float32)
    own, theirs = ([torch.nn.Parameter(weight.clone()) for weight in first] for _ in range(2))
    found = moved(Muon([{"params": own, "matrices": True, "weight_decay": DECAY}], lr=RATE), own, slopes)  # type: ignore[arg-type]
    other = torch.optim.Muon(theirs, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    wanted = moved(other, theirs, slopes)  # type: ignore[arg-type]
    for one, two, begin in zip(found, wanted, first, strict=True):
        assert (one - two).norm() < 0.02 * (two - begin).norm()


def test_the_rest_is_adamws() -> None:
    first, slopes = steps((7,), torch.float32)
    own, theirs = ([torch.nn.Parameter(weight.clone()) for weight in first] for _ in range(2))
    found = moved(Muon([{"params": own, "matrices": False, "weight_decay": DECAY}], lr=RATE), own, slopes)  # type: ignore[arg-type]
    wanted = moved(torch.optim.AdamW(theirs, lr=RATE, weight_decay=DECAY), theirs, slopes)  # type: ignore[arg-type]
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


@pytest.mark.parametrize("tied", [True, False])
def test_which_weights_are_matrices(tied: bool) -> None:
    """Every one of layers, experts too; neither embedding nor head, nor what has one dimension; and each once."""
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(**size, num_key_value_heads=1, num_local_experts=2, vocab_size=40, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    names = {id(weight): name for name, weight in model.named_parameters()}
    found = groups(model, {name for name in names.values() if "norm" not in name}, DECAY)
    rest = {names[id(weight)] for group in found if not group["matrices"] for weight in group["params"]}
    assert {name for name in rest if "norm" not in name} == (
        {"model.embed_tokens.weight"} if tied else {"model.embed_tokens.weight", "lm_head.weight"}
    )
    assert len(rest) == 5 + (1 if tied else 2)
    assert all(len({weight.shape for weight in group["params"]}) == 1 for group in found if group["matrices"])
    given = [id(weight) for group in found for weight in group["params"]]
    assert sorted(given) == sorted(names)
    for group in found:
        bare = all("norm" in names[id(weight)] for weight in group["params"])
        assert group["weight_decay"] == (0.0 if bare else DECAY)


def test_a_run_with_it_is_another_and_is_continued_to_the_last_digit(tmp_path: Path) -> None:
    data = tiny.tokens(tmp_path / "tokens")
    model = tiny.model(tmp_path / "model", data)

    def run(name: str, until_: Any = silent, **changes: Any) -> Path:
        adapt(AdaptOptions(str(model), tmp_path / name), of(**changes), until_)
        return tmp_path / name

    def of(**changes: Any) -> TrainingOptions:
        return training(data, 8, **{"valid": data, "eval_every": 4, "lr": 1e-2, "optimizer": "muon", **changes})

    whole, other = run("whole"), run("adamw", optimizer="adamw")
    assert log(whole) != log(other)
    with pytest.raises(Stop):
        run("parts", until(6))
    parts = run("parts")
    assert log(whole) == log(parts) and same(weights(whole), weights(parts))


@pytest.mark.parametrize("method", ["lora", "side"])
def test_refused(method: str, tmp_path: Path) -> None:
    data = tiny.tokens(tmp_path / "tokens")
    model = tiny.model(tmp_path / "model", data)
    with pytest.raises(LadderError, match=f"--optimizer muon is for --method full, not for {method}"):
        options = training(data, 8, optimizer="muon")
        adapt(AdaptOptions(str(model), tmp_path / "out", method=method), options, silent)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes, message", [
    ({"optimizer": "sgd"}, "unknown optimizer 'sgd': known are adamw, muon"),
    ({"optimizer": "muon", "fsdp": True}, "--optimizer muon needs whole matrices, which --fsdp takes apart"),
])  # fmt: skip
def test_refused_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LadderError, match=message):
        TrainingOptions(**changes)
