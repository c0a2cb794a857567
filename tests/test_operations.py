"""How much computing a step of training is."""

from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, MixtralConfig

from ladder.hf import rewire
from ladder.train.log import operations
from ladder.train.side import SideConfig, SideModel
from tests import training as tiny


def llama(**changes: Any) -> Any:
    """hidden 32, ffn 48, 3 layers, 4 heads of 8, 2 key/value heads, vocabulary 300."""
    config = tiny.config(**changes)
    return AutoModelForCausalLM.from_config(config)


LAYER = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48 + 2 * 32  # q, k and v, o, MLP, norms
HEAD = 300 * 32
LOOKS = 2 * (2 * 64 / 2) * 32 * 3  # forward: scores and their sums, over half of 64 tokens, by all heads and layers


@pytest.mark.parametrize("tied", [False, True])
def test_operations(tied: bool) -> None:
    wanted = 6 * (3 * LAYER + 32 + HEAD) + 3 * LOOKS  # the final norm's 32; the embedding is looked up
    assert operations(llama(tie_word_embeddings=tied), 64) == pytest.approx(wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_operations_with_lora(tied: bool) -> None:
    model = get_peft_model(
        llama(tie_word_embeddings=tied), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear")
    )
    adapters = 3 * 2 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 48))
    wanted = 4 * (3 * LAYER + 32 + HEAD) + 6 * adapters + 3 * LOOKS
    assert operations(model, 64) == pytest.approx(wanted)


def test_operations_beside_a_side_network() -> None:
    model = SideModel(rewire(llama(), "ladder"), SideConfig(reduction=4))
    wanted = 2 * 3 * LAYER + 4 * (32 + HEAD) + 6 * model.trainable() + LOOKS
    assert operations(model, 64) == pytest.approx(wanted)


def test_operations_of_some_layers() -> None:
    """The second of three is trained: nothing goes back through the first."""
    model = llama()
    model.requires_grad_(False).model.layers[1].requires_grad_(True)
    wanted = (2 + 6 + 4) * LAYER + 4 * (32 + HEAD) + (1 + 3 + 3) / 3 * LOOKS
    assert operations(model, 64) == pytest.approx(wanted)


def test_operations_of_experts() -> None:
    """Two of four are asked."""
    sizes = tiny.config().to_dict()
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = MixtralConfig(**{name: sizes[name] for name in names}, vocab_size=300, num_local_experts=4)
    layer = LAYER - 3 * 32 * 48 + 4 * 32 + 2 * 3 * 32 * 48  # the router's, and two MLPs
    wanted = 6 * (3 * layer + 32 + HEAD) + 3 * LOOKS
    assert operations(AutoModelForCausalLM.from_config(config), 64) == pytest.approx(wanted)
