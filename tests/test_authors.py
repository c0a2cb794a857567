"""Parallel and desync as the paper's authors have them: the native engine, the oracle and transformers against them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ladder.comm.emulated import World
from ladder.config import ModelConfig
from ladder.hf import rewire
from ladder.kernels.launch import References
from tests import authors, oracle
from tests.hosts import BACKWARD, LAYERS, host
from tests.test_fused import PROMPT, forward_logits
from tests.test_hf import close, loss_and_gradients, tokens
from tests.test_hf_ranks import ANGLES, float64_norm
from tests.test_parity import assert_close, ours, some_tokens
from tests.weights import draw, tiny

DESYNC = ((3, 4), (4, 3), (5, 4), (7, 2))  # every how many sub-blocks, and layers: none divides their sub-blocks


def model_of(config: ModelConfig, weights: dict[str, Tensor]) -> authors.Model:
    sizes = authors.Sizes(config.layers, config.heads, config.kv_heads, config.norm_eps, config.rope.theta)
    return authors.Model(sizes, {name: weight.double() for name, weight in weights.items()})


def parallel_case() -> tuple[ModelConfig, dict[str, Tensor]]:
    config = tiny(4, shared_norm=True).rewired("parallel")
    weights = draw(config)
    assert not any("post_attention" in name for name in weights)
    return config, weights


@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_parallel_with_one_norm(worlds: dict[int, World], ranks: int) -> None:
    """Plain layers, and the backends' one product for prompts and for single tokens."""
    (config, weights), ids = parallel_case(), some_tokens(length=PROMPT + 2)
    expected = authors.parallel(model_of(config, weights), ids)
    assert_close(oracle.logits(config, weights, ids, ("parallel",) * 4, ranks), expected)
    assert_close(ours(worlds[ranks], config, weights, ids), expected)
    for found in worlds[ranks].run(lambda comm: forward_logits(config, weights, ids, References(), comm)):
        assert_close(found, expected[:, PROMPT - 1 :])


def test_two_norms_are_another_model() -> None:
    """Unequal gains: the comparison above notices which norm the MLP reads through, and that it reads the same."""
    (config, weights), ids = parallel_case(), some_tokens()
    expected = authors.parallel(model_of(config, weights), ids)
    two = tiny(4).rewired("parallel")
    other = oracle.logits(two, {**draw(two), **weights}, ids, ("parallel",) * 4, 1)
    assert (other - expected).abs().max() > 0.1
    sequential = oracle.logits(config, weights, ids, ("standard",) * 4, 1)
    assert (sequential - expected).abs().max() > 0.1


@pytest.mark.parametrize("ranks", (1, 2, 4))
@pytest.mark.parametrize("every, layers", DESYNC)
def test_the_last_mlp_reduces(worlds: dict[int, World], every: int, layers: int, ranks: int) -> None:
    config, ids, name = tiny(layers).rewired(f"desync-{every}x"), some_tokens(), f"desync-{every}x"
    weights = draw(config)
    expected = authors.desync(model_of(config, weights), ids, every, ranks)
    assert_close(oracle.logits(config, weights, ids, (name,) * layers, ranks), expected)
    assert_close(ours(worlds[ranks], config, weights, ids), expected)
    ended = oracle.logits(config, weights, ids, (f"{name}-local",) * layers, ranks)
    if ranks == 1:
        assert_close(ended, expected)
    else:
        assert (ended - expected).abs().max() > 0.1  # so it was before
        local = config.rewired(f"{name}-local")
        assert_close(ours(worlds[ranks], local, weights, ids), ended)


def in_transformers(
    monkeypatch: pytest.MonkeyPatch, text: str, ranks: int, expected: Callable[[authors.Model], Tensor], **more: Any
) -> Tensor:
    """Logits and gradients of transformers' Llama under a wiring; returns the logits."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", float64_norm)
    model = host("llama", attn_implementation="sdpa", **more).double()
    rewire(model, text, ranks=ranks)
    config = ModelConfig.from_hf({**model.config.to_dict(), "wiring": text})
    weights = {name: weight.detach().clone().requires_grad_(True) for name, weight in model.state_dict().items()}
    theirs = expected(authors.Model(model_of(config, {}).sizes, weights))
    logits = model(tokens()).logits
    assert close(logits, theirs, ANGLES)
    loss_and_gradients(torch.nn.ParameterList(weights.values()), theirs)
    ours_ = loss_and_gradients(model, logits)
    assert ours_.keys() == weights.keys()
    for name, weight in weights.items():
        assert weight.grad is not None and close(ours_[name], weight.grad, BACKWARD), name
    return logits


@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_parallel_with_one_norm_in_transformers(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    in_transformers(monkeypatch, "parallel", ranks, partial(authors.parallel, tokens=tokens()), shared_norm=True)


@pytest.mark.parametrize("every", (3, 5, 7))
def test_the_last_mlp_reduces_in_transformers(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    assert 2 * LAYERS % every

    def of(ranks: int) -> Tensor:
        expected = partial(authors.desync, tokens=tokens(), every=every, ranks=ranks)
        return in_transformers(monkeypatch, f"desync-{every}x", ranks, expected)

    found = of(2), of(4)
    assert (found[0] - found[1]).abs().max() > 1e-2
