"""Models inside others, adapters in them, and copies: nothing is saved or copied as something else than it is."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    VisionTextDualEncoderModel,
)

from ladder.errors import LadderError
from ladder.hf import rewire, set_staleness, share_norm
from tests.hosts import host
from tests.residuals import build, inputs, result
from tests.test_names import WIRING, logits, wired_layers


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts") / "plain"
    host("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def wired(plain: Path) -> Path:
    path = plain.parent / "wired"
    rewire(LlamaForCausalLM.from_pretrained(plain), WIRING).save_pretrained(path)
    return path


@pytest.mark.parametrize("change", [
    lambda part: rewire(part, "parallel"), lambda part: set_staleness(part, 0.5), share_norm,
])  # fmt: skip
def test_parts_of_models_are_refused(change: Callable[[Any], Any], plain: Path, wired: Path) -> None:
    """The whole would be saved, and named, as if nothing had changed."""
    for folder in (plain, wired):
        model = LlamaForCausalLM.from_pretrained(folder)
        before = logits(model)
        for part in (model.model, get_peft_model(model, LoraConfig()).base_model.model.model):
            with pytest.raises(LadderError, match="this LlamaModel is a part of a LlamaForCausalLM"):
                change(part)
        assert torch.equal(logits(model), before)
    change(rewire(AutoModel.from_pretrained(plain), "ladder"))  # which is in no other


@pytest.mark.parametrize("name", ["vit", "t5", "whisper", "clip"])
def test_parts_of_other_models_are_refused(name: str) -> None:
    """Towers, and the encoder of an encoder-decoder."""
    whole = build(name)
    parts = [part for part in whole.modules() if isinstance(part, PreTrainedModel) and part is not whole]
    assert parts
    for part in parts:
        with pytest.raises(LadderError, match=f"is a part of a {type(whole).__name__}"):
            rewire(part, "ladder")


def test_a_model_that_is_wired_otherwise_than_it_says_is_not_saved(plain: Path, wired: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(wired)
    model.config = LlamaForCausalLM.from_pretrained(plain).config
    shell = LlamaForCausalLM.from_pretrained(plain)
    shell.model = LlamaForCausalLM.from_pretrained(wired).model
    other = LlamaForCausalLM.from_pretrained(wired)
    other.model.layers[2] = LlamaForCausalLM.from_pretrained(plain).model.layers[2]
    for wrong in (model, shell, other):
        with pytest.raises(LadderError, match="wired otherwise than its config says"):
            wrong.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_models_with_wired_parts_are_refused() -> None:
    """Kinds of models that have no wiring of their own: software without wirings would load them unwired."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision, image_size=8, patch_size=4),
        text_config=LlamaConfig(**host("llama").config.to_dict() | {"wiring": "ladder"}),
    )
    with pytest.raises(LadderError, match=r"Llava\w+ \(llava\) has a wired part"):
        LlavaForConditionalGeneration(config)
    text, images = (type(whole.base_model)(whole.config) for whole in (build("bert"), build("vit")))
    with pytest.raises(LadderError, match=r"VisionTextDualEncoderModel \(.*\) has a wired part"):
        VisionTextDualEncoderModel(vision_model=images, text_model=rewire(text, "ladder"))


def test_norms_under_an_adapter_are_not_shared(plain: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(plain)
    model.add_adapter(LoraConfig(target_modules=["gate_proj", "up_proj"]))
    before = logits(model)
    with pytest.raises(LadderError, match=r"mlp\.gate_proj\.weight of layer 0 was replaced \(by an adapter\?\)"):
        share_norm(model)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", ["bert", "t5", "clip", "vit"])
def test_pickled(name: str) -> None:
    """And copied."""
    model, given = rewire(build(name), "ladder"), inputs(name)
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert wired_layers(copied) == wired_layers(model)
        assert torch.equal(result(copied, given), result(model, given))


def test_loaded_and_pickled(wired: Path) -> None:
    for auto in (AutoModelForCausalLM, LlamaForCausalLM):
        model = auto.from_pretrained(wired)
        copied = pickle.loads(pickle.dumps(model))
        assert torch.equal(logits(copied), logits(model)) and copied.config.wiring == WIRING


def test_a_wired_directory_in_the_class_of_another_family(plain: Path, wired: Path) -> None:
    size = host("llama").config.to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = MistralConfig(**{key: size[key] for key in keys}, num_key_value_heads=size["num_key_value_heads"])
    with pytest.raises(LadderError, match="is a wired llama model, which MistralModel would load unwired"):
        MistralForCausalLM.from_pretrained(wired, config=config)
    MistralForCausalLM.from_pretrained(plain, config=config)  # as transformers has it
