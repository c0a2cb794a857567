"""A checkpoint's files name files of its own folder and no code; JSON has limits. Else there is one sentence."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ladder.checkpoint import INDEX, SINGLE, Directory, Random, load, save
from ladder.config import ModelConfig, fields
from ladder.config.fields import read_json
from ladder.config.inside import check_model, check_tokenizer, is_plain_name
from ladder.engine.text import load_tokenizer
from ladder.errors import LadderError
from ladder.hf.convert import convert
from ladder.hf.load import pretrained
from ladder.model import Decoder
from tests.checkpoints import byte_tokenizer

CONFIG = ModelConfig.named("tiny").first(2)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """In several files, with a tokenizer."""
    folder = tmp_path / "model"
    save(load(Decoder(CONFIG), Random()), folder, file_bytes=100_000)
    byte_tokenizer().save_pretrained(folder)
    return folder


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def point(model: Path, name: str) -> None:
    """The index places one of its tensors in a file of another name."""
    table = json.loads((model / INDEX).read_text())["weight_map"]
    edit(model / INDEX, weight_map={**table, min(table): name})


OPENERS: list[Callable[[Path], object]] = [
    Directory,
    lambda path: convert(str(path), path.parent / "out", "ladder"),
    lambda path: pretrained(AutoModelForCausalLM, str(path)),
]


@pytest.mark.parametrize("name", [
    "../outside.safetensors", "/{}/outside.safetensors", "..", ".", "", "a/b", "a\\b", "a\0b", "x" * 300, "\u0430",
])  # fmt: skip
@pytest.mark.parametrize("opener", OPENERS, ids=["engine", "convert", "transformers"])
def test_an_index_names_files_of_its_folder(name: str, opener: Callable[[Path], object], model: Path) -> None:
    """Also where the file is there, and has the tensors."""
    first = min(json.loads((model / INDEX).read_text())["weight_map"])
    save_file({first: load(Decoder(CONFIG), Random()).embed_tokens.weight}, model.parent / "outside.safetensors")
    point(model, name.format(model.parent))
    with pytest.raises(LadderError, match="is not the plain name of a file in its folder"):
        opener(model)
    assert not (model.parent / "out").exists()


@pytest.mark.parametrize("opener", OPENERS, ids=["engine", "convert", "transformers"])
def test_files_may_be_links_as_in_the_hubs_cache(opener: Callable[[Path], object], model: Path) -> None:
    blobs = model.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..", "blobs", str(number)))
    opener(model)


def test_one_rule_where_there_is_a_single_file_and_an_index(model: Path, tmp_path: Path) -> None:
    """transformers': the single file."""
    save(load(Decoder(CONFIG), Random(seed=9)), tmp_path / "single")
    (tmp_path / "single" / SINGLE).rename(model / SINGLE)
    assert set(Directory(model).files.values()) == {model / SINGLE}
    convert(str(model), tmp_path / "out", "ladder")
    assert [file.name for file in (tmp_path / "out").glob("*safetensors*")] == [SINGLE]
    theirs = pretrained(AutoModelForCausalLM, str(model)).state_dict()
    ours = load(Decoder(CONFIG), Directory(model))
    assert bool((theirs["model.embed_tokens.weight"] == ours.embed_tokens.weight).all())


@pytest.mark.parametrize("values", [
    {"fast_tokenizer_files": ["tokenizer.json", "../other/tokenizer.4.0.json"]}, {"fast_tokenizer_files": "../x"},
    {"fast_tokenizer_files": [3]}, {"tokenizer_file": "../other/tokenizer.json"}, {"vocab_file": "../other"},
])  # fmt: skip
def test_a_tokenizer_names_files_of_its_folder(values: dict[str, object], model: Path) -> None:
    (model.parent / "other").mkdir()
    (model.parent / "other" / "tokenizer.json").write_text("{}")
    edit(model / "tokenizer_config.json", **values)
    for opener in (
        check_tokenizer,
        lambda path: load_tokenizer(path, 320),
        lambda path: pretrained(AutoTokenizer, str(path)),
    ):
        with pytest.raises(LadderError, match="which is not a file of its folder"):
            opener(model)


def test_names_of_the_machine_that_made_a_tokenizer_do_no_harm(model: Path) -> None:
    edit(
        model / "tokenizer_config.json",
        tokenizer_file=str(model.parent / "elsewhere" / "tokenizer.json"),
        auto_map={"AutoTokenizer": ["a.B", None]},
    )
    assert load_tokenizer(model, 320) is not None


def test_a_huge_id_is_not_counted_up_to(model: Path) -> None:
    raw = json.loads((model / "tokenizer.json").read_text())
    raw["model"]["vocab"]["a"] = 2**31
    (model / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(LadderError, match="has the number 2147483648, which can be no token's id"):
        load_tokenizer(model, 320)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"])
def test_a_pipe_in_a_files_place_is_not_waited_for(name: str, model: Path) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    with pytest.raises(LadderError, match="is not a file"):
        load_tokenizer(model, 320)
    with pytest.raises(LadderError, match="is not a file"):
        check_model(model)


def test_no_code_is_loaded(model: Path) -> None:
    """Code beside the weights is not run, even where the config asks for it."""
    (model / "code.py").write_text("raise SystemExit('run')")
    edit(model / "config.json", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})
    assert Directory(model).config == CONFIG
    pretrained(AutoModelForCausalLM, str(model))
    edit(model / "config.json", model_type="unheard-of")
    with pytest.raises(LadderError, match="unknown model family 'unheard-of'"):
        Directory(model)
    with pytest.raises(LadderError, match="cannot be loaded"):
        pretrained(AutoConfig, str(model))


def test_an_implementation_on_the_hub_is_refused(model: Path) -> None:
    edit(model / "config.json", text_config=[{"attn_implementation": "org/kernel"}])
    with pytest.raises(LadderError, match="attn_implementation 'org/kernel' names code on the hub"):
        pretrained(AutoModelForCausalLM, str(model))


def test_an_adapter_is_refused(model: Path) -> None:
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "../other"}')
    with pytest.raises(LadderError, match="is an adapter, which names another model"):
        pretrained(AutoModelForCausalLM, str(model))
    own = {"base_model_name_or_path": "", "peft_type": "LORA"}
    for more, why in (({}, "without weights"), ({"megatron_config": {}}, "not of an adapter that ladder adapt has")):
        (model / "adapter_config.json").write_text(json.dumps({**own, **more}))
        with pytest.raises(LadderError, match=why):
            pretrained(AutoModelForCausalLM, str(model))


@pytest.mark.parametrize("text, why", [
    ('{"a": NaN}', "NaN is no number"), ('{"a": [-Infinity]}', "-Infinity is no number"),
    ('{"a": 1e999}', "1e999 is no number"),
    ('{"a": 1, "a": 2}', "it has the key 'a' twice"), ("[" * 10**6, "nested too deeply"),
    ('{"a":' * 10**5, "nested too deeply"),
    ("1" * 5000, "digits"), ("[]", "not a JSON object"), ('{"a": "\n"}', "cannot be read as JSON"), ("\ufeff{}", "BOM"),
])  # fmt: skip
def test_json_has_limits(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(LadderError, match=why) as error:
        read_json(tmp_path / "x.json")
    assert "\n" not in str(error.value)


def test_large_json_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "MOST_JSON", 10)
    (tmp_path / "x.json").write_text('{"a": 12345}')
    with pytest.raises(LadderError, match="has 12 bytes: at most 10 are read as JSON"):
        read_json(tmp_path / "x.json")


def test_plain_names() -> None:
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", "a b.bin", ".hidden"):
        assert is_plain_name(name)
    for name in ("", ".", "..", "...", "a/b", "a\\b", "a\n", "\0", None, 3, ["a"]):
        assert not is_plain_name(name)
