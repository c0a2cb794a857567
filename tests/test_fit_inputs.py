"""ladder fit for models that read more than text: the data are a file of their inputs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.scan import solve
from ladder.scan.checkpoints import read_original
from ladder.scan.fit_inputs import fit_inputs, reads_inputs
from ladder.scan.inputs import Inputs, output_distance
from ladder.scan.options import FitOptions
from ladder.scan.solve import solve_inputs
from tests.residuals import MODELS, build, inputs
from tests.test_residuals_saved import auto


def examples(name: str, count: int, seed: int = 1) -> dict[str, Tensor]:
    """As the model's inputs, but others; texts are of different lengths."""
    g = torch.Generator().manual_seed(seed)
    found = {}
    for key, value in inputs(name, 1).items():
        if key in ("input_ids", "decoder_input_ids"):
            found[key] = torch.randint(3, 96, (count, value.shape[1]), generator=g)
        elif key == "attention_mask":
            found[key] = (torch.arange(value.shape[1]) < torch.randint(5, 10, (count, 1), generator=g)).long()
        else:
            found[key] = torch.randn(count, *value.shape[1:], generator=g)
    return found


def silent(*_: Any) -> None:
    pass


@pytest.mark.parametrize("name", MODELS)
def test_comes_nearer_on_others(name: str) -> None:
    original = build(name)
    rewired = rewire(copy.deepcopy(original), "ladder")
    held_out = Inputs(examples(name, 16, seed=2))
    begun = output_distance(rewired, original, held_out, 8).value
    count = 768 if name == "t5-gated" else 192  # random gates are hardly linear
    fitted = solve_inputs(copy.deepcopy(original), "ladder", Inputs(examples(name, count)).batches(32))
    ended = output_distance(fitted, original, held_out, 8).value
    assert ended < 0.8 * begun
    assert fitted.config.wiring == "ladder"


@pytest.mark.parametrize("kind, adding", [
    ("dinov2", ("lambda1",)), ("whisper", ("out_proj.", "fc2.")), ("t5", (".o.", ".wo.")),
])  # fmt: skip
def test_nothing_to_correct(kind: str, adding: tuple[str, ...]) -> None:
    """Sub-blocks that add nothing leave nothing out: no weight moves, also where nothing scales them."""
    model = build(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in adding):
                parameter.zero_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after = solve_inputs(model, "ladder", Inputs(examples(kind, 32)).batches(16)).state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_decoder_is_fitted_to_what_its_fitted_encoder_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: on what its original's encoder said it comes less near."""
    original, held_out, data = build("whisper"), Inputs(examples("whisper", 32, seed=2)), examples("whisper", 384)
    ours = solve_inputs(copy.deepcopy(original), "ladder-2", Inputs(data).batches(32))
    own, recorded = solve.input_calls, dict[Any, Any]()

    def remembered(model: Any, layers: Any, batches: Any) -> Any:
        kind = type(layers[0])
        if kind not in recorded:
            recorded[kind] = own(model, layers, batches)
        return recorded[kind]

    monkeypatch.setattr(solve, "input_calls", remembered)
    theirs = solve_inputs(copy.deepcopy(original), "ladder-2", Inputs(data).batches(32))
    near, far = (output_distance(each, original, held_out, 8).value for each in (ours, theirs))
    assert near < 0.97 * far


def written(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def test_writes_a_checkpoint(tmp_path: Path) -> None:
    build("vit").save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "preprocessor_config.json").write_text("{}")
    assert reads_inputs(str(tmp_path / "in"))
    data, out = written(tmp_path / "images.safetensors", examples("vit", 220)), tmp_path / "out"
    found = fit_inputs(FitOptions(str(tmp_path / "in"), out, "standard:1 ladder:2", data), silent)
    assert found.examples == 192 and found.fitted.value < 0.8 * found.rewired.value
    assert found.fitted.agreement is not None
    loaded = auto("vit").from_pretrained(out, attn_implementation="eager")
    assert loaded.config.wiring == "standard:1 ladder:2"
    again = output_distance(loaded, build("vit"), Inputs(examples("vit", 220)).split(8)[1], 8)
    assert again.value == pytest.approx(found.fitted.value, rel=1e-3)
    card = (out / "README.md").read_text()
    assert "AutoModelForImageClassification.from_pretrained" in card and "It was fitted on 192 examples: KL" in card
    assert (out / "preprocessor_config.json").exists()


@pytest.mark.parametrize("name, changes, message", [
    ("bert", {"wiring": "parallel"}, "impossible in a post-norm model"),
    ("vit", {"wiring": "standard"}, "there is nothing to fit"),
    ("vit", {"wiring": "desync-2x"}, "leaves partial sums on their ranks"),
    ("vit", {"wiring": "rope"}, "unknown wiring 'rope'"),
    ("vit", {"data": "nothing"}, "is no file of inputs"),
    ("vit", {"data": "text"}, "cannot be read as safetensors"),
    ("vit", {"data": "other"}, "has 'images', which the model is not called with"),
    ("vit", {"data": "nan"}, "must be .* of finite numbers"),
    ("vit", {"batch": 1000}, "20 examples: a batch of 1000 and a tenth to measure on are needed"),
    ("vit", {"tokens": 5}, "--tokens counts tokens of text"),
    ("vit", {"data": "size"}, "the model cannot be called with these examples: .*32"),
    ("t5", {"data": "ids"}, "input_ids must be from 0 to 96, the model's vocabulary, not 1000"),
    ("t5", {"data": "encoder"}, "the model cannot be called with these examples: You must specify"),
])  # fmt: skip
def test_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path / "in")
    files = {
        "nothing": tmp_path / "nothing.safetensors",
        "text": tmp_path / "text.safetensors",
        "other": written(tmp_path / "other.safetensors", {"images": torch.ones(20, 3)}),
        "nan": written(tmp_path / "nan.safetensors", {"pixel_values": torch.full((20, 3), torch.nan)}),
        "size": written(tmp_path / "size.safetensors", {"pixel_values": torch.ones(20, 3, 32, 32)}),
        "ids": written(tmp_path / "ids.safetensors", {**examples("t5", 20), "input_ids": torch.full((20, 9), 1000)}),
        "encoder": written(tmp_path / "encoder.safetensors", {"input_ids": torch.ones(20, 9, dtype=torch.long)}),
        "data": written(tmp_path / "data.safetensors", examples(name, 20)),
    }
    files["text"].write_text("nothing of the kind")
    given = {**changes, "data": files[changes.get("data", "data")]}
    with pytest.raises(LadderError, match=message) as refused:
        fit_inputs(FitOptions(str(tmp_path / "in"), tmp_path / "out", **given), silent)
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()


def test_what_is_for_decoders_says_so(tmp_path: Path) -> None:
    """What the others, and `ladder quantize`, begin with."""
    build("vit").save_pretrained(tmp_path / "in")
    with pytest.raises(LadderError, match=r"is no decoder of text \(vit\): ladder convert, fit and adapt take it"):
        read_original(str(tmp_path / "in"), "ladder", 16)


@pytest.mark.parametrize("name, key", [("bert", "attention_mask"), ("t5", "decoder_attention_mask")])
def test_padding_does_not_count(name: str, key: str) -> None:
    """What a model says about it is its own affair: other tokens there change nothing."""
    original, wired, data = build(name), rewire(build(name), "ladder"), examples(name, 6)
    ids = key.replace("attention_mask", "input_ids")
    mask = (torch.arange(data[ids].shape[1]) < torch.randint(3, 7, (6, 1))).long()
    data = {**data, key: mask}
    other = {**data, ids: data[ids].where(mask.bool(), 5)}
    one, two = (output_distance(wired, original, Inputs(each), 3) for each in (data, other))
    assert one.value == pytest.approx(two.value, rel=1e-4) and one.agreement == two.agreement
    whole = output_distance(wired, original, Inputs({n: t for n, t in data.items() if n != key}), 3)
    assert abs(whole.value / one.value - 1) > 1e-3
