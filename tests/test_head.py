"""A loss in the place of a model's head: the same runs, of which no tensor is as large as all logits."""

import json
import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    Qwen3Config,
)

from ladder.hf import rewire
from ladder.train import log as told
from ladder.train.distill import adapt
from ladder.train.head import Head, Logits
from ladder.train.head import logits as module
from ladder.train.log import operations
from ladder.train.loss import LossWeights, distillation_loss, next_tokens
from ladder.train.side import SideConfig, SideModel
from tests import training as tiny
from tests.tolerance import backward
from tests.training import BATCH, SEQ_LEN, VOCABULARY, adapting, distilling, log, silent, weights

STEPS = 4
CHUNK = 5  # tokens, which divide no batch


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes logits whole, as those of families that change them are."""
    return lambda: monkeypatch.setattr(Head, "_reason", lambda self, run, tokens: "a test wants it")


class Seen(TorchDispatchMode):
    """The most tokens whose logits are together in one tensor, and how many numbers were read from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = self.reads = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and each.dim() and each.shape[-1] == VOCABULARY:
                self.tokens = max(self.tokens, each.numel() // VOCABULARY)
        return found


@pytest.mark.parametrize("more", [{}, {"method": "side"}, {"teacher_top": 3}, {"lm_weight": 0.5, "hidden_weight": 0.5}])
def test_logits_are_never_whole(
    more: dict[str, Any], model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any
) -> None:
    """Neither in training nor in evaluation, of student or teacher, nor their gradient, nor while a teacher's cache is
    built; where they are, it is seen.
    """
    monkeypatch.setattr(module, "CHUNK_LOGITS", CHUNK * VOCABULARY)
    options = adapting(data, 2, eval_every=2)
    with Seen() as seen:
        adapt(distilling(model, tmp_path / "out", **more), options, silent)
    width = 32  # the transposed weight of the head
    assert CHUNK <= seen.tokens <= max(CHUNK, width) < BATCH * SEQ_LEN
    whole()
    with Seen() as seen:
        adapt(distilling(model, tmp_path / "whole", **more), options, silent)
    assert seen.tokens == BATCH * SEQ_LEN


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kl": ({}, {"micro_batch_size": 2}),
    "both": ({"lm_weight": 0.5}, {"recompute": True}),
    "text": ({"kl_weight": 0.0, "lm_weight": 1.0}, {}),
    "streams": ({"hidden_weight": 1.0}, {}),
    "top": ({"teacher_top": 4}, {}),
    "sampled": ({"on_policy": 0.5, "on_policy_prompt": 4}, {}),
    "layers": ({"method": "layers", "wiring": "standard:1 ladder:2"}, {}),
    "lora": ({"method": "lora"}, {}),
    "side": ({"method": "side", "reduction": 1}, {}),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_those_of_whole_logits(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any
) -> None:
    monkeypatch.setattr(module, "CHUNK_LOGITS", 24 * VOCABULARY)
    own, changes = RUNS[name]
    tied = name in ("kl", "text", "layers", "side")
    original = tiny.model(tmp_path / "model", data, tie_word_embeddings=tied)
    options = adapting(data, STEPS, eval_every=2, log_every=1, **changes)
    for out in ("fused", "whole"):
        adapt(distilling(original, tmp_path / out, **own), options, silent)
        whole()
    keys = ("loss", "grad_norm", "eval_loss", *([] if name in ("text", "top") else ["eval_kl", "eval_agreement"]))
    for key in keys:
        found, wanted = log(tmp_path / "fused", key), log(tmp_path / "whole", key)
        assert len(found) == (STEPS if key in ("loss", "grad_norm") else STEPS // 2)
        size = max(1.0, *(value for _, value in wanted))
        assert [value for _, value in found] == pytest.approx(
            [value for _, value in wanted], abs=size * tiny.nats(STEPS)
        )
    if name not in ("side", "lora"):
        tiny.assert_moved_alike(weights(tmp_path / "fused"), weights(tmp_path / "whole"), options.lr, STEPS)


@pytest.mark.usefixtures("without_onednn")
def test_half_precision(data: Path, tmp_path: Path, whole: Any) -> None:
    """By autocast, of weights in float32: products of bfloat16 give the same loss, in float32, to the bit."""
    original = tiny.model(tmp_path / "model", data, tie_word_embeddings=True)
    for out in ("fused", "whole"):
        options = adapting(data, STEPS, dtype="bfloat16", log_every=1)
        adapt(distilling(original, tmp_path / out, lm_weight=0.5, staleness=0.0), options, silent)
        whole()
    found, wanted = ([value for _, value in log(tmp_path / out)] for out in ("fused", "whole"))
    assert found[0] == pytest.approx(wanted[0], rel=1e-5) and found == pytest.approx(wanted, rel=0.02)


# --- families ---------------------------------------------------------------------------------------------------------

SIZE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, tuple[Any, bool]] = {
    "qwen3": (Qwen3Config(**SIZE, tie_word_embeddings=True), True),
    "gpt2": (GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4), True),  # with dropout
    "gemma2": (Gemma2Config(**SIZE, final_logit_softcapping=2.0), False),
    "gemma2 uncapped": (Gemma2Config(**SIZE, final_logit_softcapping=None), True),
    "granite": (GraniteConfig(**SIZE, logits_scaling=8.0), False),
    "cohere": (
        CohereConfig(**{key: value for key, value in SIZE.items() if key != "head_dim"}, logit_scale=0.25),
        False,
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_change_their_logits(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Their logits are computed whole, which is told once; the loss is that of the model's own logits anyway."""
    config, fused = FAMILIES[name]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    tokens, head, kinds = torch.randint(0, VOCABULARY, (2, 7)), Head(model), []
    targets, draws = next_tokens(tokens).flatten(), torch.get_rng_state()

    def use(logits: Tensor | Logits) -> Tensor:
        kinds.append(type(logits))
        return distillation_loss(logits, None, targets, LossWeights(0.0, 1.0))

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            torch.set_rng_state(draws)
            model.zero_grad()
            _, loss = head.apply(lambda tokens: model(input_ids=tokens, use_cache=False), tokens, use)
            loss.backward()
    assert kinds == 2 * [Logits if fused else Tensor] and model.training
    told = [record.getMessage() for record in caplog.records if "computed whole" in record.getMessage()]
    assert len(told) == (0 if fused else 1) and all("changes what the head returns" in each for each in told)
    found = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    torch.set_rng_state(draws)
    logits = model(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
    wanted = F.cross_entropy(logits, targets, ignore_index=-100)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)  # the loss is float32
    for one, weight in zip(found, model.parameters(), strict=True):
        assert one is not None and weight.grad is not None
        size = max(1.0, float(weight.grad.abs().max()))
        assert (one - weight.grad).abs().max() <= backward(2, 128, 14, torch.float64) * size


def test_heads_of_another_kind(caplog: pytest.LogCaptureFixture) -> None:
    class Louder(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = AutoModelForCausalLM.from_config(tiny.config())
    model.lm_head = Louder(32, VOCABULARY, bias=False)
    tokens = torch.randint(0, VOCABULARY, (1, 4))
    with caplog.at_level(logging.WARNING):
        _, logits = Head(model).logits(lambda tokens: model(input_ids=tokens), tokens)
    assert isinstance(logits, Tensor) and "its head is Louder" in caplog.text
    torch.testing.assert_close(logits, model(input_ids=tokens).logits.flatten(0, 1))


def test_a_model_is_left_as_it_was() -> None:
    """By passes that fail, too."""
    model = SideModel(rewire(AutoModelForCausalLM.from_config(tiny.config()), "ladder"), SideConfig(reduction=4))
    tokens, module = torch.randint(0, VOCABULARY, (1, 4)), model.backbone.lm_head
    head = Head(model)
    _, logits = head.logits(lambda tokens: model(input_ids=tokens), tokens)

    def fails(logits: Tensor | Logits) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        head.apply(lambda tokens: model(input_ids=tokens), tokens, fails)
    assert not module._forward_hooks and not module._forward_pre_hooks
    assert isinstance(logits, Logits) and logits.shape == (4, VOCABULARY)
    torch.testing.assert_close(logits[:], model(input_ids=tokens).logits.flatten(0, 1))


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, torch shards there")
@pytest.mark.parametrize("fsdp", [False, True])
def test_ranks_adapt_as_one_does(fsdp: bool, data: Path, tmp_path: Path) -> None:
    """A tied head, in three passes a step: a third is no number of bfloat16."""
    original = tiny.model(tmp_path / "model", data, tie_word_embeddings=True)
    options = adapting(data, STEPS, batch=6, log_every=1, tokens=STEPS * 6 * SEQ_LEN, micro_batch_size=1)
    one, two = (distilling(original, tmp_path / name, lm_weight=0.5) for name in ("one", "two"))
    adapt(one, options, silent)
    ranks = tiny.start("adapt", two, replace(options, fsdp=fsdp), ranks=2)
    assert tiny.end(ranks) == [0, 0]
    for key in ("loss", "eval_loss", "eval_kl", "grad_norm"):
        found, wanted = ([value for _, value in log(each.out, key)] for each in (two, one))
        assert found == pytest.approx(wanted, abs=max(1.0, *wanted) * tiny.nats(STEPS)), key
    tiny.assert_moved_alike(weights(two.out), weights(one.out), options.lr, STEPS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, torch shards there")
@pytest.mark.usefixtures("without_onednn")
def test_sharded_half_precision_has_a_loss_in_float32(data: Path, tmp_path: Path) -> None:
    original = tiny.model(tmp_path / "model", data)
    sharded, one = (distilling(original, tmp_path / name, staleness=0.0) for name in ("sharded", "one"))
    options = adapting(data, 2, dtype="bfloat16", log_every=1, eval_every=2)
    assert tiny.end(tiny.start("adapt", sharded, replace(options, fsdp=True), ranks=2)) == [0, 0]
    adapt(one, options, silent)
    found, wanted = ([value for _, value in log(each.out)] for each in (sharded, one))
    assert found == pytest.approx(wanted, rel=0.02)
    assert any(torch.tensor(value).bfloat16().item() != value for value in found)


# --- speed ------------------------------------------------------------------------------------------------------------


def test_a_step_waits_for_nothing(model: Path, data: Path, tmp_path: Path) -> None:
    """No number is read from a tensor in a step that is not logged, but for those of transformers' masks, one for every
    forward pass, and those that AdamW has on the CPU, of each weight's steps.
    """
    reads: list[int] = []
    with Seen() as seen:

        def progress(done: int, total: int, what: str) -> None:
            reads.append(seen.reads)

        adapt(distilling(model, tmp_path / "out"), adapting(data, 12, log_every=12, eval_every=12), progress)
    steps = [after - before for before, after in pairwise(reads[2:-2])]
    count = len(weights(model))
    assert len(steps) >= 6 and all(each <= 2 + count for each in steps)  # of student and teacher


@pytest.mark.parametrize("cached", [False, True])
def test_the_originals_pass_counts_where_there_is_one(
    cached: bool, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(told, "peak", lambda device: 1e12)
    options = distilling(model, tmp_path / "out", teacher_top=3 * cached)
    adapt(options, adapting(data, 2, log_every=1), silent)
    student = operations(AutoModelForCausalLM.from_pretrained(model), SEQ_LEN)
    wanted = student * (1 if cached else 4 / 3)  # a forward pass is a third of a step of training
    lines = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    found = [line for line in lines if "mfu" in line]
    assert len(found) == 2
    for line in found:
        assert line["mfu"] == pytest.approx(line["tokens_per_s"] * wanted / 1e12, abs=1e-4)


def test_operations_of_a_teacher() -> None:
    model = AutoModelForCausalLM.from_config(tiny.config())
    trained = operations(model, 64)
    assert operations(model.requires_grad_(False), 64) == pytest.approx(trained / 3)
