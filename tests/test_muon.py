"""Muon: its steps against singular values in float64 and against torch's own, which weights it takes, runs with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig

from ladder.errors import LadderError
from ladder.train import muon as module
from ladder.train.distill import adapt
from ladder.train.muon import MOMENTUM, NEWTON_SCHULZ, SIZE, STEPS, Muon, groups, muon
from ladder.train.options import ScratchOptions, TrainingOptions
from ladder.train.scratch import train
from ladder.train.trainer import arguments
from tests import training as tiny
from tests.training import Stop, distilling, log, same, silent, training, until, weights

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
        weight = (1 - RATE * DECAY) * weight - RATE * SIZE * max(weight.shape) ** 0.5 * turned
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


@pytest.mark.usefixtures("without_onednn")
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


@pytest.mark.parametrize("at_once, most", [(1, 1), (59, 1), (60, 2), (1 << 28, 2)])
def test_how_many_at_a_time_changes_nothing(at_once: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do weights without a gradient, among others or alone."""
    together = []

    def orthogonal(x: Tensor) -> Tensor:
        together.append(len(x))
        return turn(x)

    turn = module.orthogonal
    monkeypatch.setattr(module, "orthogonal", orthogonal)
    first, slopes = steps((5, 6), torch.float64)
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    own = [torch.nn.Parameter(weight.clone()) for weight in [*first, *first]]
    bare = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = Muon([{"params": own, "matrices": True, "weight_decay": DECAY}, {"params": [bare], "matrices": True}])
    for group in optimizer.param_groups:
        group["lr"] = RATE
    moved(optimizer, own[:2], slopes)  # type: ignore[arg-type]
    for at in range(2):
        torch.testing.assert_close(own[at].detach(), naive(first[at], [step[at] for step in slopes]))
        assert torch.equal(own[2 + at], first[at])
    assert torch.equal(bare, torch.ones(2, 3)) and set(together) == {most}


def test_who_saw_nothing_stays() -> None:
    """An expert without tokens has a gradient of zero, and a mean of what it once had, which orth would make large."""
    first, slopes = steps((3, 4, 5), torch.float64, 2)
    own = [torch.nn.Parameter(weight.clone()) for weight in first]
    optimizer = Muon([{"params": own, "matrices": True, "weight_decay": 0.0}], lr=RATE)
    moved(optimizer, own, slopes[:1])  # type: ignore[arg-type]
    before = own[0].detach().clone()
    slopes[1][0][1] = 0
    moved(optimizer, own, slopes[1:])  # type: ignore[arg-type]
    stayed = [torch.equal(own[0][expert], before[expert]) for expert in range(3)]
    assert stayed == [False, True, False]


def test_a_closure_comes_first() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = Muon([{"params": [weight], "matrices": True, "weight_decay": 0.0}], lr=RATE)

    def closure() -> Tensor:
        loss = (weight * torch.arange(6.0).reshape(2, 3)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert optimizer.step(closure) == 15.0 and not torch.equal(weight, torch.ones(2, 3))


# --- whose weights --------------------------------------------------------------------------------------------------


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


def test_positions_are_an_embedding_and_frozen_weights_nobodys() -> None:
    model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=16, vocab_size=40))
    model.transformer.h[0].mlp.requires_grad_(False)
    names = {id(weight): name for name, weight in model.named_parameters()}
    found = groups(model, set(), DECAY)
    turned = {names[id(weight)] for group in found if group["matrices"] for weight in group["params"]}
    assert turned == {"transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_proj.weight"}
    assert not any("mlp" in names[id(weight)] for group in found for weight in group["params"])


def test_by_the_arguments_of_transformers(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(tiny.config())
    names = {id(weight): name for name, weight in model.named_parameters()}
    args = arguments(training(tmp_path, 8, lr=0.5, beta2=0.75, weight_decay=0.25, optimizer="muon"), tmp_path)
    found = muon(model, {name for name in names.values() if "norm" not in name}, args)
    for group in found.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.9, 0.75), args.adam_epsilon)
        bare = all("norm" in names[id(weight)] for weight in group["params"])
        assert group["weight_decay"] == (0.0 if bare else 0.25)


# --- runs -----------------------------------------------------------------------------------------------------------


def test_a_run_with_it_is_another_and_is_continued_to_the_last_digit(tmp_path: Path) -> None:
    data = tiny.tokens(tmp_path / "tokens")
    model = tiny.model(tmp_path / "model", data)

    def run(name: str, until_: Any = silent, **changes: Any) -> Path:
        adapt(distilling(model, tmp_path / name), of(**changes), until_)
        return tmp_path / name

    def of(**changes: Any) -> TrainingOptions:
        return training(data, 8, **{"valid": data, "eval_every": 4, "lr": 1e-2, "optimizer": "muon", **changes})

    whole, other = run("whole"), run("adamw", optimizer="adamw")
    assert log(whole) != log(other) and log(whole) != log(run("decayed", weight_decay=5.0))
    with pytest.raises(Stop):
        run("parts", until(6))
    parts = run("parts")
    assert log(whole) == log(parts) and same(weights(whole), weights(parts))


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, ranks want one each")
def test_two_ranks_train_as_one_does(tmp_path: Path) -> None:
    data = tiny.tokens(tmp_path / "tokens")
    run = training(data, 8, valid=data, optimizer="muon")
    train(ScratchOptions(tmp_path / "one", size="tiny"), run, silent)
    assert tiny.end(tiny.start("train", ScratchOptions(tmp_path / "two", size="tiny"), run, ranks=2)) == [0, 0]
    for key in ("loss", "eval_loss", "grad_norm"):
        found, wanted = log(tmp_path / "two", key), log(tmp_path / "one", key)
        assert [value for _, value in found] == pytest.approx(
            [value for _, value in wanted], abs=tiny.nats(8, tiny.TINY)
        )
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    tiny.assert_moved_alike(one, two, run.lr, run.steps, tiny.TINY)


@pytest.mark.parametrize("method", ["lora", "side"])
def test_refused(method: str, tmp_path: Path) -> None:
    data = tiny.tokens(tmp_path / "tokens")
    model = tiny.model(tmp_path / "model", data)
    with pytest.raises(LadderError, match=f"--optimizer muon is for --method full and layers, not for {method}"):
        options = training(data, 8, optimizer="muon")
        adapt(distilling(model, tmp_path / "out", method=method), options, silent)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes, message", [
    ({"optimizer": "sgd"}, "unknown optimizer 'sgd': known are adamw, muon"),
    ({"optimizer": "muon", "fsdp": True}, "--optimizer muon needs whole matrices, which --fsdp takes apart"),
])  # fmt: skip
def test_refused_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LadderError, match=message):
        TrainingOptions(**changes)
