"""ladder adapt --on-policy: the last steps are on text that the model samples itself."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.wire import layers_of
from ladder.train.distill import adapt
from ladder.train.loss import IGNORED, LossWeights, distillation_loss
from ladder.train.options import AdaptOptions
from ladder.train.stages.on_policy import OnPolicy
from tests import training as tiny
from tests.tolerance import summed
from tests.training import SEQ_LEN, Stop, adapting, distilling, log, same, silent, until, weights

PROMPT = 4


def stage(first: int = 0, reverse: float = 0.5) -> OnPolicy:
    return OnPolicy(first, PROMPT, LossWeights(1.0, 0.0, reverse=reverse, targets_only=True), 1)


def prompts(count: int = 3) -> Tensor:
    return torch.randint(1, tiny.VOCABULARY, (count, SEQ_LEN), generator=torch.Generator().manual_seed(2))


def on_policy(model: Path, out: Path, **changes: Any) -> AdaptOptions:
    """At once under the wiring, and then on its own text."""
    return distilling(model, out, **{"staleness": 0.0, "on_policy": 0.5, "on_policy_prompt": PROMPT, **changes})


# --- the text -------------------------------------------------------------------------------------------------------


def test_what_is_sampled(model: Path) -> None:
    """Token for token what whole passes without a cache and the same random numbers give; the model stays as it was."""
    student = rewire(AutoModelForCausalLM.from_pretrained(model), "standard:1 ladder:2").train()
    found = stage().sampled(student, prompts(), stage().generator(7, 0, torch.device("cpu")))
    generator, wanted = stage().generator(7, 0, torch.device("cpu")), prompts()[:, :PROMPT]
    draws = torch.rand(len(wanted), SEQ_LEN - PROMPT, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        student.eval()
        for draw in draws.unbind(1):
            probs = student(input_ids=wanted, use_cache=False).logits[:, -1].double().softmax(-1)
            wanted = torch.cat([wanted, (probs.cumsum(-1) <= draw[:, None]).sum(-1, keepdim=True)], 1)
        student.train()
    assert torch.equal(found, wanted) and student.training
    assert all(weight.grad is None and weight.requires_grad for weight in student.parameters())


def test_a_model_without_a_cache_reads_all_of_its_text(model: Path) -> None:
    student = rewire(AutoModelForCausalLM.from_pretrained(model), "ladder").eval()

    def uncached(input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=student(input_ids=input_ids, use_cache=False).logits)

    uncached.device = student.device  # type: ignore[attr-defined]
    uncached.training, uncached.eval, uncached.train = False, lambda: None, lambda _: None  # type: ignore[attr-defined]
    drawn = [
        stage().sampled(each, prompts(), stage().generator(7, 0, torch.device("cpu"))) for each in (student, uncached)
    ]
    assert torch.equal(*drawn)


def test_compiled_layers_are_not_compiled_for_every_length(model: Path) -> None:
    """They run as they are written, and as they were compiled before and after."""
    student = rewire(AutoModelForCausalLM.from_pretrained(model), "ladder").eval()
    wanted = stage().sampled(student, prompts(), stage().generator(1, 0, torch.device("cpu")))
    graphs: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for layer in layers_of(student):
        layer.compile(dynamic=False, backend=backend)
    with torch.no_grad():
        student(input_ids=prompts(), use_cache=False)
    before = len(graphs)
    found = stage().sampled(student, prompts(), stage().generator(1, 0, torch.device("cpu")))
    assert before > 0 and len(graphs) == before and torch.equal(found, wanted)
    with torch.no_grad():
        student(input_ids=prompts(), use_cache=False)
    assert len(graphs) == before
    torch.compiler.reset()


def test_random_numbers_of_a_step_and_a_rank() -> None:
    drawn = {
        (step, rank): torch.rand(3, generator=stage().generator(step, rank, torch.device("cpu"))).tolist()
        for step in range(4)
        for rank in range(2)
        for _ in range(2)
    }
    assert len({tuple(values) for values in drawn.values()}) == 8
    again = torch.rand(3, generator=stage().generator(3, 1, torch.device("cpu"))).tolist()
    assert again == drawn[3, 1]


def test_frequencies(model: Path) -> None:
    """At temperature 1: as often as the model's own probabilities say."""
    student = AutoModelForCausalLM.from_pretrained(model).eval()
    with torch.no_grad():
        for weight in student.parameters():
            weight.mul_(0.7)  # else some tokens are nearly certain
        first = prompts(1)[:, : PROMPT + 1].repeat(4000, 1)
        wanted = student(input_ids=first[:1, :PROMPT]).logits[0, -1].softmax(-1)
    drawn = stage().sampled(student, first, stage().generator(1, 0, torch.device("cpu")))[:, -1]
    found = torch.bincount(drawn, minlength=len(wanted)) / len(drawn)
    assert (found - wanted).abs().max() < 5 * float((wanted * (1 - wanted) / len(drawn)).sqrt().max())


def test_which_positions_count() -> None:
    """Those whose next token was sampled."""
    tokens = prompts(2)
    found = stage().targets(tokens)
    assert found[:, : PROMPT - 1].eq(IGNORED).all() and found[:, -1].eq(IGNORED).all()
    assert torch.equal(found[:, PROMPT - 1 : -1], tokens[:, PROMPT:])


# --- the loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("some", [False, True])
def test_reverse_kl_and_its_gradient(reverse: float, some: bool) -> None:
    """Against autograd over the formula; of the positions with a target, or of all."""
    draw = torch.Generator().manual_seed(3)
    ours, theirs = (3 * torch.randn(14, 37, generator=draw, dtype=torch.float64) for _ in range(2))
    targets = torch.randint(0, 37, (14,), generator=draw).where(torch.arange(14) % 3 > 0, IGNORED)
    one, other = (ours.clone().requires_grad_() for _ in range(2))
    given = LossWeights(0.7, 0.0, reverse=reverse, targets_only=some)
    found = distillation_loss(one, theirs, targets, given)
    s, t = other.log_softmax(-1), theirs.log_softmax(-1)
    each = reverse * (s.exp() * (s - t)).sum(-1) + (1 - reverse) * (t.exp() * (t - s)).sum(-1)
    wanted = 0.7 * each[targets != IGNORED].mean() if some else 0.7 * each.mean()
    found.backward()
    wanted.backward()
    assert one.grad is not None and other.grad is not None
    largest = 2 * float((s - t).detach().abs().max())
    assert (one.grad - other.grad).abs().max() <= summed(37 + 8, torch.float64, largest)
    assert abs(found.item() - wanted.item()) <= summed(3, torch.float32, wanted.item())
    if some:
        assert not one.grad[targets == IGNORED].any() and one.grad[targets != IGNORED].any()


def test_what_the_model_rules_out_adds_nothing() -> None:
    ours, theirs = torch.zeros(2, 4), torch.ones(2, 4)
    ours[:, 1] = -torch.inf
    ours.requires_grad_()
    found = distillation_loss(ours, theirs, torch.tensor([0, 2]), LossWeights(1.0, 0.0, reverse=1.0))
    found.backward()
    assert found.isfinite() and ours.grad is not None and ours.grad.isfinite().all()


# --- runs -----------------------------------------------------------------------------------------------------------


def reverse_kl(student: Any, original: Any) -> float:
    """Of the model's own text, many sequences of it."""
    text = stage().sampled(student, prompts(64), torch.Generator().manual_seed(5))
    with torch.no_grad():
        s, t = (each.eval()(input_ids=text).logits[:, PROMPT - 1 : -1].log_softmax(-1) for each in (student, original))
    return float((s.exp() * (s - t)).sum(-1).mean())


def test_it_lowers_the_reverse_kl_of_its_own_text(model: Path, data: Path, tmp_path: Path) -> None:
    options = on_policy(model, tmp_path / "out", on_policy=1.0, reverse_kl=1.0)
    found = adapt(options, adapting(data, 40, lr=3e-3), silent)
    original, begun = AutoModelForCausalLM.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    before = reverse_kl(rewire(begun, "ladder"), original)
    after = reverse_kl(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), original)
    losses = [value for _, value in log(tmp_path / "out")]
    assert after < 0.7 * before and losses[-1] < 0.8 * losses[0] and found["eval_kl"] > 0
    assert losses[0] == pytest.approx(before, rel=0.3)  # of other sequences
    assert [value for _, value in log(tmp_path / "out", "on_policy")] == [1.0] * 20


@pytest.mark.parametrize("method, more", [
    ("full", {}), ("layers", {"micro_batch_size": 2}), ("lora", {"recompute": True}),
])  # fmt: skip
def test_stopped_and_continued(method: str, more: dict[str, Any], model: Path, data: Path, tmp_path: Path) -> None:
    """In the middle of the stage: the log and the weights of a run that was not stopped."""
    outs, run = (tmp_path / "whole", tmp_path / "parts"), adapting(data, 8, eval_every=8, save_every=2, **more)
    own = [on_policy(model, out, method=method) for out in outs]
    adapt(own[0], run, silent)
    with pytest.raises(Stop):
        adapt(own[1], run, until(7))
    adapt(own[1], run, silent)
    assert log(outs[0]) == log(outs[1]) and same(weights(outs[0]), weights(outs[1]))
    assert [value for _, value in log(outs[0], "on_policy")] == [0.0, 0.0, 1.0, 1.0]


def test_lines_with_steps_of_both_kinds(model: Path, data: Path, tmp_path: Path) -> None:
    """After a staleness that rose, with the text's loss before; the line between says how many."""
    options = on_policy(model, tmp_path / "out", staleness=0.5, lm_weight=0.5, on_policy=0.4)
    adapt(options, adapting(data, 10, log_every=4), silent)
    lines = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    assert [(line["step"], line["on_policy"]) for line in lines] == [(4, 0.0), (8, 0.5), (10, 1.0)]
    assert [line["staleness"] for line in lines] == [0.8, 1.0, 1.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, ranks want one each")
def test_two_ranks_sample_each_their_own(model: Path, data: Path, tmp_path: Path) -> None:
    """DDP: it runs, learns, and does so again."""
    run = adapting(data, 8, micro_batch_size=2)
    for name in ("one", "two"):
        assert tiny.end(tiny.start("adapt", on_policy(model, tmp_path / name), run, ranks=2)) == [0, 0]
    assert log(tmp_path / "one") == log(tmp_path / "two")
    assert [value for _, value in log(tmp_path / "one", "on_policy")][-1] == 1.0


@pytest.mark.parametrize("changes, message", [
    ({"teacher_top": 4}, "--on-policy needs the original in memory, to read new text: leave out --teacher-top"),
    ({"method": "side"}, "--on-policy is for methods that train the model itself, not for side"),
    ({"kl_weight": 0.0, "lm_weight": 1.0}, "--on-policy needs a --kl-weight above 0"),
    ({"staleness": 0.7}, "--on-policy 0.5 begins before staleness has risen, in 0.7 of the steps"),
    ({"on_policy": 1.5}, "on-policy must be from 0 to 1, not 1.5"),
    ({"reverse_kl": -0.5}, "reverse-kl must be from 0 to 1, not -0.5"),
    ({"on_policy_prompt": 0}, "on-policy-prompt must be at least 1, not 0"),
    ({"on_policy": 0.0, "reverse_kl": 1.0}, "--reverse-kl and --on-policy-prompt are for --on-policy: give a share"),
])  # fmt: skip
def test_refused_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LadderError, match=message):
        AdaptOptions("model", Path("out"), **{"on_policy": 0.5, **changes})


@pytest.mark.parametrize("options, training, message", [
    ({"on_policy_prompt": SEQ_LEN}, {}, "--on-policy-prompt 16 leaves nothing to sample of 16 tokens"),
    ({"on_policy_prompt": None}, {}, "--on-policy-prompt 64 leaves nothing to sample of 16 tokens"),
    ({}, {"fsdp": True}, "--on-policy samples token by token, and --fsdp would gather all weights for each"),
])  # fmt: skip
def test_refused(
    options: dict[str, Any], training: dict[str, Any], message: str, model: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(LadderError, match=message):
        adapt(on_policy(model, tmp_path / "out", **options), adapting(data, 4, **training), silent)
    assert not (tmp_path / "out").exists()
