"""Models that are not decoders, saved and loaded: the classes of their tasks, and software without wirings refuses."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.convert import convert
from ladder.hf.layer import WiredLayer
from tests.residuals import LAYERS, MODELS, TWO_STACKS, build, inputs, result

# besides its Auto class, what else a checkpoint could be loaded by without this package
OTHERS = {
    "vit": ("ViTModel", "ViTForImageClassification"),
    "clip": ("CLIPModel", "CLIPVisionModel", "CLIPTextModel", "CLIPVisionModelWithProjection"),
    "whisper": ("WhisperModel", "WhisperForAudioClassification"),
}
PROGRAM = """
import sys, transformers
from transformers.utils import logging
logging.set_verbosity_error()
for folder, *names in (line.split() for line in sys.stdin):
    for name in names:
        try:
            getattr(transformers, name).from_pretrained(folder)
            print(folder, name)
        except Exception as error:
            assert "ladder" in str(error) or "NoneType" in str(error), error
assert "ladder" not in sys.modules
"""


def auto(name: str) -> Any:
    return getattr(transformers, {"T5EncoderModel": "AutoModelForTextEncoding"}.get(MODELS[name][1], MODELS[name][1]))


@pytest.mark.parametrize("name", MODELS)
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    pattern, given = "standard:1 ladder:2", inputs(name)
    model = rewire(build(name), pattern)
    expected = result(model, given)
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["model_type"] == "ladder" and raw["base_model_type"] == MODELS[name][0] and raw["wiring"] == pattern
    loaded = auto(name).from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config.wiring == pattern and type(loaded).__name__ == type(model).__name__
    assert torch.equal(result(loaded, given), expected)
    made = type(build(name))(pickle.loads(pickle.dumps(loaded.config)))  # of a config alone
    made.set_attn_implementation("eager")
    made.load_state_dict(model.state_dict())
    assert torch.equal(result(made.eval(), given), expected)
    rewire(loaded, "standard").save_pretrained(tmp_path / "plain")
    assert "wiring" not in (tmp_path / "plain" / "config.json").read_text()
    plain = auto(name).from_pretrained(tmp_path / "plain", attn_implementation="eager")
    assert torch.equal(result(plain, given), result(build(name), given))


@pytest.mark.parametrize("name", MODELS)
def test_converted(name: str, tmp_path: Path) -> None:
    """The same weights, the processor's files, and a card that says how to load them."""
    given = inputs(name)
    build(name).save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "preprocessor_config.json").write_text("{}")
    convert(str(tmp_path / "in"), tmp_path / "out", "ladder")
    found = {file.name for file in (tmp_path / "out").iterdir()}
    assert found == {"config.json", "model.safetensors", "preprocessor_config.json", "README.md"} | (
        {"generation_config.json"} & {file.name for file in (tmp_path / "in").iterdir()}
    )
    loaded = auto(name).from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert torch.equal(result(loaded, given), result(rewire(build(name), "ladder"), given))
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"    model = {auto(name).__name__}.from_pretrained" in card
    assert ("Each of its 2 stacks of layers is wired so" in card) == (name in (*TWO_STACKS, "t5-encoder"))
    convert(str(tmp_path / "out"), tmp_path / "back", "standard")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == MODELS[name][0]
    back = auto(name).from_pretrained(tmp_path / "back", attn_implementation="eager")
    assert torch.equal(result(back, given), result(build(name), given))


def test_software_without_wirings_refuses(tmp_path: Path) -> None:
    """In a process of its own: the Auto class, and every class that is named."""
    asked = []
    for name, classes in OTHERS.items():
        rewire(build(name), "ladder").save_pretrained(tmp_path / name)
        build(name).save_pretrained(tmp_path / f"{name}-in")
        convert(str(tmp_path / f"{name}-in"), tmp_path / f"{name}-converted", "ladder")
        asked += [" ".join((str(tmp_path / each), MODELS[name][1], *classes)) for each in (name, f"{name}-converted")]
    asked.append(f"{tmp_path / 'vit-in'} ViTModel")  # a plain one is loaded
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], input="\n".join(asked), capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [f"{tmp_path / 'vit-in'} ViTModel"]


@pytest.mark.parametrize("name", MODELS)
def test_the_sizes_are_stored_elsewhere(name: str, tmp_path: Path) -> None:
    """No class of the family can be made of such a config, whatever else it looks at."""
    rewire(build(name), "ladder").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for part in (raw, *(raw[key] for key in ("text_config", "vision_config") if key in raw)):
        sizes = [key for key in ("vocab_size", "hidden_size", "d_model") if key in part]
        assert sizes and any(part[key] is None for key in sizes)
    assert raw.get("d_model") is None
    own = CONFIG_MAPPING[MODELS[name][0]]
    with pytest.raises(Exception, match="NoneType"):
        own(**{key: value for key, value in raw.items() if key not in ("architectures", "model_type")})


NAMED = {
    "vit": ("ViTModel", "ViTForImageClassification"),
    "siglip": ("SiglipModel", "SiglipTextModel", "SiglipVisionModel"),
    "clip": ("CLIPModel", "CLIPTextModel", "CLIPVisionModel"),
    "bert": ("BertModel",),
    "whisper": ("WhisperModel", "WhisperForConditionalGeneration"),
    "t5": ("T5EncoderModel", "T5ForConditionalGeneration"),
}


@pytest.mark.parametrize("name", NAMED)
def test_classes_that_are_named_load_it_wired(name: str, tmp_path: Path) -> None:
    """With this package; a class may be that of a tower, or of one of two stacks."""
    model = build(name)
    model.save_pretrained(tmp_path / "in")
    convert(str(tmp_path / "in"), tmp_path / "converted", "ladder")
    rewire(model, "ladder").save_pretrained(tmp_path / "saved")
    for folder, each in product(("converted", "saved"), NAMED[name]):
        loaded = getattr(transformers, each).from_pretrained(tmp_path / folder)
        wired = sum(isinstance(module, WiredLayer) for module in loaded.modules())
        assert wired >= LAYERS and wired % LAYERS == 0, each
        assert loaded.config.wiring == "ladder", each
    convert(str(tmp_path / "saved"), tmp_path / "back", "standard")
    assert "wiring" not in (tmp_path / "back" / "config.json").read_text()


def test_the_paper_s_key_and_staleness(tmp_path: Path) -> None:
    """`ladder_layers` counts in every stack; staleness of each layer is that of all stacks, one after the other."""
    given = inputs("t5")
    model = build("t5", ladder_layers=2)
    assert model.config.wiring == "standard:1 ladder:2"
    again = rewire(build("t5"), "standard:1 ladder:2")
    assert torch.equal(result(model, given), result(again, given))
    rewire(model, "ladder", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]).save_pretrained(tmp_path)
    loaded = auto("t5").from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config.staleness == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert torch.equal(result(loaded, given), result(model, given))


def test_a_tower_of_a_wired_model_is_wired(tmp_path: Path) -> None:
    model, given = rewire(build("clip"), "ladder"), {"pixel_values": inputs("clip")["pixel_values"]}
    assert model.vision_model.config.wiring == "ladder"
    model.vision_model.save_pretrained(tmp_path)
    loaded = auto("clip-vision").from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(result(loaded, given), result(model.vision_model, given))
    rewire(model, "standard")
    assert not hasattr(model.vision_model.config, "wiring")


def test_convert_refuses_what_cannot_be_wired(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path / "in")
    with pytest.raises(LadderError, match="impossible in a post-norm model"):
        convert(str(tmp_path / "in"), tmp_path / "out", "parallel")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ("bert", "vit"))
@pytest.mark.parametrize("verb, option", (("eval", "--text"), ("scan", "--data")))
def test_verbs_for_text_refuse_them(
    verb: str, option: str, name: str, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    """A perplexity of BERT's guesses would be a number that means nothing."""
    build(name).save_pretrained(tmp_path / "in")
    (tmp_path / "text.txt").write_text("never wait")
    status, _, err = run(verb, tmp_path / "in", option, tmp_path / "text.txt")
    assert status == 2 and "is no decoder of text" in err, err
