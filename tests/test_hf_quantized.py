"""Quantized checkpoints in transformers: converted, rewired, measured, and with an adapter trained beside them.

compressed-tensors makes them, with its own quantizers. bitsandbytes and torchao are not among the tests' packages: a
linear layer of another class stands in for theirs.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import ladder.hf
from ladder.checkpoint import Directory, load
from ladder.data.shards import Shards
from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.convert import convert
from ladder.hf.evaluate import Arm, evaluate
from ladder.hf.load import pretrained
from ladder.hf.measures import distance
from ladder.hf.ranks import output_projection
from ladder.hf.wire import layers_of
from ladder.model import Decoder
from ladder.scan.fit import fit
from ladder.scan.options import FitOptions
from ladder.train.distill import adapt
from ladder.train.options import AdaptOptions
from tests import training as tiny
from tests.quantizing import RECIPES, Tensors, quantized, regions
from tests.tolerance import forward
from tests.training import SEQ_LEN, Stop, adapting, distilling, log, silent, until, weights

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import CompressedTensorsConfig

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # as the card has it
FORMATS = ("fp8-channel", "int8-channel", "int4-32")
HYBRID = "standard:1 ladder:2"
TOKENS = torch.tensor([[5, 17, 9, 80, 3, 41, 7, 2]])
LIMIT = forward(3, 128, TOKENS.shape[1])
ROWS = 12  # of an evaluation
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that all others are made from."""
    return tiny.model(tmp_path_factory.mktemp("whole") / "whole", data, hidden_size=64, intermediate_size=128)


@pytest.fixture(scope="module")
def made(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """By format: a checkpoint that the library has quantized, and a dense one of the same values."""
    root, known = tmp_path_factory.mktemp("made"), dict[str, tuple[Path, Path]]()

    def make(name: str) -> tuple[Path, Path]:
        if name not in known:
            known[name] = by_library(root / name, whole, name), dequantized(root / f"{name}-dense", root / name, name)
        return known[name]

    return make


def by_library(folder: Path, whole: Path, name: str) -> Path:
    """As llm-compressor saves a model."""
    shutil.copytree(whole, folder)
    model, recipe = AutoModelForCausalLM.from_pretrained(whole), RECIPES[name]
    settings = {key: value for key, value in recipe.settings.items() if key != "quantization_status"}
    apply_quantization_config(model, QuantizationConfig.model_validate(settings))
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is not None:
            scale, zero = calculate_qparams(*regions(module.weight.detach(), recipe.storage), scheme.weights)
            module.weight_scale.data, module.weight_zero_point.data = scale, zero
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=recipe.settings["format"])
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return folder


def dequantized(folder: Path, source: Path, name: str) -> Path:
    shutil.copytree(source, folder)
    stored, dense, recipe = weights(source), Tensors(), RECIPES[name]
    for key, tensor in stored.items():
        module, _, end = key.rpartition(".")
        if f"{module}.weight_scale" not in stored:
            dense[key] = tensor
        elif end in ("weight", "weight_packed"):
            parts = {each.rpartition(".")[2]: stored[each] for each in stored if each.startswith(f"{module}.")}
            dense[f"{module}.weight"] = recipe.unpack(parts, recipe.storage)
    save_file(dense, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits  # type: ignore[no-any-return]


def wanted(dense: Path, wiring: str = HYBRID) -> Tensor:
    return logits(rewire(AutoModelForCausalLM.from_pretrained(dense), wiring))


def apart(one: Tensor, other: Tensor) -> float:
    assert other.abs().max() > 1
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("name", FORMATS)
def test_convert(name: str, made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """The same bytes under another wiring; transformers and the native decoder say what the dense model says."""
    source, dense = made(name)
    out = tmp_path / "out"
    convert(str(source), out, HYBRID)
    assert (out / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    before, after = (json.loads((each / "config.json").read_text()) for each in (source, out))
    assert after["quantization_config"] == before["quantization_config"] and after["wiring"] == HYBRID
    card = " ".join((out / "README.md").read_text().split())
    assert "The quantized weights (compressed-tensors)" in card and "ladder generate --model out" in card
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.wiring == HYBRID and model.state_dict().keys() == weights(source).keys()
    expected = wanted(dense)
    assert apart(wanted(dense, "standard"), expected) > 0.01
    assert (
        apart(logits(model), expected) < LIMIT
        and apart(logits(pretrained(AutoModelForCausalLM, str(out))), expected) < LIMIT
    )
    directory = Directory(out)
    with torch.inference_mode():
        assert apart(load(Decoder(directory.config), directory)(TOKENS), expected) < LIMIT


def test_generate(made: Callable[[str], tuple[Path, Path]], tmp_path: Path, run: Run) -> None:
    found = []
    for number, each in enumerate(made("int4-32")):
        assert run("convert", each, tmp_path / str(number), "--wiring", "ladder")[0] == 0
        options = ("--token-ids", "5,17,9", "--max-new-tokens", 6, "--dtype", "float32", "--json")
        status, out, _ = run("generate", "--model", tmp_path / str(number), *options)
        assert status == 0
        found.append(json.loads(out)["token_ids"])
    assert found[0] == found[1] and len(found[0]) == 6


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_rewired_and_saved(
    name: str, dequantize: bool, made: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """Before and after its first pass, in which the library dequantizes the weights, and says so in the config."""
    source, dense = made(name)
    expected = wanted(dense)
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    model = rewire(AutoModelForCausalLM.from_pretrained(source, **options), HYBRID)
    for folder in (tmp_path / "before", tmp_path / "after"):
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder)
        assert again.config.wiring == HYBRID and apart(logits(again), expected) < LIMIT
        assert apart(logits(model), expected) < LIMIT
    raw, stored = json.loads((tmp_path / "before/config.json").read_text()), weights(tmp_path / "before")
    assert ("quantization_config" in raw) != dequantize
    assert dequantize or tiny.same(stored, weights(source))


def test_eval_and_scan(
    made: Callable[[str], tuple[Path, Path]], data: Path, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of the dense model, and nothing on standard error."""
    (source, dense), text = made("int4-32"), data.with_suffix(".txt")
    task = tmp_path / "task.jsonl"
    task.write_text('{"query": "never wait for the", "choices": ["network", "ladder"], "gold": 0}\n' * 3)
    short = tmp_path / "short.txt"
    short.write_text(text.read_text()[:600])
    same = ("--wiring", "standard", "--wiring", "ladder", "--text", short, "--task", task, "--json", "--window", 32)
    figures = []
    capsys.readouterr()  # what the library said while it made the checkpoint
    for each in (source, dense):
        status, out, error = run("eval", each, *same, "--source", dense)
        assert (status, error) == (0, "")
        rows = [json.loads(line) for line in out.splitlines()]
        figures.append({(row["wiring"], row["measure"]): row["value"] for row in rows})
    assert len(figures[0]) == 10 and figures[0] == pytest.approx(figures[1], rel=1e-3, abs=1e-5)
    assert figures[0]["ladder", "kl"] > 0.01 > figures[0]["standard", "kl"]
    status, out, error = run("scan", source, "--data", short, "--tokens", 128, "--seq-len", 32, "--json")
    assert (status, error) == (0, "") and len(out.splitlines()) > 3
    status, _, error = run("scan", source, "--data", short, "--tokens", 128, "--seq-len", 32, "--fit", 512)
    assert status == 2 and "are quantized (compressed-tensors): scan without --fit" in error


def test_formats_that_only_the_whole_config_names(whole: Path, tmp_path: Path) -> None:
    """The library would look for packed weights there, find none, and go on with random ones."""
    source, recipe = shutil.copytree(whole, tmp_path / "source"), RECIPES["int8-channel"]
    stored, dense = quantized(weights(whole), recipe)
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**raw, "quantization_config": recipe.settings}))
    convert(str(source), tmp_path / "out", HYBRID)
    save_file(dense, shutil.copytree(whole, tmp_path / "dense") / "model.safetensors", {"format": "pt"})
    for model in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
        rewire(pretrained(AutoModelForCausalLM, str(source)), HYBRID),
    ):
        assert apart(logits(model), wanted(tmp_path / "dense")) < LIMIT
    del stored["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(LadderError, match=r"lacks the tensor 'model.layers.1.mlp.up_proj.weight_scale'"):
        pretrained(AutoModelForCausalLM, str(source))


@pytest.mark.parametrize("name", ["fp8-channel", "int4-32"])
def test_an_adapter_beside_quantized_weights(
    name: str,
    made: Callable[[str], tuple[Path, Path]],
    data: Path,
    tmp_path: Path,
    run: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It comes near to the quantized model as that was; the weights keep every bit. A stopped run is continued."""
    source, _ = made(name)
    out, options = tmp_path / "out", distilling(source, tmp_path / "out", HYBRID, "lora", staleness=0.0)
    steps = adapting(data, 12, eval_every=12, save_every=4)
    if name == "int4-32":
        with pytest.raises(Stop):
            adapt(options, steps, until(9))
        (out / "final.partial.partial").mkdir()  # as if it had been killed while it wrote the model
    found = adapt(options, steps, silent)
    assert (out / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert not [file for file in out.iterdir() if "partial" in file.name]
    trained = load_file(out / "adapter_model.safetensors")
    assert len(trained) == 3 * 7 * 2 and all(tensor.abs().max() > 0 for tensor in trained.values())
    text = Shards.open(data).read(0, ROWS * SEQ_LEN + 1)
    original = pretrained(AutoModelForCausalLM, str(source))
    begun = distance(rewire(pretrained(AutoModelForCausalLM, str(source)), HYBRID), original, text, window=SEQ_LEN)
    whole = CompressedTensorsConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(out, quantization_config=whole)  # as the card says
    ended = distance(loaded, original, text, window=SEQ_LEN)
    assert ended.kl.value < 0.85 * begun.kl.value and found["eval_kl"] == pytest.approx(ended.kl.value, abs=tiny.nats())
    card = " ".join((out / "README.md").read_text().split())
    assert "The weights are quantized (compressed-tensors) and unchanged" in card and "dequantize=True" in card
    (tmp_path / "text.txt").write_text("never wait for the network")
    capsys.readouterr()
    status, printed, error = run("eval", out, "--text", tmp_path / "text.txt", "--json")
    assert (status, error) == (0, "") and json.loads(printed)["wiring"] == HYBRID
    for verb in (
        ("generate", "--model", out, "--token-ids", "5"),
        ("convert", out, tmp_path / "new", "--wiring", "ladder"),
    ):
        status, _, error = run(*verb)
        assert status == 2 and "has an adapter (adapter_config.json), which is not applied here" in error
    again = distilling(source, tmp_path / "again", HYBRID, "lora", init_from=out)
    with pytest.raises(LadderError, match="has an adapter, which a run cannot start from"):
        adapt(again, steps, silent)


def test_the_original_teaches_its_quantized_copy(
    whole: Path, made: Callable[[str], tuple[Path, Path]], data: Path, tmp_path: Path
) -> None:
    """--init-from: wired and quantized, as fitted and then quantized weights are."""
    convert(str(made("fp8-channel")[0]), tmp_path / "wired", "ladder")
    options = distilling(whole, tmp_path / "out", method="lora", init_from=tmp_path / "wired")
    adapt(options, adapting(data, 8, eval_every=4), silent)
    values = [value for _, value in log(tmp_path / "out", "eval_kl")]
    assert values[-1] < values[0] and weights(tmp_path / "out").keys() == weights(tmp_path / "wired").keys()


@pytest.mark.parametrize("method", ["full", "layers", "side", "fit"])
def test_what_changes_weights_is_refused(
    method: str, made: Callable[[str], tuple[Path, Path]], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a weight is read."""
    source, out = made("int8-channel")[0], tmp_path / "out"
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    message = r"the weights of .* are quantized \(compressed-tensors\): .*quantize what comes out"
    with pytest.raises(LadderError, match=message):
        if method == "fit":
            fit(FitOptions(str(source), out, data=data, seq_len=16, device="cpu"), silent)
        else:
            adapt(AdaptOptions(str(source), out, HYBRID, method), adapting(data, 2), silent)
    assert not out.exists()


@pytest.mark.parametrize("settings", [
    {"quant_method": "bitsandbytes", "load_in_4bit": True}, {"load_in_8bit": True},
    {"quant_method": "torchao", "quant_type": "int8_weight_only"}, {"bits": 4},
])  # fmt: skip
def test_packages_that_are_not_there(settings: dict[str, Any], whole: Path, tmp_path: Path, run: Run) -> None:
    """Converting needs none of them; loading has their sentence."""
    source = shutil.copytree(whole, tmp_path / "source")
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**raw, "quantization_config": settings}))
    (tmp_path / "text.txt").write_text("never wait")
    status, _, error = run("eval", source, "--text", tmp_path / "text.txt")
    assert status == 2 and error.startswith("ladder: ") and error.count("\n") == 1
    status, _, error = run("convert", source, tmp_path / "out", "--wiring", "ladder")
    if "bits" in settings:
        assert status == 2 and "must name a quant_method" in error
    else:
        after = json.loads((tmp_path / "out/config.json").read_text())
        assert status == 0 and after["quantization_config"] == settings
        assert "does not read weights of" in (tmp_path / "out/README.md").read_text()


class Packed(nn.Module):
    """A linear layer that is no `nn.Linear`: codes and scales as buffers, no `weight`, no `bias`."""

    codes: Tensor
    scales: Tensor

    def __init__(self, old: nn.Linear) -> None:
        super().__init__()
        scales = old.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (old.weight.detach() / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes * self.scales)


def packed(source: Path) -> tuple[Any, Any]:
    """A model with such layers, and a dense one of the same values."""
    model, dense = (AutoModelForCausalLM.from_pretrained(source) for _ in range(2))
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers" in name:
            new = Packed(module)
            model.set_submodule(name, new)
            dense.get_submodule(name).weight.data.copy_(new.codes * new.scales)
    return model, dense


def test_layers_of_another_class(whole: Path) -> None:
    """Wired, divided among ranks, differentiated and measured; peft has no adapters for them, and says so."""
    model, dense = packed(whole)
    for wiring, ranks in ((HYBRID, 1), ("desync-2x", 2), ("standard", 1)):
        found, expected = (logits(rewire(each, wiring, ranks=ranks)) for each in (model, dense))
        assert apart(found, expected) < LIMIT
        assert isinstance(output_projection(layers_of(model)[0], layers_of(model)[0].spec.layout.mlp), Packed)
    rewire(model, HYBRID), rewire(dense, HYBRID)
    for each in (model, dense):
        each(input_ids=TOKENS).logits.square().mean().backward()
    one, other = (each.get_input_embeddings().weight.grad for each in (model, dense))
    assert float((one - other).abs().max()) < 100 * LIMIT * float(other.abs().max())
    from ladder.train.distill import _with_lora

    with pytest.raises(LadderError, match="peft has no LoRA for this model"):
        _with_lora(model, 4)


def test_arms_of_quantized_models(made: Callable[[str], tuple[Path, Path]], data: Path, tmp_path: Path) -> None:
    """Measured first, a model can still be trained: its weights are no tensors of inference."""
    source, _ = made("fp8-channel")
    (tmp_path / "text.txt").write_text(data.with_suffix(".txt").read_text()[:1000])
    rows = evaluate([Arm(str(source)), Arm(str(source), "ladder")], text=tmp_path / "text.txt", window=16)
    assert [row["wiring"] for row in rows] == ["standard", "ladder"] and rows[0]["value"] != rows[1]["value"]
    model = pretrained(AutoModelForCausalLM, str(source))
    distance(model, model, list(range(20)), window=8)
    model(input_ids=TOKENS).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad.abs().max() > 0 and ladder.hf
