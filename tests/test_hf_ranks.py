"""Emulated ranks in the transformers host: what so many tensor-parallel ranks would compute, from one model."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ladder.checkpoint import load
from ladder.comm.base import Comm
from ladder.comm.emulated import World
from ladder.comm.stacked import Stacked
from ladder.config import ModelConfig
from ladder.errors import LadderError
from ladder.hf import rewire, set_staleness
from ladder.hf.ranks import BiasOnce, RankSlice
from ladder.model import Decoder
from tests import oracle
from tests.hosts import BACKWARD, FORWARD, LAYERS, _attention, _mlp, host
from tests.test_hf import assert_same, close, loss_and_gradients, padded, tokens, training_loss
from tests.tolerance import summed, unit
from tests.weights import Given, joined, shard_gradients

SAME = ("ladder", "parallel", "parallel-1", "ladder-2", "standard:2 ladder:2")  # at every degree
DRIFTING = (
    *("desync-2x", "desync-4x", "desync-8x", "desync-2x-1", "desync-4x-2"),
    *("desync-2x:2 ladder:2", "ladder:2 desync-2x:2", "none:1 ladder:3", "parallel:1 desync-4x:2 parallel:1"),
    *("desync-3x-1:1 parallel-1:3", "parallel-2:2 desync-2x-1:2"),
    "desync-3x:1 ladder-2:2 desync-2x:1",  # sums that carry drift are on the wire between layers
    *("desync-3x", "desync-5x-1", "ladder:2 desync-3x:2"),  # the last MLP reduces within a cycle
)
BIASED = {"attention_bias": True, "mlp_bias": True}
NARROWER = unit(torch.float64) / unit(torch.float32)  # a bound for float32, applied to float64
ANGLES = summed(LAYERS * 11, torch.float32)  # those of rotary embeddings are float32: as many roundings as positions


def rows(text: str) -> list[str]:
    """One row name per layer."""
    if ":" not in text:
        return [text] * LAYERS
    return [name for name, count in (item.split(":") for item in text.split()) for _ in range(int(count))]


def native(model: Any, text: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The same model in our own terms."""
    config = ModelConfig.from_hf(copy.deepcopy(model.config).to_dict()).rewired(text)
    return config, {name: weight.detach() for name, weight in model.state_dict().items()}


def made(config: ModelConfig, weights: dict[str, Tensor], comm: Comm) -> Decoder:
    return load(Decoder(config, comm, dtype=torch.float64), Given(weights)).requires_grad_(True)


def float64_norm(norm: Any, x: Tensor) -> Tensor:
    """transformers' own is in float32, whatever it is given."""
    scaled: Tensor = norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return scaled


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("text", DRIFTING)
def test_the_oracle_and_the_decoder(
    monkeypatch: pytest.MonkeyPatch, worlds: dict[int, World], text: str, ranks: int
) -> None:
    """Logits and gradients; four ranks have copies of the two key/value heads, and biases belong to the first."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", float64_norm)
    model = host("llama", attn_implementation="sdpa", **BIASED).double()
    config, weights = native(model, text)
    rewire(model, text, ranks=ranks)
    logits = model(tokens()).logits
    assert close(logits, oracle.logits(config, weights, tokens(), rows(text), ranks), ANGLES)

    models = worlds[ranks].run(lambda comm: made(config, weights, comm))
    theirs = worlds[ranks].run(lambda comm: joined(models[comm.rank], models[comm.rank](tokens())))[0]
    assert close(logits, theirs, FORWARD * NARROWER)
    sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    loss_and_gradients(torch.nn.ModuleList(models), theirs)
    for each in models:
        for shard, gradient in shard_gradients(each):
            sums[shard.name][shard.index] += gradient
    ours = loss_and_gradients(model, logits)
    assert ours.keys() == sums.keys() and all(sums[name].abs().max() > 1e-3 for name in sums)
    assert all(close(ours[name], sums[name], BACKWARD * NARROWER) for name in sums)


def naive(model: Any, text: str, ranks: int, **inputs: Any) -> Tensor:
    """An untouched model's logits, from copies of it whose output projections lack what other ranks have."""
    embedding: list[Tensor] = []
    calls: list[dict[str, Any]] = []

    def look(layer: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        embedding.append(arguments[0])
        calls.append(named)

    hooks = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in model.model.layers]
    model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    copies = [share(model, rank, ranks) for rank in range(ranks)]
    streams, table, kind = oracle.Streams(embedding[0], ranks), oracle.schedule(rows(text)), model.config.model_type
    for index, call in enumerate(calls):
        layers = [each.model.layers[index] for each in copies]
        for half, blocks in enumerate(([_attention(kind, x, call) for x in layers], [_mlp(kind, x) for x in layers])):
            lag, out = table[2 * index + half]
            streams.write([block(x) for block, x in zip(blocks, streams.read(lag), strict=True)], out)
    logits: Tensor = model.lm_head(model.model.norm(streams.read(0)[0]))
    return logits / getattr(model.config, "logits_scaling", 1.0)


def share(model: Any, rank: int, ranks: int) -> Any:
    """A copy with one rank's columns of the output projections."""
    own = copy.deepcopy(model)
    for layer in own.model.layers:
        for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
            step = out.weight.shape[1] // ranks
            with torch.no_grad():
                out.weight[:, : rank * step] = 0
                out.weight[:, (rank + 1) * step :] = 0
                if out.bias is not None and rank:
                    out.bias.zero_()
    return own


@pytest.mark.parametrize("name", ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "granite"))
def test_families(name: str) -> None:
    """With prompts of different lengths, so that who sees whom differs from line to line."""
    more = BIASED if name in ("llama", "smollm3") else {}
    model, inputs = host(name, **more), padded()
    seen = inputs["attention_mask"].bool()
    plain = copy.deepcopy(model)
    found = {}
    for text, ranks in (("desync-2x", 2), ("desync-4x", 4), ("desync-3x:2 ladder:2", 2)):
        found[text] = rewire(model, text, ranks=ranks)(**inputs).logits[seen]
        assert close(found[text], naive(plain, text, ranks, **inputs)[seen], FORWARD), text
    one = rewire(model, "desync-2x")(**inputs).logits[seen]
    assert (found["desync-2x"] - one).abs().max() > 1e-2  # ranks matter


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("text", SAME)
def test_ranks_change_nothing_without_drift(text: str, ranks: int) -> None:
    """Not one bit, nor how much is computed: no line of the batch is computed twice."""
    model = rewire(host("llama", **BIASED), text)
    expected = model(tokens()).logits
    gradients = loss_and_gradients(model, expected)
    rewire(model, text, ranks=ranks)
    lines: list[int] = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda _, arguments: lines.append(len(arguments[0])))
    found = model(tokens()).logits
    assert torch.equal(found, expected) and lines == [2]
    again = loss_and_gradients(model, found)
    assert all(close(again[name], gradients[name], BACKWARD) for name in gradients)


def test_the_attention_of_desync_2x_is_computed_once() -> None:
    """All ranks read the same there: only what its output projection makes of it differs."""
    model = rewire(host("llama"), "desync-2x", ranks=4)
    lines: dict[str, int] = {}
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp"):
        module = model.model.layers[2].get_submodule(name)
        module.register_forward_pre_hook(lambda _, x, name=name: lines.__setitem__(name, len(x[0])))
    model(tokens(), use_cache=False)
    assert lines == {"self_attn.q_proj": 2, "self_attn.o_proj": 8, "mlp": 8}


def test_wired_anew() -> None:
    """With other ranks, with none, and as it was born; no hook is left."""
    model, plain = host("llama", **BIASED), host("llama", **BIASED)
    for ranks in (2, 4, 1):
        fresh = rewire(host("llama", **BIASED), "desync-2x", ranks=ranks)
        assert torch.equal(rewire(model, "desync-2x", ranks=ranks)(tokens()).logits, fresh(tokens()).logits)
    other = copy.deepcopy(rewire(model, "desync-4x", ranks=2))
    expected = model(tokens()).logits
    rewire(model, "standard", ranks=2)
    assert torch.equal(model(tokens()).logits, plain(tokens()).logits) and not hasattr(model.config, "wiring_ranks")
    hooks = [hook for module in model.modules() for table in (module._forward_pre_hooks, module._forward_hooks)
             for hook in table.values()]  # fmt: skip
    assert not any(isinstance(hook, RankSlice | BiasOnce) for hook in hooks)
    assert torch.equal(other(tokens()).logits, expected)


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = rewire(host("llama"), "desync-2x", ranks=2)
    expected = model(tokens()).logits
    assert model.config.wiring_ranks == 2 and model.name_or_path.endswith("save it, and load that")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config.wiring_ranks == 2 and torch.equal(loaded(tokens()).logits, expected)
    assert torch.equal(rewire(loaded)(tokens()).logits, expected)
    assert pickle.loads(pickle.dumps(loaded.config)).wiring_ranks == 2
    made = AutoModelForCausalLM.from_config(loaded.config, attn_implementation="eager")
    made.load_state_dict(model.state_dict())
    assert torch.equal(made.eval()(tokens()).logits, expected)
    rewire(loaded, "desync-2x")  # named anew: of one rank, as the staleness is 1 again
    assert not hasattr(loaded.config, "wiring_ranks")
    assert (loaded(tokens()).logits - expected).abs().max() > 1e-2
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace('_ranks": 2', '_ranks": "2"'))
    with pytest.raises(LadderError, match="number of ranks must be a whole number from 1, not '2'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ("desync-2x", "desync-3x:1 ladder-2:2 desync-2x:1"))
def test_compiled_and_checkpointed(text: str) -> None:
    torch.compiler.reset()
    model = rewire(host("llama", use_cache=False), text, ranks=2).train()
    expected = training_loss(model)
    assert_same(training_loss(model, torch.compile(model, fullgraph=True, backend="eager")), expected)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        assert_same(training_loss(model), expected)


def test_generation() -> None:
    """With a cache as without, and a beam search that would sort the cache's lines is told what to do."""
    model = rewire(host("llama"), "desync-4x", ranks=2)
    inputs = padded()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found = [model.generate(**inputs, use_cache=use_cache, **options) for use_cache in (True, False)]
    assert torch.equal(*found) and found[0].shape == (3, 17)
    with pytest.raises(LadderError, match="the cache has 9 sequences, the emulated ranks have 18: use use_cache=False"):
        model.generate(**inputs, num_beams=3, **options)
    assert model.generate(**inputs, num_beams=3, use_cache=False, **options).shape == (3, 17)


def test_staleness_beside_drift() -> None:
    """A stale reader's way from the standard model to its wiring goes on where a sum carries drift."""
    mixed = {value: rewire(host("llama"), "desync-3x:2 ladder:2", [1, 1, value, value], ranks=2)(tokens()).logits
             for value in (0.0, 0.5, 1.0)}  # fmt: skip
    standard = rewire(host("llama"), "desync-3x:2 standard:2", ranks=2)(tokens()).logits
    ladder = rewire(host("llama"), "desync-3x:2 ladder:2", ranks=2)(tokens()).logits
    assert close(mixed[0.0], standard, FORWARD) and close(mixed[1.0], ladder, FORWARD)
    assert min((mixed[0.5] - end).abs().max() for end in (standard, ladder)) > 1e-3
    model = rewire(host("llama"), "desync-3x:2 ladder:2", [1, 1, 0, 0], ranks=2)
    with pytest.raises(LadderError, match=r"layer 0 keeps partial sums local .* must be 1, not 0.5"):
        set_staleness(model, 0.5)
    set_staleness(model, [1, 1, 0.5, 0.5])
    assert close(model(tokens()).logits, mixed[0.5], FORWARD) and model.config.wiring_ranks == 2


def test_hidden_states_are_the_ranks_mean() -> None:
    model = rewire(host("llama"), "desync-4x", ranks=2)
    seen: list[Tensor] = []
    model.model.layers[1].input_layernorm.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    states = model(tokens(), output_hidden_states=True).hidden_states
    assert len(states) == LAYERS + 1 and all(state.shape == (2, 11, 32) for state in states)
    first, second = seen[0].chunk(2)
    assert (first - second).abs().max() > 1e-2 and close(states[1], (first + second) / 2, summed(2, torch.float32))


def test_adapters() -> None:
    """Put on an output projection they must be divided as it is, or be refused."""
    base = host("llama", **BIASED)
    model = get_peft_model(rewire(base, "desync-2x", ranks=2), LoraConfig(task_type="CAUSAL_LM", r=4,
                           target_modules=["o_proj", "down_proj", "q_proj"]))  # fmt: skip
    with pytest.raises(LadderError, match=r"o_proj of layer 0 was replaced .*: call rewire\(model\) once more"):
        model(input_ids=tokens())
    rewire(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    model.eval()
    found = model(input_ids=tokens()).logits
    merged = rewire(copy.deepcopy(model).merge_and_unload(), "standard")
    assert (found - rewire(host("llama", **BIASED), "desync-2x", ranks=2)(tokens()).logits).abs().max() > 1e-2
    assert close(found, naive(merged, "desync-2x", 2, input_ids=tokens()), FORWARD)


@pytest.mark.parametrize("name, text, ranks, message", [
    ("gemma2", "desync-2x", 2, "gemma2 cannot be divided among emulated ranks: those that can are llama, mistral"),
    ("mixtral", "ladder", 2, "mixtral cannot be divided among emulated ranks"),
    ("llama", "desync-2x", 3, "3 ranks cannot share 4 heads, 2 key/value heads and ffn 48 evenly"),
    ("llama", "desync-2x", 0, "the number of ranks must be a whole number from 1, not 0"),
    ("llama", "desync-2x", 2.0, "the number of ranks must be a whole number from 1, not 2.0"),
    ("llama", "none", 2, "wiring 'none' ends with partial sums that are kept local"),
    ("llama", "desync-3x-local", 2, "each of 2 ranks would have other logits"),
])  # fmt: skip
def test_refused(name: str, text: str, ranks: Any, message: str) -> None:
    """Before anything is changed."""
    model = host(name)
    with pytest.raises(LadderError, match=message):
        rewire(model, text, ranks=ranks)
    assert torch.equal(model(tokens()).logits, host(name)(tokens()).logits) and not hasattr(model.config, "wiring")
    with pytest.raises(LadderError, match=r"must be 1, not 0\.5"):
        rewire(host("llama"), "desync-2x", 0.5, ranks=2)


def test_packed_texts_are_refused() -> None:
    """Where the attention runs once for each rank: their ends are no lines of a batch."""
    ends = {"cu_seq_lens_q": torch.tensor([0, 5, 11]), "use_cache": False}
    rewire(host("llama"), "desync-2x", ranks=2)(tokens(), **ends)
    with pytest.raises(LadderError, match="cannot run packed sequences"):
        rewire(host("llama"), "desync-4x", ranks=2)(tokens(), **ends)


def test_the_communicator(worlds: dict[int, World]) -> None:
    x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    stacked = Stacked(4)
    total = stacked.all_reduce(x).wait()
    limit = summed(4, torch.float32, float(x.abs().sum(0).max()))
    assert close(total[0], worlds[4].run(lambda comm: comm.all_reduce(x[comm.rank]).wait())[0], limit)
    assert stacked.all_reduce(total).wait() is total  # a sum already
    assert torch.equal(stacked.all_gather(x)[0], worlds[4].run(lambda comm: comm.all_gather(x[comm.rank]))[0])
    assert torch.equal(stacked.all_gather(total)[0], torch.cat([total[0]] * 4, dim=-1))
