"""Training wired transformers models with the ecosystem's own tools: Trainer, PEFT, accelerate, half precision."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ladder.hf
from ladder.config import ModelConfig
from ladder.errors import LadderError
from ladder.hf import rewire, set_staleness
from tests.hosts import BACKWARD, FORWARD, LAYERS, host, oracle
from tests.test_hf import close, tokens
from tests.tolerance import stored

TEXT = ("never wait for the network; " * 12).encode()
WINDOW = 24


def windows() -> list[dict[str, Tensor]]:
    ids = torch.tensor([byte % 97 for byte in TEXT])
    return [{"input_ids": ids[at : at + WINDOW], "labels": ids[at : at + WINDOW]} for at in range(0, 288, WINDOW)]


def trainer(model: Any, out: Path, steps: int, **more: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=4, learning_rate=5e-3, logging_steps=1,
        seed=1, lr_scheduler_type="constant", save_steps=10, report_to=[], use_cpu=True, disable_tqdm=True, **more,
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=windows())  # type: ignore[arg-type]


def losses(worker: Trainer) -> list[float]:
    return [entry["loss"] for entry in worker.state.log_history if "loss" in entry]


def test_full_fine_tune_saves_reloads_and_continues(tmp_path: Path) -> None:
    """A run that is interrupted and resumed from its checkpoint ends where an uninterrupted one does."""
    model = rewire(host("llama"), "standard:2 ladder:2")
    whole = trainer(copy.deepcopy(model), tmp_path / "whole", 20)
    whole.train()
    assert losses(whole)[-1] < 0.7 * losses(whole)[0]
    first = trainer(model, tmp_path / "parts", 10)
    first.train()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "parts/checkpoint-10", attn_implementation="eager")
    assert loaded.config.wiring == "standard:2 ladder:2"
    assert torch.equal(loaded(tokens()).logits, model.eval()(tokens()).logits)
    second = trainer(loaded, tmp_path / "parts", 20)
    second.train(resume_from_checkpoint=True)
    assert losses(second) == pytest.approx(losses(whole), rel=20**0.5 * BACKWARD)


def test_lora_saves_reloads_and_continues(tmp_path: Path) -> None:
    rewire(host("llama"), "ladder").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=8))  # targets by the family's own list
    assert 0 < sum(p.numel() for p in model.parameters() if p.requires_grad) < 0.5 * base.num_parameters()
    worker = trainer(model, tmp_path / "run", 20, gradient_checkpointing=True)
    worker.train()
    assert losses(worker)[-1] < 0.85 * losses(worker)[0]
    model.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModelForCausalLM.from_pretrained(
        tmp_path / "adapter", is_trainable=True, attn_implementation="eager"
    )
    expected = model.eval()(input_ids=tokens()).logits
    assert close(loaded.eval()(input_ids=tokens()).logits, expected, FORWARD)
    more = trainer(loaded, tmp_path / "more", 10)
    more.train()
    assert losses(more)[-1] < losses(worker)[-1]
    merged = loaded.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    assert again.config.wiring == "ladder"
    assert close(again(tokens()).logits, merged.eval()(tokens()).logits, FORWARD)


def test_staleness_leads_from_standard_to_the_wiring() -> None:
    model = rewire(host("gemma2"), "ladder", 0.0)
    plain = host("gemma2")
    standard, wired = plain(tokens()).logits, oracle(plain, ["ladder"] * LAYERS, input_ids=tokens())
    assert close(model(tokens()).logits, standard, FORWARD)
    between = []
    for staleness in (0.25, 0.5, 0.75):
        set_staleness(model, staleness)
        between.append(model(tokens()).logits)
        assert not close(between[-1], standard, 1e-3) and not close(between[-1], wired, 1e-3)
    set_staleness(model, 1.0)
    assert close(model(tokens()).logits, wired, FORWARD)
    set_staleness(model, [0.0, 1.0, 1.0, 1.0])  # each layer its own
    mixed = model(tokens()).logits
    assert not close(mixed, wired, 1e-3)
    for wrong in (-0.1, 1.5, [0.5], [0.1, 0.2, 0.3, 7.0]):
        with pytest.raises(LadderError, match="staleness"):
            set_staleness(model, wrong)


@pytest.mark.parametrize("wiring", ["parallel", "parallel-1"])
def test_staleness_of_what_is_held(wiring: str) -> None:
    """From the standard model, whose MLP reads attention's result, with several emulated ranks as with one."""
    for ranks in (1, 2):
        model = rewire(host("llama"), wiring, 0.0, ranks=ranks)
        assert close(model(tokens()).logits, host("llama")(tokens()).logits, FORWARD)
        set_staleness(model, 0.5)
        half = model(tokens()).logits
        set_staleness(model, 1.0)
        assert close(model(tokens()).logits, rewire(host("llama"), wiring)(tokens()).logits, FORWARD)
        assert not close(half, model(tokens()).logits, 1e-3) and not close(half, host("llama")(tokens()).logits, 1e-3)


@pytest.mark.parametrize("name", ["gpt_neox", "falcon", "falcon-two-norms", "olmo2"])
@pytest.mark.parametrize("wiring", ["ladder", "ladder-2", "parallel", "parallel-1", "parallel-2"])
def test_staleness_begins_with_the_model_as_it_was_born(name: str, wiring: str) -> None:
    model = rewire(host(name), wiring, 0.0)
    assert close(model(tokens()).logits, host(name)(tokens()).logits, FORWARD)
    set_staleness(model, torch.tensor(1.0))  # type: ignore[arg-type]
    assert close(model(tokens()).logits, rewire(host(name), wiring)(tokens()).logits, FORWARD)


def test_a_refused_rewiring_changes_nothing() -> None:
    model = host("llama")
    for wrong in (7, [0.5, 0.5]):
        with pytest.raises(LadderError, match="staleness"):
            rewire(model, "ladder", wrong)
    assert torch.equal(model(tokens()).logits, host("llama")(tokens()).logits)


def test_a_config_that_names_a_wiring_makes_a_wired_model(tmp_path: Path) -> None:
    """By whatever class, from a directory or from nothing; and a shared config stays what it was for the other."""
    model = rewire(host("llama"), "ladder")
    expected = model(tokens()).logits
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    found = LlamaForCausalLM.from_pretrained(tmp_path, config=config, attn_implementation="eager")
    assert torch.equal(found(tokens()).logits, expected)
    for made in (
        LlamaForCausalLM(model.config),
        AutoModelForCausalLM.from_config(LlamaConfig(**model.config.to_dict())),
    ):
        made.load_state_dict(model.state_dict())
        assert close(made.eval()(tokens()).logits, expected, FORWARD) and made.config.wiring == "ladder"
    shared = host("llama").config
    one, other = LlamaForCausalLM(shared), LlamaForCausalLM(shared)
    rewire(one, "ladder")
    assert other.config is shared and not hasattr(shared, "wiring") and one.config.wiring == "ladder"


def test_an_adapter_does_not_find_weights_that_are_wired_otherwise(tmp_path: Path) -> None:
    """A model rewired in memory lies nowhere; its adapter must not be put on what lies where it came from."""
    host("llama").save_pretrained(tmp_path / "plain")
    base = rewire(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), "ladder")
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4))
    with pytest.warns(UserWarning, match="rewired in memory"):
        model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(LadderError, match="plain was rewired in memory"):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")


def test_staleness_by_the_formula() -> None:
    """Each sub-block reads the stream minus staleness times the newest sum."""
    model = rewire(host("llama"), "ladder", 0.3)
    layers = model.model.layers
    seen: list[Tensor] = []
    sums: list[Tensor] = []
    for layer in layers:
        for norm, block in ((layer.input_layernorm, layer.self_attn), (layer.post_attention_layernorm, layer.mlp)):
            norm.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
            block.register_forward_hook(lambda *a: sums.append(a[2][0] if isinstance(a[2], tuple) else a[2]))
    model(tokens())
    embedding = model.model.embed_tokens(tokens())
    for number in range(2 * LAYERS):
        stream = embedding + sum(sums[:number])
        expected = stream - 0.3 * sums[number - 1] if number else stream
        assert close(seen[number], expected, FORWARD)


def test_staleness_is_saved_and_compiled_once(tmp_path: Path) -> None:
    torch.compiler.reset()
    model = rewire(host("llama", use_cache=False), "ladder", [0.5, 0.5, 1.0, 1.0])
    expected = model(tokens()).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(loaded(tokens()).logits, expected)
    with pytest.raises(LadderError, match="adaptation is not finished"):  # the engine knows no half ways
        ModelConfig.from_directory(tmp_path)
    set_staleness(loaded, 1)
    loaded.save_pretrained(tmp_path)
    assert str(ModelConfig.from_directory(tmp_path).wiring) == "ladder"
    model = rewire(host("llama", use_cache=False), "ladder", 0.5)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.compiler.set_stance("default"):
        compiled(tokens())
    with torch.compiler.set_stance("fail_on_recompile"):
        for staleness in (0.6, 0.9):
            set_staleness(model, staleness)
            assert close(compiled(tokens()).logits, model(tokens()).logits, FORWARD)


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    """The stream stays in the model's own precision, and the numbers are those of float32 as far as it goes."""
    model = rewire(host("llama"), "ladder")
    expected = model(tokens()).logits
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    set_staleness(half, 0.999999)  # the way of a fraction must not change the precision either
    out = half(tokens(), output_hidden_states=True)
    assert out.logits.dtype == dtype and all(state.dtype == dtype for state in out.hidden_states)
    assert close(out.logits.float(), expected, stored(LAYERS, dtype))


def test_device_map(tmp_path: Path) -> None:
    """Dispatched by accelerate: wired before, and wired after."""
    from accelerate import cpu_offload, dispatch_model

    expected = rewire(host("llama"), "ladder")(tokens()).logits
    rewire(host("llama"), "ladder").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}, attn_implementation="eager")
    assert torch.equal(loaded(tokens()).logits, expected)
    for early in (True, False):
        model = host("llama")
        if early:
            rewire(model, "ladder")
        dispatch_model(model, device_map={"model": "cpu", "lm_head": "cpu"}, force_hooks=True)
        cpu_offload(model.model, execution_device=torch.device("cpu"))
        if not early:
            rewire(model, "ladder")
        assert torch.equal(model(tokens()).logits, expected)


def test_copies_are_their_own() -> None:
    model = rewire(host("llama"), "ladder")
    other = copy.deepcopy(model)
    expected = model(tokens()).logits
    rewire(other, "standard")
    assert torch.equal(model(tokens()).logits, expected) and model.config.wiring == "ladder"
    assert torch.equal(other(tokens()).logits, host("llama")(tokens()).logits)


def test_configs_are_pickled() -> None:
    config = rewire(host("llama"), "ladder", 0.5).config
    again = pickle.loads(pickle.dumps(config))
    assert type(again) is type(config) and again.to_json_string() == config.to_json_string()


def test_a_wrapped_model_is_rewired_inside() -> None:
    model = get_peft_model(host("llama"), LoraConfig(task_type="CAUSAL_LM", r=4))
    assert rewire(model, "ladder") is model
    assert close(model(input_ids=tokens()).logits, rewire(host("llama"), "ladder")(tokens()).logits, FORWARD)


@pytest.mark.parametrize("what, message", [
    ("xlnet", "unknown model family 'xlnet': known are llama, mistral"),
    ("layers", "covers more than the model's 4 layers"),
    ("not a model", "a transformers model is needed, not Linear"),
    ("not wired", "not wired: rewire it first"),
])  # fmt: skip
def test_refused(what: str, message: str) -> None:
    from transformers import XLNetConfig, XLNetModel

    with pytest.raises(LadderError, match=message):
        if what == "xlnet":
            rewire(XLNetModel(XLNetConfig(d_model=16, d_inner=16, n_layer=1, n_head=2, vocab_size=11)), "ladder")
        elif what == "not wired":
            set_staleness(host("llama"), 0.5)
        else:
            rewire(host("llama") if what == "layers" else torch.nn.Linear(1, 1), "ladder:5")


def test_other_heads(tmp_path: Path) -> None:
    """The bare model and a classifier, wired, saved and found again by their Auto classes."""
    from transformers import AutoModel, AutoModelForSequenceClassification

    config = copy.deepcopy(host("llama").config)
    config.num_labels = 3
    for auto in (AutoModel, AutoModelForSequenceClassification):
        torch.manual_seed(0)
        model = rewire(auto.from_config(config).eval(), "ladder")
        model.save_pretrained(tmp_path / auto.__name__)
        loaded = auto.from_pretrained(tmp_path / auto.__name__, attn_implementation="eager")
        assert torch.equal(loaded(tokens())[0], model(tokens())[0]) and loaded.config.wiring == "ladder"
    assert ladder.hf.__all__ == ["rewire", "set_staleness", "share_norm"]
