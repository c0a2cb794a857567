"""ladder fit: weights by least squares against the naive way, every family, the verb, and where adapt begins."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from ladder.cli import main
from ladder.data.shards import Shards
from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.measures import distance
from ladder.scan.fit import fit
from ladder.scan.options import FitOptions
from ladder.scan.solve import solve
from ladder.train.distill import adapt
from ladder.train.side import SideModel
from tests import training as tiny
from tests.hosts import CONFIGS, host
from tests.training import SEQ_LEN, distilling, log, same, silent, training, weights

RIDGE = 0.01


def options(model: Path, out: Path, data: Path, **changes: Any) -> FitOptions:
    return FitOptions(str(model), out, **{"data": data, "seq_len": SEQ_LEN, "device": "cpu", **changes})


def drawn(rows: int, seed: int = 5) -> Tensor:
    return torch.randint(2, 97, (rows, 24), generator=torch.Generator().manual_seed(seed))


# --- numbers --------------------------------------------------------------------------------------------------------


def nearest(x: Tensor, gap: Tensor) -> Tensor:
    """[inputs, outputs] of the least | x @ move - gap |^2 + penalty | move |^2, as one long system."""
    x, gap = x.flatten(0, -2), gap.flatten(0, -2)
    penalty = RIDGE * x.square().sum() / x.shape[1]
    more = torch.eye(x.shape[1], dtype=x.dtype) * penalty.sqrt()
    return torch.linalg.lstsq(torch.cat((x, more)), torch.cat((gap, gap.new_zeros(x.shape[1], gap.shape[1])))).solution


Inner = Callable[[Tensor], Tensor]  # what a sub-block reads, to what its output projection is given


def insides(layer: Any, call: dict[str, Any]) -> list[tuple[nn.Module, list[nn.Linear], Inner, nn.Linear]]:
    """Of a Llama layer, its attention's and its MLP's: norm, the projections that read, what follows, the last one."""
    attention, mlp = layer.self_attn, layer.mlp

    def attended(x: Tensor) -> Tensor:
        caught: list[Tensor] = []
        handle = attention.o_proj.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
        attention(hidden_states=x, **call)
        handle.remove()
        return caught[0]

    return [
        (layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj], attended, attention.o_proj),
        (
            layer.post_attention_layernorm,
            [mlp.gate_proj, mlp.up_proj],
            lambda x: F.silu(mlp.gate_proj(x)) * mlp.up_proj(x),
            mlp.down_proj,
        ),
    ]


@torch.no_grad()
def naive(model: Any, lags: list[int], first: int, ids: Tensor) -> Any:
    """The fit of a Llama model, written over lists of all streams. `lags`: of each sub-block; `first`: the first layer
    that is fitted.
    """
    fitted = copy.deepcopy(model)
    begin = model.model.embed_tokens(ids)
    turn = model.model.rotary_emb(begin, torch.arange(ids.shape[1])[None])
    future = torch.full((ids.shape[1],) * 2, float("-inf"), dtype=begin.dtype).triu(1)
    call = {"position_embeddings": turn, "attention_mask": future[None, None]}
    original, own = [begin], [begin]
    seen = 0  # the newest stream that anybody has read: what was waited for stays
    for index, (old, new) in enumerate(zip(model.model.layers, fitted.model.layers, strict=True)):
        for half, (before, after) in enumerate(zip(insides(old, call), insides(new, call), strict=True)):
            number = 2 * index + half
            seen = max(seen, number - lags[number])
            wanted, read = before[0](original[-1]), after[0](own[seen])
            original.append(original[-1] + before[3](before[2](wanted)))
            if index >= first:
                turned = torch.eye(read.shape[-1], dtype=read.dtype) + nearest(read, wanted - read)
                for reader in after[1]:
                    reader.weight.copy_(reader.weight @ turned.T)
                held = after[2](read)
                size = original[-1].square().mean(-1, keepdim=True).sqrt()
                gap = original[-1] - own[-1] - after[3](held)
                after[3].weight.add_(nearest(held / size, gap / size).T)
            own.append(own[-1] + after[3](after[2](read)))
    return fitted


@pytest.mark.parametrize("wiring, lags, first", [
    ("ladder", [1] * 8, 0),
    ("standard:2 ladder:2", [0] * 4 + [1] * 4, 2),
    ("ladder-2@1,3", [0, 0, 2, 2, 0, 0, 2, 2], 1),
    ("ladder-1-2", [1, 2] * 4, 0),
])  # fmt: skip
def test_equals_the_naive_way(wiring: str, lags: list[int], first: int) -> None:
    model, ids = host("llama").double(), drawn(24)
    wanted = naive(model, lags, first, ids)
    found = solve(copy.deepcopy(model), wiring, ids, RIDGE, batch=6)
    before, after, ours = (dict(each.named_parameters()) for each in (model, wanted, found))
    assert before.keys() == ours.keys()
    for name, value in after.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6)
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        fitted = layer >= first and "norm" not in name
        assert torch.equal(ours[name], before[name]) != fitted or (first == 0 and layer == 0 and "self_attn" in name)


_LLAMA = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
_NORMED = _LLAMA - {"o_proj", "down_proj"}
_FUSED = {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
# the matrices that are fitted, and of what rewiring costs how much may be left
FITTED: dict[str, tuple[set[str], float]] = {
    "phi3": ({"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}, 0.7),
    "granite": (_LLAMA, 0.85),
    "olmo2": (_NORMED, 0.9),
    "gemma2": (_NORMED, 0.8),
    "gemma3": (_NORMED, 0.85),
    "mixtral": ({"q_proj", "k_proj", "v_proj", "o_proj", "gate", "gate_up_proj"}, 0.7),
    "qwen3_moe": ({"q_proj", "k_proj", "v_proj", "o_proj", "gate", "gate_up_proj", "gate_proj", "up_proj"}, 0.75),
    "gpt2": ({"c_attn", "c_proj", "c_fc"}, 0.15),
    "gpt_neox": (_FUSED, 0.15),
    "gpt_neox-sequential": (_FUSED, 0.1),
    "falcon": (_FUSED, 0.2),
    "falcon-two-norms": (_FUSED, 0.2),
    "falcon-sequential": (_FUSED, 0.15),
    "bloom": (_FUSED, 0.2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_comes_nearer(name: str) -> None:
    """On text that was not fitted to. Where a norm follows the projection, or little is added, less is to be gained."""
    model, text = host(name), drawn(12, seed=6).flatten()
    matrices, limit = FITTED.get(name, (_LLAMA, 0.7))
    rewired = rewire(copy.deepcopy(model), "ladder")
    fitted = solve(copy.deepcopy(model), "ladder", drawn(96), RIDGE)
    begun, ended = (distance(each, model, text, window=24).kl.value for each in (rewired, fitted))
    assert ended < limit * begun
    assert fitted.config.wiring == "ladder" and not model.config.to_dict().get("wiring")
    before, moved = dict(model.named_parameters()), set()
    for each, weight in fitted.named_parameters():
        if not torch.equal(weight, before[each]):
            moved.add(each.removesuffix(".weight").rpartition(".")[2])
        elif re.search(r"\.(layers|h)\.[1-9]", each):  # in the first layer the attention has nothing to mend
            assert each.removesuffix(".weight").rpartition(".")[2] not in matrices, each
    assert moved == matrices


def test_weights_that_lie_across() -> None:
    """GPT-2's matrices have their inputs first."""
    across = host("gpt2").double()
    plain = copy.deepcopy(across)
    for block in [each for layer in plain.transformer.h for each in (layer.attn, layer.mlp)]:
        for name, child in list(block.named_children()):
            if isinstance(child, Conv1D):
                linear = nn.Linear(*child.weight.shape, dtype=torch.float64)
                linear.load_state_dict({"weight": child.weight.T, "bias": child.bias})
                setattr(block, name, linear)
    found, wanted = (dict(solve(each, "ladder", drawn(24), batch=6).named_parameters()) for each in (across, plain))
    for name, value in found.items():
        theirs = wanted[name]
        lies = re.search(r"\.(attn|mlp)\.c_\w+\.weight", name)
        torch.testing.assert_close(value, theirs.T if lies else theirs, rtol=0, atol=1e-9)


def test_a_factor_behind_the_projection() -> None:
    """Granite with a factor is Llama with its projections so much smaller."""
    size = {"residual_multiplier": 0.3, "embedding_multiplier": 1.0, "logits_scaling": 1.0}
    granite = host("granite", **size, attention_multiplier=8**-0.5, rms_norm_eps=1e-6).double()
    llama = host("llama", rms_norm_eps=1e-6).double()
    llama.load_state_dict(granite.state_dict())
    with torch.no_grad():
        for layer in llama.model.layers:
            for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                last.weight.mul_(0.3)
    found, wanted = (dict(solve(each, "ladder", drawn(24), batch=6).named_parameters()) for each in (granite, llama))
    for name, value in found.items():
        factor = 0.3 if "o_proj" in name or "down_proj" in name else 1.0
        torch.testing.assert_close(factor * value, wanted[name], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("without_onednn")
def test_half_precision_is_near() -> None:
    model, text = host("llama"), drawn(12, seed=6).flatten()
    wide, narrow = (
        solve(copy.deepcopy(model).to(kind), "ladder", drawn(96)) for kind in (torch.float32, torch.bfloat16)
    )
    far, near = (
        distance(each, model, text, window=24).kl.value for each in (rewire(copy.deepcopy(model), "ladder"), wide)
    )
    assert narrow.dtype == torch.bfloat16
    assert distance(narrow, model, text, window=24).kl.value < near + 0.1 * (far - near)


def test_nothing_to_mend() -> None:
    """Sub-blocks that add nothing leave nothing out."""
    model = host("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert same(before, solve(model, "ladder", drawn(8)).state_dict())


def test_streams_that_are_not_finite() -> None:
    model = host("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(LadderError, match="the model's streams are not finite"):
        solve(model, "ladder", drawn(8))


# --- the verb -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fitted") / "out"
    fit(options(model, out, data), silent)
    return out


def test_writes_a_checkpoint(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ["--wiring", "standard:1 ladder:2", "--data", str(data), "--seq-len", str(SEQ_LEN), "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["ladder", "fit", str(model), str(out), *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    said = capsys.readouterr().out
    figures = re.fullmatch(
        rf"wrote {out}, fitted on (\d+) tokens: KL to the original (\S+) rewired, (\S+) fitted; perplexity [\d.]+ "
        r"original, [\d.]+ rewired, [\d.]+ fitted\n",
        said,
    )
    assert figures and float(figures[3]) < 0.6 * float(figures[2])
    assert int(figures[1]) == 64 * 48
    card = (out / "README.md").read_text()
    assert f"{figures[2]} rewired, {figures[3]} fitted" in card
    assert '--wiring "standard:1 ladder:2" --init-from out' in card
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in out.iterdir()}
    assert (out / "model.safetensors").stat().st_mode & 0o777 == 0o644
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.config.wiring == "standard:1 ladder:2" and AutoTokenizer.from_pretrained(out)("never")["input_ids"]
    found, before = weights(out), weights(model)
    assert found.keys() == before.keys()
    kept = {name for name in found if torch.equal(found[name], before[name])}
    assert all((".layers.0." in name or "norm" in name or ".layers." not in name) == (name in kept) for name in found)


@pytest.mark.usefixtures("without_onednn")
def test_keeps_the_type(data: Path, tmp_path: Path) -> None:
    original = tiny.model(tmp_path / "half", data, torch.bfloat16, tie_word_embeddings=True)
    made = fit(options(original, tmp_path / "out", data, tokens=10**9), silent)
    assert made.tokens == (Shards.open(data).tokens // SEQ_LEN - 8) // 8 * 8 * SEQ_LEN  # all but what is measured on
    found = weights(tmp_path / "out")
    assert {each.dtype for each in found.values()} == {torch.bfloat16} and "lm_head.weight" not in found


def test_adapt_begins_there(model: Path, data: Path, fitted: Path, tmp_path: Path) -> None:
    """From the first step on under the wiring, with the fitted weights, the original as teacher."""
    run = training(data, 4, valid=data, log_every=1, eval_every=4, lr=1e-9)
    text = Shards.open(data).read(0, 12 * SEQ_LEN + 1)
    begun = distance(
        AutoModelForCausalLM.from_pretrained(fitted), AutoModelForCausalLM.from_pretrained(model), text, window=SEQ_LEN
    )
    found = adapt(distilling(model, tmp_path / "out", init_from=fitted), run, silent)
    assert found["eval_kl"] == pytest.approx(begun.kl.value, abs=tiny.nats())
    cold = adapt(distilling(model, tmp_path / "cold", staleness=0.0), run, silent)
    assert found["eval_kl"] < 0.8 * cold["eval_kl"] and log(tmp_path / "out")[0][1] < 0.8 * log(tmp_path / "cold")[0][1]
    asked = json.loads((tmp_path / "out" / "run.json").read_text())
    assert asked["init_from"] == str(fitted) and "init_from" in asked["contents"]
    told = [
        "that were fitted or trained for it before" in (tmp_path / name / "README.md").read_text()
        for name in ("out", "cold")
    ]
    assert told == [True, False]


def test_a_network_beside_fitted_weights(model: Path, data: Path, fitted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = training(data, 30, valid=data, eval_every=30, lr=1e-2)
    found = adapt(distilling(model, out, init_from=fitted, method="side", reduction=1), run, silent)
    text, original = Shards.open(data).read(0, 12 * SEQ_LEN + 1), AutoModelForCausalLM.from_pretrained(model)
    backbone = AutoModelForCausalLM.from_pretrained(fitted)
    begun = distance(backbone, original, text, window=SEQ_LEN).kl.value
    ended = distance(SideModel.load(out, backbone), original, text, window=SEQ_LEN).kl.value
    assert found["eval_kl"] == pytest.approx(ended, abs=tiny.nats()) and ended < begun
    assert f'from_pretrained("{fitted}")' in (out / "README.md").read_text()
    with pytest.raises(LadderError, match="has other weights: load it with its own backbone"):
        SideModel.load(out, rewire(original, "ladder"))
    SideModel.load(out, AutoModelForCausalLM.from_pretrained(fitted, dtype=torch.bfloat16))


@pytest.mark.parametrize("changes, message", [
    ({"wiring": "standard"}, "the wiring is standard, as the model is: there is nothing to fit"),
    ({"wiring": "rope"}, "unknown wiring 'rope'"),
    ({"wiring": "desync-2x"}, "'desync-2x' leaves partial sums on their ranks, each of which would need weights of"),
    ({"model": "fitted"}, "is wired already: name its original"),
    ({"model": "nothing"}, "no model '.*nothing': there is no such directory"),
    ({"out": "model"}, "is there already: name a new folder"),
    ({"data": "nothing"}, "no such folder of tokens: .*nothing; ladder data makes one"),
    ({"data": "other"}, "other was tokenized with another tokenizer than"),
    ({"seq_len": 128}, "--seq-len 128 is more than the model's context of 64"),
    ({"batch": 10_000}, r"has \d+ tokens: a batch of 10000 sequences of 16 and a tenth to measure on are needed"),
    ({"batch": 0}, "batch must be at least 1, not 0"),
    ({"tokens": 0}, "tokens must be at least 1, not 0"),
    ({"ridge": 0.0}, "ridge must be from 1e-06 to 1000, not 0.0"),
    ({"tokens": 1, "batch": 1, "wiring": "ladder@2"}, "is farther from its original .* than merely rewired"),
    ({"out": "partial"}, "out.partial is there already"),
    ({"ridge": float("nan")}, "ridge must be from"),
    ({"dtype": "float16"}, "unknown dtype 'float16'"),
    ({"device": "tpu"}, "unknown device 'tpu'"),
])  # fmt: skip
def test_refused(changes: dict[str, Any], message: str, model: Path, data: Path, fitted: Path, tmp_path: Path) -> None:
    folders = {"model": model, "fitted": fitted, "nothing": tmp_path / "a" / "nothing", "partial": tmp_path / "out"}
    if changes.get("out") == "partial":
        (tmp_path / "out.partial").mkdir()
    if changes.get("data") == "other":
        folders["other"] = tiny.tokens(tmp_path / "other", seed=2, vocab=280)
    given = {name: folders.get(value, value) if isinstance(value, str) else value for name, value in changes.items()}
    with pytest.raises(LadderError, match=message) as refused:
        fit(options(**{"model": model, "out": tmp_path / "out", "data": data, **given}), silent)
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial").exists() == (changes.get("out") == "partial")


def test_no_one_solution() -> None:
    """Fewer tokens than unknowns, and next to nothing that holds the weights."""
    with pytest.raises(LadderError, match="the equations have no one solution"):
        solve(host("llama"), "ladder", drawn(1)[:, :4], 1e-12, batch=1)


@pytest.mark.parametrize("changes, message", [
    ({"init_from": "nothing"}, "no such folder: .*nothing; ladder fit makes one"),
    ({"init_from": "model"}, "is wired 'standard', not 'ladder': name weights of the same wiring"),
    ({"init_from": "fitted", "wiring": "ladder-2"}, "is wired 'ladder', not 'ladder-2'"),
    ({"init_from": "fitted", "ranks": 2}, "is for 1 ranks, not 2: name weights for the same number"),
    ({"init_from": "empty"}, "empty has no config.json: name a finished model"),
    ({"init_from": "wide"}, "is of another model: its intermediate_size is 64, not 48"),
    ({"init_from": "fitted", "staleness": 0.5}, "--init-from is of the wiring already, where --staleness ends"),
])  # fmt: skip
def test_adapt_refuses(
    changes: dict[str, Any], message: str, model: Path, data: Path, fitted: Path, tmp_path: Path
) -> None:
    folders = {"model": model, "fitted": fitted, "nothing": tmp_path / "nothing", "empty": tmp_path / "empty"}
    folders["empty"].mkdir()
    if changes["init_from"] == "wide":
        folders["wide"] = tiny.model(tmp_path / "wide", data, intermediate_size=64)
    changes = {**changes, "init_from": folders[changes["init_from"]]}
    with pytest.raises(LadderError, match=message) as refused:
        adapt(distilling(model, tmp_path / "out", **changes), training(data), silent)
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()
