"""The side network: what it learns and what that costs; generation, Trainer and lm-eval with it."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from ladder.hf import rewire, set_staleness
from ladder.hf.harness import Harness
from ladder.hf.measures import distance
from ladder.train.side import SideConfig, SideModel
from tests.checkpoints import byte_tokenizer, tiny
from tests.hosts import FORWARD, LAYERS, host
from tests.test_hf import close, tokens
from tests.test_side import WIDE, beside, bits, divergence, same

# --- what it learns, and what that costs -----------------------------------------------------------------------------


def test_gives_back_what_the_rewiring_has_cost() -> None:
    teacher, ids = host("llama", **WIDE), tokens(8, 16)
    backbone = rewire(copy.deepcopy(teacher), "ladder")
    with torch.no_grad():
        source = teacher(ids).logits
        lost = float(divergence(source, backbone(ids).logits))
    assert lost > 0.5
    before = bits(backbone)
    torch.manual_seed(0)
    model = SideModel(backbone, SideConfig(reduction=2)).train()
    gates = model.network.gates.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(30):
        loss = divergence(source, model(ids).logits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        assert float(divergence(source, model(ids).logits)) < 0.25 * lost
    assert same(bits(backbone), before) and all(p.grad is None for p in backbone.parameters())
    assert not torch.equal(model.network.gates, gates)
    found = distance(model, teacher, ids[0], window=16)  # our measures take it for a model
    assert found.kl.value < 0.5 * distance(backbone, teacher, ids[0], window=16).kl.value
    assert model.training and not backbone.training


def saved(run: Callable[[], Any]) -> list[Tensor]:
    """What autograd keeps for the backward pass: once per place in memory."""
    found: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        found.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run()
    return list(found.values())


def test_no_graph_through_the_backbone() -> None:
    """Nothing of a layer of the backbone is kept: of its width, one normalized stream per layer that is read."""
    full = rewire(host("llama", **WIDE), "ladder")
    kept = saved(lambda: full(tokens(), labels=tokens()).loss)
    wide = [each for each in kept if each.numel() == 22 * 64]
    counts = {}
    for every in (1, 2, 4):
        model = beside(config=SideConfig(4, every), **WIDE)
        model.backbone.requires_grad_(True)  # even if somebody thaws it
        modes: list[bool] = []
        watched = [*model.backbone.model.layers, model.backbone.model.norm, model.backbone.lm_head]
        for module in watched:
            module.register_forward_hook(lambda *_, modes=modes: modes.append(torch.is_grad_enabled()))
        ours = saved(lambda model=model: model(tokens(), labels=tokens()).loss)  # type: ignore[misc]
        assert modes == [False] * LAYERS + [True, True]
        layers = {p.untyped_storage().data_ptr() for p in model.backbone.model.layers.parameters()}
        assert not layers & {each.untyped_storage().data_ptr() for each in ours}
        counts[every] = len([each for each in ours if each.numel() == 22 * 64])
        model(tokens(), labels=tokens()).loss.backward()
        assert all(p.grad is None for p in model.backbone.model.layers.parameters())
        assert model.backbone.model.embed_tokens.weight.grad is None
    assert counts[1] - counts[2] == 2 and counts[2] - counts[4] == 1
    assert counts[4] < 8 and counts[1] < 0.4 * len(wide)
    assert {p.untyped_storage().data_ptr() for p in full.model.layers.parameters()} & {
        each.untyped_storage().data_ptr() for each in kept
    }  # which full fine-tuning does keep


def test_only_its_own_parameters() -> None:
    model = beside(**WIDE)
    names = [name for name, _ in model.named_parameters()]
    assert all(name.startswith("network.") for name in names) and list(model.state_dict()) == names
    width, hidden = 16, 64  # 64 / 4, one head of 16; its MLP: 8/3 of that in whole heads
    layer = 4 * width * width + 3 * width * 48 + 2 * width
    assert model.trainable() == (LAYERS + 2) * hidden * width + LAYERS * (layer + 1) + width
    assert SideConfig().shape(host("llama").config).width == 8  # never less than a head
    assert model.train().training and not model.backbone.training
    assert set_staleness(model, 0.5) is None and model.config.staleness == 0.5  # as PEFT's models are found


# --- with others -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generates(name: str) -> None:
    model, ids = beside(name), tokens(2, 5)
    expected = ids
    for _ in range(6):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    found = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, use_cache=True)
    assert torch.equal(found, expected)
    plain = model.backbone.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    assert not torch.equal(found, plain)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], 1)
    found = model.generate(input_ids=padded, attention_mask=(padded > 0).long(), max_new_tokens=6, do_sample=False)
    assert torch.equal(found[:, 3:], expected)
    torch.manual_seed(1)
    drawn = model.generate(input_ids=ids, max_new_tokens=6, do_sample=True, top_k=0)
    assert drawn.shape == expected.shape and not torch.equal(drawn, expected)


def test_trainer_saves_and_resumes(tmp_path: Path) -> None:
    """transformers' Trainer: its checkpoints hold the side network alone, and a resumed run ends as a whole one."""
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 12)]

    def run(model: SideModel, out: str, steps: int) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(tmp_path / out), max_steps=steps, per_device_train_batch_size=8, learning_rate=1e-2, seed=1,
            lr_scheduler_type="constant", save_steps=4, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        return Trainer(model=model, args=arguments, train_dataset=rows)  # type: ignore[arg-type]

    whole, first, second = (beside(awake=False) for _ in range(3))
    before = bits(whole.backbone)
    worker = run(whole, "whole", 8)
    worker.train()
    losses = [entry["loss"] for entry in worker.state.log_history if "loss" in entry]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.95 * losses[0]
    assert same(bits(whole.backbone), before)
    run(first, "parts", 4).train()
    run(second, "parts", 8).train(resume_from_checkpoint=True)
    assert close(second(tokens()).logits, whole(tokens()).logits, FORWARD)
    checkpoint = tmp_path / "parts" / "checkpoint-8" / "model.safetensors"
    assert checkpoint.stat().st_size < 5 * whole.trainable()  # float32, and names


def test_lm_eval_takes_it_for_a_model(tmp_path: Path) -> None:
    backbone = AutoModelForCausalLM.from_pretrained(tiny(tmp_path / "model", context=64))
    torch.manual_seed(0)
    model = SideModel(rewire(backbone, "ladder"), SideConfig(reduction=2))
    with torch.no_grad():
        model.network.up.weight.normal_(0, 0.5)
    rows = [{"query": f"{n} and", "choices": ["one", "two", "three"], "gold": n % 3} for n in range(4)]
    (tmp_path / "mc.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = byte_tokenizer()
    harness = Harness([tmp_path / "mc.jsonl"], None, 0)
    found = harness.run("side", tokenizer, model, 2, None, lambda *news: None)
    right = []
    for row in rows:
        start, scores = tokenizer(row["query"])["input_ids"], []
        for choice in row["choices"]:  # type: ignore[attr-defined]
            line = torch.tensor([[*start, *tokenizer(f" {choice}")["input_ids"]]])
            logs = model(line).logits.detach()[0, :-1].log_softmax(-1).gather(-1, line[0, 1:, None])
            scores.append(float(logs[len(start) - 1 :].sum()))
        right.append(scores.index(max(scores)) == row["gold"])
    assert found["mc/acc"].value == sum(right) / len(right)
