"""The side network: what it starts as, and what it computes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.train.side import SideConfig, SideModel
from ladder.train.side.network import attention_mask
from tests.hosts import BACKWARD, CONFIGS, FORWARD, LAYERS, host
from tests.test_hf import close, tokens
from tests.tolerance import stored

WIDE = {"hidden_size": 64}


def beside(name: str = "llama", config: SideConfig | None = None, awake: bool = True, **more: Any) -> SideModel:
    """A wired host with a side network; awake: one that has something to say."""
    torch.manual_seed(11)
    model = SideModel(rewire(host(name, **more), "ladder"), config or SideConfig(reduction=4))
    if awake:
        with torch.no_grad():
            model.network.up.weight.normal_(0, 0.3)
            model.network.gates.normal_(0, 0.1)
    return model.eval()


def divergence(source: Tensor, found: Tensor) -> Tensor:
    """KL, nats per token."""
    wanted, said = source.log_softmax(-1), found.log_softmax(-1)
    return (wanted.exp() * (wanted - said)).sum(-1).mean()


def bits(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- the beginning ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_starts_exactly_as_the_backbone(name: str) -> None:
    model = beside(name, awake=False)
    expected = model.backbone(tokens(), labels=tokens())
    found = model(tokens(), labels=tokens())
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)
    found.loss.backward()
    assert all(parameter.grad is None for parameter in model.backbone.parameters())
    assert model.network.up.weight.grad is not None and bool((model.network.up.weight.grad != 0).any())
    with torch.no_grad():
        model.network.up.weight.normal_(0, 0.3)
    awake = model(tokens())
    assert not close(awake.logits, expected.logits, 1e-3)
    if name == "gemma2":  # its own head: what is added cannot lead beyond the cap
        with torch.no_grad():
            model.network.up.weight.mul_(1e6)
        cap = model.config.final_logit_softcapping
        assert 0.1 * cap < float(model(tokens()).logits.detach().abs().max()) <= cap
    assert torch.equal(model.backbone(tokens()).logits, expected.logits)  # alone it is what it was


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Beside a bfloat16 backbone: parameters of float32 that compute in bfloat16, or bfloat16 altogether."""
    backbone = rewire(host("llama"), "ladder").to(torch.bfloat16)
    model = SideModel(backbone, SideConfig(reduction=4), dtype).train()
    assert model.dtype is torch.bfloat16 and {p.dtype for p in model.parameters()} == {dtype}
    assert torch.equal(model(tokens()).logits, backbone(tokens()).logits)
    with torch.no_grad():
        model.network.up.weight.normal_(0, 0.3)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        found = model(tokens(), labels=tokens())
    rows = [each for each in kept if each.numel() == 22 * 32]
    assert len([each for each in rows if each.dtype is torch.bfloat16]) >= LAYERS  # not float32 copies of the stream
    found.loss.backward()
    assert found.logits.dtype is torch.bfloat16
    assert all(
        p.grad is not None and p.grad.dtype is dtype and bool(p.grad.isfinite().all()) for p in model.parameters()
    )
    wide = copy.deepcopy(model).float()
    assert wide.dtype is torch.float32  # the backbone comes along
    limit = stored(LAYERS + len(model.network.layers), torch.bfloat16)
    assert close(found.logits.float(), wide(tokens()).logits, limit)
    assert not close(wide.backbone(tokens()).logits, wide(tokens()).logits, limit)


@pytest.mark.usefixtures("without_onednn")
def test_autocast() -> None:
    """Of a trainer's: everything of float32, computed in bfloat16."""
    model = beside(awake=False)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(tokens(), labels=tokens())
        assert torch.equal(found.logits, model.backbone(tokens()).logits)
    found.loss.backward()
    assert bool((model.network.up.weight.grad != 0).any())  # type: ignore[union-attr]


# --- what it computes ------------------------------------------------------------------------------------------------


def streams_of(backbone: Any) -> list[Tensor]:
    """The stream before the first layer and after each, by the backbone alone."""
    hidden: list[Tensor] = []
    hook = backbone.model.norm.register_forward_pre_hook(lambda _, arguments: hidden.append(arguments[0]))
    with torch.no_grad():
        found = backbone(tokens(), output_hidden_states=True).hidden_states
    hook.remove()
    return [*found[:-1], hidden[0]]


def naive(model: SideModel, streams: list[Tensor], lag: int) -> Tensor:
    """The logits, from every stream that there ever was: a gate changes all of them."""
    config, weights, head = model.side_config, dict(model.network.named_parameters()), model.network.config.head_dim

    def rms(x: Tensor) -> Tensor:
        return x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()

    def turned(x: Tensor) -> Tensor:
        out = torch.empty_like(x)  # [batch, tokens, heads, head]
        for at in range(x.shape[1]):
            for i in range(head // 2):
                angle = torch.tensor(at * 10_000.0 ** (-2 * i / head), dtype=x.dtype)
                a, b = x[:, at, :, i], x[:, at, :, i + head // 2]
                out[:, at, :, i] = a * angle.cos() - b * angle.sin()
                out[:, at, :, i + head // 2] = b * angle.cos() + a * angle.sin()
        return out

    def attention(layer: str, x: Tensor) -> Tensor:
        x = x / rms(x) * weights[layer + "input_layernorm.weight"]
        q, k, v = (x @ weights[f"{layer}self_attn.{name}_proj.weight"].T for name in ("q", "k", "v"))
        q, k, v = (each.unflatten(-1, (-1, head)) for each in (q, k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", turned(q), turned(k)) / head**0.5
        scores = scores + torch.full(scores.shape[-2:], float("-inf"), dtype=x.dtype).triu(1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
        return mixed @ weights[layer + "self_attn.o_proj.weight"].T

    def mlp(layer: str, x: Tensor) -> Tensor:
        x = x / rms(x) * weights[layer + "post_attention_layernorm.weight"]
        gate, up, down = (weights[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        gated = x @ gate.T
        return (gated / (1 + (-gated).exp()) * (x @ up.T)) @ down.T

    past = [streams[0] / rms(streams[0]) @ weights["start.weight"].T]
    for index, read in enumerate([each for each in range(LAYERS) if (LAYERS - 1 - each) % config.every == 0]):
        keep = 1 / (1 + (-weights["gates"][index] / 0.1).exp())
        new = streams[read + 1] / rms(streams[read + 1]) @ weights[f"down.{index}.weight"].T
        past = [keep * each + (1 - keep) * new for each in past]
        for block in (attention, mlp):
            past.append(past[-1] + block(f"layers.{index}.", past[max(0, len(past) - 1 - lag)]))
    answer = past[-1] / rms(past[-1]) * weights["norm.weight"] @ weights["up.weight"].T * rms(streams[-1])
    backbone = model.backbone
    return backbone.lm_head(backbone.model.norm(streams[-1] + answer))  # type: ignore[no-any-return]


CASES = [("ladder", 1, 1), ("ladder", 1, 3), ("standard", 0, 2), ("ladder-2", 2, 1)]


@pytest.mark.parametrize(("wiring", "lag", "every"), CASES)
def test_against_a_naive_one(wiring: str, lag: int, every: int) -> None:
    """Logits, and the gradient of every parameter: gates, projections, layers."""
    backbone = rewire(host("llama"), "ladder").double()
    torch.manual_seed(5)
    model = SideModel(backbone, SideConfig(2, every, wiring))
    assert model.network.config.num_attention_heads == 2 and len(model.network.layers) == {1: 4, 2: 2, 3: 2}[every]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    found, expected = model(tokens()).logits, naive(model, streams_of(backbone), lag)
    assert close(found, expected, FORWARD)
    assert not close(found, naive(model, streams_of(backbone), lag + 1), 1e-3)  # the wiring is seen
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    slopes = []
    for logits in (found, expected):
        model.zero_grad()
        (logits * weights).sum().backward()
        slopes.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})  # type: ignore[union-attr]
    for name, slope in slopes[0].items():
        assert close(slope, slopes[1][name], BACKWARD) and bool((slope != 0).any()), name


def test_gates_by_small_steps() -> None:
    """The gradient of each gate is what the loss does when it moves a little."""
    torch.manual_seed(5)
    model = SideModel(rewire(host("llama"), "ladder").double(), SideConfig(4))
    with torch.no_grad():
        model.network.up.weight.normal_(0, 0.3)
        model.network.gates.normal_(0, 0.1)
    weights = torch.randn(2, 11, 97, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (model(tokens()).logits * weights).sum().backward()
    slope, step = model.network.gates.grad, 1e-3
    assert slope is not None
    for index in range(LAYERS):
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                model.network.gates[index] += sign * step
                losses.append(float((model(tokens()).logits * weights).sum()))
                model.network.gates[index] -= sign * step
        assert abs(float(slope[index])) > 0.1
        assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(slope[index]), rel=1e-2)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a_later_token_changes_nothing_before_it(name: str) -> None:
    model, ids = beside(name), tokens()
    other = ids.clone()
    other[:, 7] = (other[:, 7] + 1) % 97
    one, two = model(ids).logits, model(other).logits
    assert close(one[:, :7], two[:, :7], FORWARD) and not close(one[:, 7:], two[:, 7:], 1e-3)


def test_padding_and_packing_are_as_if_alone() -> None:
    model, ids = beside(), tokens(1, 6)
    alone = model(ids).logits
    for side in ("left", "right"):
        junk = torch.full((1, 3), 5)
        padded = torch.cat([junk, ids] if side == "left" else [ids, junk], 1)
        mask = torch.ones_like(padded)
        mask[:, slice(0, 3) if side == "left" else slice(6, 9)] = 0
        found = model(padded, attention_mask=mask).logits
        assert close(found[:, slice(3, 9) if side == "left" else slice(0, 6)], alone, FORWARD)
        assert bool(found.isfinite().all())
    packed, positions = torch.cat([tokens(1, 5), ids], 1), torch.tensor([[*range(5), *range(6)]])
    assert close(model(packed, position_ids=positions).logits[:, 5:], alone, FORWARD)
    assert not close(model(packed).logits[:, 5:], alone, 1e-3)
    assert torch.equal(model(ids, attention_mask=torch.ones_like(ids)).logits, alone)
    with pytest.raises(LadderError, match=r"attention_mask must be \[batch, tokens\].*\[1, 1, 6, 6\]"):
        model(ids, attention_mask=torch.ones(1, 1, 6, 6))
    assert torch.is_grad_enabled() and torch.equal(model(ids).logits, alone)  # nothing is left behind by an error


def test_who_sees_whom() -> None:
    assert attention_mask(4, None, None) is None and attention_mask(4, torch.ones(2, 4), torch.arange(4)[None]) is None
    found = attention_mask(4, torch.tensor([[0, 1, 1, 0]]), torch.tensor([[1, 0, 1, 0]]))
    assert found is not None and found.shape == (1, 1, 4, 4)
    assert found[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
