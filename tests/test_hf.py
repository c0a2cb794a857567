"""The transformers host: every family under every wiring against an oracle, and all that users do with a model."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.hf import rewire
from tests.hosts import BACKWARD, CONFIGS, FORWARD, LAYERS, host, oracle

WIRINGS = {
    "standard": ["standard"] * 4,
    "ladder": ["ladder"] * 4,
    "parallel": ["parallel"] * 4,
    "parallel-1": ["parallel-1"] * 4,
    "ladder-2": ["ladder-2"] * 4,
    "standard:2 ladder:2": ["standard"] * 2 + ["ladder"] * 2,
    "ladder:1 standard:1 ladder-2:2": ["ladder", "standard", "ladder-2", "ladder-2"],
    "parallel:2 ladder:1 standard:1": ["parallel", "parallel", "ladder", "standard"],
    "ladder:1 parallel-1:1 parallel-2:2": ["ladder", "parallel-1", "parallel-2", "parallel-2"],
}


def tokens(rows: int = 2, length: int = 11) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(2, 97, (rows, length), generator=generator)


def loss_and_gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    """Of a loss that no symmetry makes blind."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    model.zero_grad()
    (logits * weights).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def close(a: Tensor, b: Tensor, limit: float) -> bool:
    """Relative to what they are."""
    a, b = a.detach(), b.detach()
    return bool((a - b).abs().max() <= limit * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("name", CONFIGS)
def test_against_the_oracle(name: str) -> None:
    plain, wired = host(name), host(name)
    names = list(dict(wired.named_parameters()))
    inputs = {"input_ids": tokens()}
    untouched = plain(**inputs).logits
    seen: list[Tensor] = []
    for wiring, rows in WIRINGS.items():
        assert rewire(wired, wiring) is wired
        logits = wired(**inputs).logits
        expected = oracle(plain, rows, **inputs)
        assert close(logits, expected, FORWARD), wiring
        ours, theirs = loss_and_gradients(wired, logits), loss_and_gradients(plain, expected)
        assert ours.keys() == theirs.keys()
        assert all(close(ours[key], theirs[key], BACKWARD) for key in ours), wiring
        if wiring == "standard":
            assert torch.equal(logits, untouched)
        seen.append(logits.detach())
    assert list(dict(wired.named_parameters())) == names and len(wired.base_model.state_dict()) > LAYERS
    different = [bool((a - b).abs().max() > 100 * FORWARD) for i, a in enumerate(seen) for b in seen[:i]]
    assert sum(different) >= len(different) - 1  # parallel by birth: standard is parallel


def padded() -> dict[str, Tensor]:
    """Three prompts of different lengths, filled up at the left."""
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    for row, missing in enumerate((0, 3, 6)):
        ids[row, :missing], mask[row, :missing] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", CONFIGS)
def test_generate_with_and_without_cache(name: str) -> None:
    model = rewire(host(name), "standard:1 ladder:2 ladder-2:1")
    inputs = padded()
    for way in ({"do_sample": False}, {"num_beams": 3, "do_sample": False}, {"do_sample": True, "top_k": 0}):
        found = []
        for use_cache in (True, False):
            torch.manual_seed(5)
            found.append(model.generate(**inputs, max_new_tokens=8, use_cache=use_cache, pad_token_id=0, **way))
        assert torch.equal(*found), way
        assert found[0].shape == (3, 17)
    batch = model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
    for row, missing in enumerate((0, 3, 6)):  # padding and the other sequences change no token
        alone = model.generate(inputs["input_ids"][row : row + 1, missing:], max_new_tokens=8, do_sample=False)
        assert torch.equal(alone[0, -8:], batch[row, -8:])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_caches(cache: str) -> None:
    model = rewire(host("llama"), "ladder")
    inputs = padded()
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False, use_cache=False, pad_token_id=0)
    found = model.generate(**inputs, max_new_tokens=8, do_sample=False, cache_implementation=cache, pad_token_id=0)
    assert torch.equal(found, expected)


def training_loss(model: Any, run: Any = None) -> tuple[float, dict[str, Tensor]]:
    """The loss is computed here: GPT-2's own cannot be compiled, wired or not."""
    model.zero_grad()
    logits = (model if run is None else run)(input_ids=tokens()).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens()[:, 1:].flatten())
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=FORWARD)
    assert found[1].keys() == expected[1].keys()
    assert all(close(found[1][name], expected[1][name], BACKWARD) for name in expected[1])


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_checkpointing(name: str) -> None:
    model = rewire(host(name, use_cache=False), "standard:1 ladder:2 ladder-2:1").train()
    expected = training_loss(model)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        calls = count_calls(model)
        assert_same(training_loss(model), expected)
        assert calls() == 2 * LAYERS  # each layer once more on the way back
        model.gradient_checkpointing_disable()


def count_calls(model: Any) -> Any:
    """How often the layers' MLPs have been begun since."""
    calls: list[int] = []
    blocks = [module for name, module in model.named_modules() if name.endswith(".mlp")]
    hooks = [block.register_forward_pre_hook(lambda *_: calls.append(1)) for block in blocks]

    def total() -> int:
        for hook in hooks:
            hook.remove()
        return len(calls)

    return total


# one of each kind of layer; the others' differ by what is inside their sub-blocks
SHORTER: dict[str, dict[str, Any]] = {
    **{name: {"num_hidden_layers": 2} for name in ("granite", "olmo2", "mixtral", "gpt_neox", "falcon")},
    **{name: {"n_layer": 2} for name in ("gpt2", "bloom")},
    "gemma2": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}


def test_compile() -> None:
    """One graph, without a break, and one with its gradients. What code becomes of it is the compiler's business: it
    makes none here.
    """
    torch.compiler.reset()
    model = rewire(host("llama", use_cache=False), "standard:1 ladder:2 ladder-2:1").train()
    expected = training_loss(model)
    assert_same(training_loss(model, torch.compile(model, fullgraph=True, backend="aot_eager")), expected)


@pytest.mark.parametrize("name", SHORTER)
def test_compile_families(name: str) -> None:
    """The rows are traced above; of a family, a layer that waits and one that does not. (transformers' experts have no
    graph with gradients on the CPU, wired or not.)
    """
    torch.compiler.reset()
    model = rewire(host(name, use_cache=False, **SHORTER[name]), "standard:1 ladder:1").train()
    expected = training_loss(model)
    assert_same(training_loss(model, torch.compile(model, fullgraph=True, backend="eager")), expected)


def test_hidden_states_and_attentions() -> None:
    """The embedding and the whole stream after every layer, whoever has waited for it."""
    for name in ("llama", "falcon", "bloom", "gpt2"):
        plain = host(name)
        model = rewire(host(name), "ladder")
        out = model(tokens(), output_hidden_states=True, output_attentions=True)
        assert len(out.hidden_states) == LAYERS + 1 and len(out.attentions) == LAYERS
        expected = plain(tokens(), output_hidden_states=True).hidden_states
        assert torch.equal(out.hidden_states[0], expected[0])
        assert all(isinstance(state, Tensor) and state.shape == expected[0].shape for state in out.hidden_states)
        rewire(model, "standard")
        same = model(tokens(), output_hidden_states=True).hidden_states
        assert all(torch.equal(a, b) for a, b in zip(same, expected, strict=True))
