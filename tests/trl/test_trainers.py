"""TRL's trainers on wired models, by path and by instance: the wiring stays, or one sentence refuses.

A reference model that TRL loads by itself must be the model: then DPO's first loss is ln 2, KTO's 1/2, GRPO's KL 0, and
a student distilled from itself has no loss. Each has its control: with a reference or a teacher that is not wired.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.gkd import GKDConfig, GKDTrainer

from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.layer import WiredLayer
from tests.checkpoints import byte_tokenizer
from tests.hosts import LAYERS, host
from tests.scripts import example

WIRING = "standard:1 ladder:3"
TEXTS = [{"text": "never wait for it"}] * 4
PAIRS = [{"prompt": "ab", "chosen": "cdef", "rejected": "xyz"}] * 4
JUDGED = [{"prompt": "ab", "completion": "cdef", "label": True}, {"prompt": "ab", "completion": "xyz", "label": False}]
PROMPTS = [{"prompt": "ab"}] * 4
TALKS = [{"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cdef"}]}] * 4
TOKENS = torch.tensor([[5, 17, 9, 80, 3]])


def tokenizer() -> Any:
    found = byte_tokenizer()
    found.pad_token = found.eos_token
    found.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`plain`, and `wired`, which is the same under another wiring."""
    path = tmp_path_factory.mktemp("trl")
    ends = {"pad_token_id": 256, "eos_token_id": 256, "bos_token_id": 256}
    host("llama", vocab_size=300, **ends).save_pretrained(path / "plain")
    rewire(LlamaForCausalLM.from_pretrained(path / "plain"), WIRING).save_pretrained(path / "wired")
    for name in ("plain", "wired"):
        tokenizer().save_pretrained(path / name)
    return path


def in_memory(folder: Path) -> Any:
    return rewire(AutoModelForCausalLM.from_pretrained(folder / "plain"), WIRING)


MODELS: dict[str, Callable[[Path], Any]] = {
    "path": lambda folder: str(folder / "wired"),
    "Auto": lambda folder: AutoModelForCausalLM.from_pretrained(folder / "wired"),
    "class": lambda folder: LlamaForCausalLM.from_pretrained(folder / "wired"),
    "memory": in_memory,
}


def trained(trainer: Any, config: Any, model: Any, rows: list[Any], out: Path, lora: bool = False, **more: Any) -> Any:
    """A trainer after one step."""
    given = {name: more.pop(name) for name in list(more) if name in config.__dataclass_fields__}
    options = config(
        str(out), max_steps=1, per_device_train_batch_size=2, report_to=[], save_strategy="no", logging_steps=1,
        use_cpu=True, bf16=False, disable_tqdm=True, **given,
    )  # fmt: skip
    if lora:
        more["peft_config"] = LoraConfig(task_type="CAUSAL_LM")
    found = trainer(
        model=model, args=options, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), **more
    )
    found.train()
    return found


def logged(trainer: Any, key: str) -> float:
    return float(next(line[key] for line in trainer.state.log_history if key in line))


def wired_layers(model: Any) -> int:
    return sum(isinstance(module, WiredLayer) for module in model.modules())


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(input_ids=TOKENS).logits  # type: ignore[no-any-return]


# trainer -> its config, rows, what is read, what it is if the reference is the model
WITH_REFERENCE: dict[str, tuple[Any, Any, list[Any], dict[str, Any], str, float]] = {
    "dpo": (DPOTrainer, DPOConfig, PAIRS, {}, "loss", math.log(2)),
    "kto": (KTOTrainer, KTOConfig, JUDGED * 2, {}, "loss", 0.5),
    "grpo": (GRPOTrainer, GRPOConfig, PROMPTS, {
        "beta": 0.1, "num_generations": 2, "max_completion_length": 4,
        "reward_funcs": lambda completions, **_: [float(len(each)) for each in completions],
    }, "kl", 0.0),
}  # fmt: skip
WITH_TEACHER: dict[str, tuple[Any, Any, list[Any], dict[str, Any]]] = {
    "gkd": (GKDTrainer, GKDConfig, TALKS, {"max_length": 16, "max_new_tokens": 4, "lmbda": 0.0}),
    "distillation": (DistillationTrainer, DistillationConfig, PROMPTS, {"max_completion_length": 4}),
}


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("model", MODELS)
def test_sft(model: str, lora: bool, folder: Path, tmp_path: Path) -> None:
    """Saved and loaded by its class: the model that was trained, with its wiring."""
    trainer = trained(SFTTrainer, SFTConfig, MODELS[model](folder), TEXTS, tmp_path / "out", lora, max_length=16)
    control = trained(SFTTrainer, SFTConfig, str(folder / "plain"), TEXTS, tmp_path / "plain", lora, max_length=16)
    assert abs(logged(trainer, "loss") - logged(control, "loss")) > 0.01
    assert (wired_layers(trainer.model), wired_layers(control.model)) == (LAYERS, 0)
    trainer.save_model(tmp_path / "saved")
    if not lora:
        again = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
        assert again.config.wiring == WIRING
    elif model == "memory":
        with pytest.raises(LadderError, match="plain was rewired in memory"):
            AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved")
        return
    else:
        again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert wired_layers(again) == LAYERS and torch.equal(logits(again), logits(trainer.model))


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_references(name: str, model: str, lora: bool, folder: Path, tmp_path: Path) -> None:
    """TRL loads the reference by the model's name, or, with an adapter, leaves the adapter out."""
    trainer, config, rows, more, key, value = WITH_REFERENCE[name]
    if model == "memory" and not lora:
        with pytest.raises(
            LadderError, match="plain was rewired in memory, and its files are not wired like that: save"
        ):
            trained(trainer, config, MODELS[model](folder), rows, tmp_path, **more)
        return
    found = trained(trainer, config, MODELS[model](folder), rows, tmp_path, lora, **more)
    assert logged(found, key) == pytest.approx(value, abs=1e-6)
    assert wired_layers(found.model) == LAYERS
    assert (found.ref_model is None) if lora else (wired_layers(found.ref_model) == LAYERS)


def test_a_reference_that_is_not_wired_would_be_seen(folder: Path, tmp_path: Path) -> None:
    """The control of DPO: with `ref_model`, which is also what a model in memory may be given."""
    for reference, right in ((LlamaForCausalLM.from_pretrained(folder / "plain"), False), (in_memory(folder), True)):
        found = trained(DPOTrainer, DPOConfig, in_memory(folder), PAIRS, tmp_path, ref_model=reference)
        assert (abs(logged(found, "loss") - math.log(2)) < 1e-6) == right


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", WITH_TEACHER)
def test_teachers(name: str, model: str, folder: Path, tmp_path: Path) -> None:
    """A student that is its teacher, by path or not, has nothing to learn; a standard teacher is another model."""
    trainer, config, rows, more = WITH_TEACHER[name]
    for teacher in (str(folder / "wired"), in_memory(folder), str(folder / "plain")):
        found = trained(trainer, config, MODELS[model](folder), rows, tmp_path, teacher_model=teacher, **more)
        assert wired_layers(found.model) == LAYERS
        same = teacher != str(folder / "plain")
        assert wired_layers(found.teacher_model) == LAYERS * same
        assert (abs(logged(found, "loss")) < 1e-6) == same


def test_the_examples(tmp_path: Path) -> None:
    example("tiny_checkpoint", tmp_path / "wired", "ladder")
    losses = example("trl_sft", tmp_path / "wired", tmp_path / "sft")
    assert losses[-1] < losses[0] / 2
    losses = example("trl_dpo", tmp_path / "wired", tmp_path / "dpo")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < losses[0] / 2
    for name in ("sft", "dpo"):
        model = LlamaForCausalLM.from_pretrained(tmp_path / name)
        assert wired_layers(model) == 4 and model.config.wiring == "ladder"
