"""Models that are not decoders in the transformers host: encoders, vision, encoder-decoders, post-norm."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from ladder.errors import LadderError
from ladder.hf import rewire, set_staleness
from ladder.wiring import Wiring
from tests.residuals import BACKWARD, FORWARD, LAYERS, MODELS, POST_NORM, build, inputs, lists_of_layers, oracle, result
from tests.test_hf import close

WIRINGS = {
    "standard": ["standard"] * 3,
    "ladder": ["ladder"] * 3,
    "parallel": ["parallel"] * 3,
    "parallel-1": ["parallel-1"] * 3,
    "ladder-2": ["ladder-2"] * 3,
    "ladder-1-2": ["ladder-1-2"] * 3,
    "standard:1 ladder:2": ["standard", "ladder", "ladder"],
    "ladder-2:1 parallel:1 standard:1": ["ladder-2", "parallel", "standard"],
}


def gradients(model: Any, found: Tensor) -> dict[str, Tensor]:
    """Of a loss that no symmetry makes blind."""
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    model.zero_grad()
    (found * weights).sum().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def possible(name: str) -> dict[str, list[str]]:
    """Post-norm models cannot hold a partial sum."""
    return {text: rows for text, rows in WIRINGS.items() if "parallel" not in text or name not in POST_NORM}


@pytest.mark.parametrize("name", MODELS)
def test_against_the_oracle(name: str) -> None:
    plain, wired, given = build(name), build(name), inputs(name)
    names, untouched = list(dict(wired.named_parameters())), result(plain, given)
    own = gradients(plain, untouched)
    seen: list[Tensor] = []
    for text, rows in possible(name).items():
        assert rewire(wired, text) is wired
        found = result(wired, given)
        expected = oracle(plain, rows, given)
        assert close(found, expected, min(FORWARD, 1e-5)), text
        ours, theirs = gradients(wired, found), gradients(plain, expected)
        assert ours.keys() == theirs.keys()
        assert all(close(ours[key], theirs[key], BACKWARD) for key in ours), text
        if text == "standard":
            assert torch.equal(found, untouched)
            assert all(torch.equal(ours[key], own[key]) for key in own)
        seen.append(found.detach())
    assert list(dict(wired.named_parameters())) == names
    assert all((a - b).abs().max() > 100 * FORWARD for i, a in enumerate(seen) for b in seen[:i])  # each is another
    assert sum(map(len, lists_of_layers(wired))) in (LAYERS, 2 * LAYERS)


@pytest.mark.parametrize("name", MODELS)
def test_standard_in_training_is_untouched_to_the_last_bit(name: str) -> None:
    """Dropout stays where it is, and what leaves out branches by chance does too."""
    dropouts = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1, "dropout": 0.2, "dropout_rate": 0.2}
    dropouts |= {"mlp_dropout": 0.2, "attention_dropout": 0.1, "activation_dropout": 0.1}
    model_type = MODELS[name][0]
    more = {key: value for key, value in dropouts.items() if hasattr(CONFIG_MAPPING[model_type](), key)}
    plain, wired, given = build(name, **more).train(), rewire(build(name, **more), "ladder").train(), inputs(name)
    found = []
    for model in (plain, wired, rewire(wired, "standard")):
        torch.manual_seed(9)
        found.append(result(model, given))
    assert torch.equal(found[0], found[2])
    if more or name == "dinov2":
        assert not torch.equal(found[0], result(plain, given))  # chance had a say


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_and_compiled(name: str) -> None:
    model, given = rewire(build(name), "standard:1 ladder:2").train(), inputs(name)
    torch.manual_seed(9)
    expected = gradients(model, result(model, given))
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for layers in lists_of_layers(model):  # what comes into a stack must have a gradient
            layers[0].register_forward_pre_hook(lambda _, x: (x[0] if x[0].requires_grad else x[0] + 0, *x[1:]))
        torch.manual_seed(9)
        again = gradients(model, result(model, given))
        assert again.keys() == expected.keys()
        assert all(close(again[key], expected[key], BACKWARD) for key in expected)
    model.gradient_checkpointing_disable()


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_and_attentions(name: str) -> None:
    """The whole stream after every layer, whoever has waited for it."""
    plain, model, given = build(name), rewire(build(name), "ladder"), inputs(name)
    whole = model
    if MODELS[name][0] in ("siglip", "clip"):
        plain, model, given = plain.vision_model, model.vision_model, {"pixel_values": given["pixel_values"]}
    found, expected = (each(**given, output_hidden_states=True, output_attentions=True) for each in (model, plain))
    keys = [key for key in expected if "hidden_states" in key or "attentions" in key]
    assert keys
    for key in keys:
        assert len(found[key]) == len(expected[key])
        assert all(isinstance(x, Tensor) and x.shape == y.shape for x, y in zip(found[key], expected[key], strict=True))
    states = next(key for key in keys if "hidden_states" in key)
    assert torch.equal(found[states][0], expected[states][0])
    assert not torch.equal(found[states][1], expected[states][1])  # the first MLP reads the embedding
    rewire(whole, "standard")
    same = model(**given, output_hidden_states=True, output_attentions=True)
    assert all(torch.equal(x, y) for key in keys for x, y in zip(same[key], expected[key], strict=True))


@pytest.mark.parametrize("name", ("t5", "whisper"))
def test_generation_with_and_without_a_cache(name: str) -> None:
    model, given = rewire(build(name), "standard:1 ladder:2"), inputs(name)
    given.pop("decoder_input_ids")
    for beams in (1, 2):
        found = [
            model.generate(**given, max_new_tokens=8, do_sample=False, num_beams=beams, use_cache=use_cache)
            for use_cache in (True, False)
        ]
        assert torch.equal(*found) and found[0].shape[1] > 3


@pytest.mark.parametrize("name", MODELS)
def test_staleness(name: str) -> None:
    """From the original to the wiring."""
    given, way = inputs(name), "ladder"
    original, wired = result(build(name), given), result(rewire(build(name), way), given)
    model = rewire(build(name), way, 0.0)
    assert close(result(model, given), original, FORWARD)
    set_staleness(model, 0.5)
    half = result(model, given)
    assert min((half - end).abs().max() for end in (original, wired)) > 100 * FORWARD
    count = sum(map(len, lists_of_layers(model)))
    assert model.config.staleness == 0.5
    set_staleness(model, [1.0] * count)
    assert close(result(model, given), wired, FORWARD) and not hasattr(model.config, "staleness")
    with pytest.raises(LadderError, match=f"{count + 1} values of staleness for {count} layers"):
        set_staleness(model, [1.0] * (count + 1))


def test_a_decoder_without_an_encoder() -> None:
    """A sub-block that has nothing to attend to is left out, as in an untouched layer."""
    plain, wired = build("t5").decoder, rewire(build("t5"), "standard").decoder
    ids = inputs("t5")["decoder_input_ids"]
    assert torch.equal(plain(input_ids=ids).last_hidden_state, wired(input_ids=ids).last_hidden_state)


@pytest.mark.parametrize("text", ("parallel", "parallel-1", "desync-2x", "none", "ladder:2 parallel:1"))
def test_post_norm_models_refuse_what_has_no_norm(text: str) -> None:
    model = build("bert")
    own = {type(module) for module in model.modules()}
    with pytest.raises(LadderError, match="which is impossible in a post-norm model: its norms stand on the stream"):
        rewire(model, text)
    assert {type(module) for module in model.modules()} == own  # nothing was changed


def test_towers_of_different_depth() -> None:
    """One row fits any; a pattern that counts layers must fit both."""
    vision = {**MODELS["clip"][2]["vision_config"], "num_hidden_layers": 2}
    plain, model = build("clip", vision_config=vision), build("clip", vision_config=vision)
    given = inputs("clip")
    assert rewire(model, "ladder").config.wiring == "ladder"
    assert not torch.equal(result(model, given), result(plain, given))
    with pytest.raises(LadderError, match=r"covers 3 layers, the model has 2|covers more than the model's 2 layers"):
        rewire(model, "standard:1 ladder:2")
    assert rewire(model, "ladder@1").config.wiring == "ladder@1"
    rewire(model, Wiring(("ladder",) * 7))  # a row for all
    with pytest.raises(LadderError, match="the wiring is for 7 layers, the model has"):
        rewire(model, Wiring(("ladder",) * 6 + ("standard",)))


@pytest.mark.parametrize("name, settings, message", [
    ("whisper", {"encoder_layerdrop": 0.1}, "whisper with encoder_layerdrop cannot be wired"),
    ("bert", {"is_decoder": True, "add_cross_attention": True}, "bert with add_cross_attention cannot be wired"),
    ("bert", {"chunk_size_feed_forward": 4}, "bert with chunk_size_feed_forward cannot be wired"),
])  # fmt: skip
def test_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LadderError, match=message) as refused:
        rewire(build(name, **settings), "ladder")
    assert "\n" not in str(refused.value)
