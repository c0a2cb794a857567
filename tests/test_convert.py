"""Converted checkpoints: what is written, what is refused, and that every host gives them the same numbers."""

import json
import os
import resource
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import ladder.hf
from ladder import LLM, SamplingParams
from ladder.checkpoint import INDEX, Directory, load
from ladder.config.card import trained_card
from ladder.errors import LadderError
from ladder.hf.convert import convert
from ladder.model import Decoder
from ladder.wiring import Wiring
from tests import oracle
from tests.checkpoints import byte_tokenizer, tiny
from tests.families import FAMILIES, make
from tests.hosts import CONFIGS, host
from tests.tolerance import forward

HYBRID = "standard:1 ladder:2 parallel:1"
PROMPT = [5, 17, 9, 80, 3]
LIMIT = forward(4, 96, len(PROMPT))  # the families' layers and longest product


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny(tmp_path / "source")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family(name: str, tmp_path: Path) -> None:
    """Converted and loaded, it says what the model that was rewired in memory says, and it can be saved again."""
    host(name).save_pretrained(tmp_path / "source")
    assert str(convert(str(tmp_path / "source"), tmp_path / "out", HYBRID)) == HYBRID
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    tokens = torch.tensor([PROMPT])
    expected = ladder.hf.rewire(host(name), HYBRID)(tokens).logits
    assert torch.equal(model(tokens).logits, expected)
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", attn_implementation="eager")
    assert torch.equal(again(tokens).logits, expected) and again.config.wiring == HYBRID
    plain = ladder.hf.rewire(again, "standard")
    plain.save_pretrained(tmp_path / "plain")  # and back: a checkpoint like any other
    assert "wiring" not in json.loads((tmp_path / "plain/config.json").read_text())
    untouched = type(host(name)).from_pretrained(tmp_path / "plain", attn_implementation="eager")
    assert torch.equal(untouched(tokens).logits, host(name)(tokens).logits)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("wiring", ["ladder", HYBRID, "ladder-1-2"])
def test_all_hosts_agree(name: str, wiring: str, tmp_path: Path) -> None:
    """The native decoder, transformers' layers and the oracle, on one converted checkpoint."""
    make(name, tmp_path / "source")
    convert(str(tmp_path / "source"), tmp_path / "out", wiring)
    tokens = torch.tensor([PROMPT, PROMPT[::-1]])
    directory = Directory(tmp_path / "out")
    with torch.inference_mode():
        native = load(Decoder(directory.config), directory)(tokens)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")  # Gemma 2 needs it
        theirs = model(tokens).logits
    weights = load_file(tmp_path / "out/model.safetensors")
    rows = Wiring.parse(wiring, directory.config.layers).layers
    truth = oracle.logits(directory.config, weights, tokens, rows, ranks=1)
    assert truth.abs().max() > 1
    for one, other in ((native, theirs), (native, truth), (theirs, truth)):
        assert (one.double() - other.double()).abs().max() <= LIMIT * truth.abs().max()


def test_convert_then_the_engine(source: Path, tmp_path: Path) -> None:
    """The same greedy tokens from transformers and from two ranks of the engine."""
    command = [sys.executable, "-m", "ladder", "convert", str(source), str(tmp_path / "out"), "--wiring", HYBRID]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and HYBRID in done.stdout
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompts = [PROMPT, [7], list(range(40, 70))]
    expected = []
    for prompt in prompts:
        inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt))}
        found = model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=0)
        expected.append(found[0, len(prompt) :].tolist())
    with LLM(tmp_path / "out", tp=2) as llm:
        assert [result.token_ids for result in llm.generate(prompts, SamplingParams(24))] == expected


def test_what_is_written(source: Path, tmp_path: Path) -> None:
    (source / "generation_config.json").write_text('{"eos_token_id": 256}')
    (source / "modeling_own.py").write_text("raise SystemExit")
    (source / "pytorch_model.bin").write_bytes(b"old")
    (source / "README.md").write_text("the source's")
    seen: list[tuple[int, int]] = []
    convert(str(source), tmp_path / "out", "ladder", progress=lambda done, total, _: seen.append((done, total)))
    out = tmp_path / "out"
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {file.name for file in out.iterdir()} == names | {"tokenizer_config.json"}
    assert (out / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert seen[-1][0] == seen[-1][1] and [done for done, _ in seen] == sorted(done for done, _ in seen)
    card = (out / "README.md").read_text()
    assert "`source`" in card and "    ladder\n" in card and "needs adaptation" in card and str(tmp_path) not in card
    text = "Never wait for the network"
    assert AutoTokenizer.from_pretrained(out)(text).input_ids == byte_tokenizer()(text).input_ids
    assert [file.name for file in tmp_path.iterdir() if "out" in file.name] == ["out"]


def test_shards_are_copied_and_wired_ones_rewired(tmp_path: Path) -> None:
    make("llama-3").save_pretrained(tmp_path / "source", max_shard_size="100KB")
    assert (tmp_path / "source" / INDEX).exists()
    convert(str(tmp_path / "source"), tmp_path / "one", "ladder")
    convert(str(tmp_path / "one"), tmp_path / "two", "standard:2 ladder:2")
    convert(str(tmp_path / "one"), tmp_path / "same")
    convert(str(tmp_path / "two"), tmp_path / "back", "standard")
    wirings = [AutoModelForCausalLM.from_pretrained(tmp_path / name).config for name in ("one", "two", "same")]
    assert [config.wiring for config in wirings] == ["ladder", "standard:2 ladder:2", "ladder"]
    assert all(config.architectures == ["LlamaForCausalLM"] for config in wirings)
    tokens = torch.tensor([PROMPT])
    back = LlamaForCausalLM.from_pretrained(tmp_path / "back")
    assert torch.equal(back(tokens).logits, make("llama-3")(tokens).logits)


def test_where_both_a_single_file_and_an_index_exist(tmp_path: Path) -> None:
    """transformers, the engine and `convert` read the single file, and an index that is not used is not copied."""
    source = tmp_path / "source"
    whole = make("llama-3", source)
    torch.manual_seed(7)
    other = type(whole)(whole.config)
    other.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    for file in (tmp_path / "shards").glob("model*"):
        file.rename(source / file.name)
    with torch.inference_mode():
        expected = whole(torch.tensor([PROMPT])).logits
        directory = Directory(source)
        native = load(Decoder(directory.config), directory)(torch.tensor([PROMPT]))
        theirs = AutoModelForCausalLM.from_pretrained(source)(torch.tensor([PROMPT])).logits
    assert torch.equal(theirs, expected)
    assert (native - expected).abs().max() <= 1e-5 * expected.abs().max()
    convert(str(source), tmp_path / "out", "ladder")
    assert [file.name for file in (tmp_path / "out").glob("model*")] == ["model.safetensors"]
    (source / "model.safetensors").unlink()
    (source / INDEX).write_text((source / INDEX).read_text().replace("model-00001", "../source/model-00001"))
    with pytest.raises(LadderError, match="not the plain name of a file"):
        Directory(source)


@pytest.mark.parametrize("value, wiring", [(2, "standard:2 ladder:2"), ([0, 3], "ladder:1 standard:2 ladder:1")])
def test_the_papers_configs(value: Any, wiring: str, tmp_path: Path) -> None:
    make("llama-3", tmp_path / "paper")
    config = json.loads((tmp_path / "paper/config.json").read_text())
    (tmp_path / "paper/config.json").write_text(json.dumps({**config, "ladder_layers": value}))
    assert str(convert(str(tmp_path / "paper"), tmp_path / "out")) == wiring
    tokens = torch.tensor([PROMPT])
    expected = ladder.hf.rewire(make("llama-3"), wiring)(tokens).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits, expected)
    for kind in (AutoModelForCausalLM, LlamaForCausalLM):
        inside = kind.from_pretrained(tmp_path / "paper")
        assert torch.equal(inside(tokens).logits, expected) and inside.config.wiring == wiring


def test_nothing_runs_it_as_the_standard_model(source: Path, tmp_path: Path) -> None:
    """Converted, and saved by the engine; in a process of its own, where nobody has taught transformers our type."""
    convert(str(source), tmp_path / "out", "ladder")
    saved = tiny(tmp_path / "saved", "ladder@2-3")
    assert str(Directory(saved).config.wiring) == "standard:2 ladder:2"
    program = f"""
import transformers
for folder in {str(tmp_path / "out")!r}, {str(saved)!r}:
    for name in ("AutoModelForCausalLM", "LlamaForCausalLM", "AutoConfig", "LlamaConfig"):
        try:
            getattr(transformers, name).from_pretrained(folder)
        except Exception as error:
            print(name, type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == 2 * [
        "AutoModelForCausalLM ValueError",
        "LlamaForCausalLM StrictDataclassFieldValidationError",
        "AutoConfig ValueError",
        "LlamaConfig StrictDataclassFieldValidationError",
    ]
    assert "a model of type `ladder`" in done.stderr


def damaged(source: Path, what: str) -> None:
    weights, config = source / "model.safetensors", source / "config.json"
    match what:
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "gone":
            weights.unlink()
        case "pickled":
            weights.rename(source / "pytorch_model.bin")
        case "missing shard" | "wrong index" | "outside":
            weights.rename(source / "part.safetensors")
            place = {"missing shard": "other", "wrong index": "part", "outside": "../source/part"}[what]
            (source / INDEX).write_text(json.dumps({"weight_map": {"a": f"{place}.safetensors"}}))
        case _:
            config.write_text(json.dumps({**json.loads(config.read_text()), **json.loads(what)}))


@pytest.mark.parametrize("what, wiring, message", [
    ("cut", "ladder", "truncated or corrupted"),
    ("gone", "ladder", "has neither model.safetensors nor"),
    ("pickled", "ladder", r"save pickled weights .* as safetensors first"),
    ("missing shard", "ladder", "no such file"),
    ("wrong index", "ladder", "lacks the tensor 'a'"),
    ("outside", "ladder", "not the plain name of a file"),
    ('{"model_type": "xlnet"}', "ladder", "unknown model family 'xlnet': known are llama, .*bloom, .*t5; a new one"),
    ('{"num_hidden_layers": "many"}', "ladder", "cannot be read as llama"),
    ('{"quantization_config": {"bits": 4}}', "ladder", "quantization_config must name a quant_method"),
    ('{"quantization_config": "int4"}', "ladder", "cannot be read as llama"),
    ('{"model_type": "bloom", "apply_residual_connection_post_layernorm": true}', "ladder", "cannot be wired"),
    ('{"model_type": "gpt2", "add_cross_attention": true}', "ladder", "cannot be wired"),
    ('{"hidden_act": "sillu"}', "ladder", r"unknown activation function \(hidden_act\) 'sillu': .* nearest is 'silu'"),
    ('{"hidden_act": ["silu"]}', "ladder", "hidden_act.*silu"),
    ('{"model_type": "gpt2", "activation_function": "x"}', "ladder", r"unknown .* \(activation_function\) 'x'"),
    ('{"model_type": "gemma2", "hidden_activation": "x"}', "ladder", r"unknown .* \(hidden_activation\) 'x'"),
    ("{}", "rope", "unknown wiring 'rope'"),
    ("{}", "ladder:9", "more than the model's 4 layers"),
    ("{}", None, "no wiring: name one"),
])  # fmt: skip
def test_refused(source: Path, tmp_path: Path, what: str, wiring: str | None, message: str) -> None:
    damaged(source, what)
    with pytest.raises(LadderError, match=message):
        convert(str(source), tmp_path / "out", wiring)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_a_place_that_cannot_be_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "closed")
    for out, sentence in (
        ("file/a", "a cannot be made: .*file is a file"),
        ("closed/a", "nothing can be made in .*closed"),
    ):
        with pytest.raises(LadderError, match=sentence):
            convert(str(source), tmp_path / out, "ladder")
    assert not [*(tmp_path / "closed").iterdir()]
    (tmp_path / "closed/empty").mkdir()
    with pytest.raises(LadderError, match=r"nothing can be made in .*closed"):
        convert(str(source), tmp_path / "closed/empty", "ladder")


def test_an_interrupted_one_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(str(source), tmp_path / "out", "ladder", progress=stop)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]
    (tmp_path / "out").mkdir()
    convert(str(source), tmp_path / "out", "ladder")  # an empty folder is as good as none
    with pytest.raises(LadderError, match="is there already"):
        convert(str(source), tmp_path / "out", "ladder")


def test_half_adapted_ones_stay_so(tmp_path: Path) -> None:
    """Without another wiring, the staleness is kept; with one, it begins anew."""
    model = ladder.hf.rewire(make("llama-3"), "ladder", 0.25)
    model.save_pretrained(tmp_path / "source")
    convert(str(tmp_path / "source"), tmp_path / "same")
    convert(str(tmp_path / "source"), tmp_path / "other", "parallel")
    tokens = torch.tensor([PROMPT])
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "same")(tokens).logits, model(tokens).logits)
    assert not hasattr(AutoModelForCausalLM.from_pretrained(tmp_path / "other").config, "staleness")


def test_no_room(source: Path, tmp_path: Path) -> None:
    with patch("ladder.checkpoint.shutil.disk_usage") as usage, pytest.raises(LadderError, match="bytes left"):
        usage.return_value.free = 1000
        convert(str(source), tmp_path / "out", "ladder")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", [OSError, lambda *_: 0])
def test_a_disk_that_cannot_copy_by_itself(source: Path, tmp_path: Path, way: Any) -> None:
    with patch("os.copy_file_range", side_effect=way):
        convert(str(source), tmp_path / "out", "ladder")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_odd_places(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LadderError, match="is a file"):
        convert(str(source), tmp_path / "file" / "x", "ladder")
    for name in ("empty", "target"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    convert(str(source), tmp_path / "link", "ladder")
    assert (tmp_path / "target/config.json").exists()
    monkeypatch.chdir(tmp_path / "empty")
    convert(str(source), Path(), "ladder")
    assert (tmp_path / "empty/config.json").exists()


def test_a_standard_model_needs_nothing_of_ours() -> None:
    for wiring, needs, hides in (("standard", False, False), ("parallel", True, False), ("parallel-1", True, True)):
        card = trained_card("here", "llama", Wiring.parse(wiring, 2), 10)
        assert ("import ladder.hf" in card, "all-reduces hidden" in card) == (needs, hides)
        assert "ladder generate --model here --tp 2" in card


def test_from_the_hub(source: Path, tmp_path: Path) -> None:
    """What is asked of the hub, and that what it sends is moved, not copied."""
    asked: list[Any] = []

    def download(model: str, *, revision: str | None, local_dir: Path, allow_patterns: list[str]) -> None:
        asked.append((model, revision, "config.json" in allow_patterns))
        for file in source.iterdir():
            os.link(file, local_dir / file.name)

    with patch("ladder.hf.convert.snapshot_download", download):
        convert("org/name", tmp_path / "out", "ladder", revision="main")
    assert asked == [("org/name", "main", True)]
    assert (tmp_path / "out/model.safetensors").stat().st_ino == (source / "model.safetensors").stat().st_ino
    assert "base_model: org/name" in (tmp_path / "out/README.md").read_text()
    with pytest.raises(LadderError, match="there is no such directory, and one of the hub is named"):
        convert("nowhere", tmp_path / "other", "ladder")


def growth(source: Path, out: Path) -> int:
    """By how much this process's largest memory has grown when it has converted."""
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    convert(str(source), out, "ladder")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin


def test_memory_does_not_grow_with_the_checkpoint(source: Path, tmp_path: Path) -> None:
    """Half a gigabyte, most of it a hole in the file, and a process that holds far less than that."""
    header = json.dumps({"big": {"dtype": "F32", "shape": [1 << 27], "data_offsets": [0, 1 << 29]}}).encode()
    with (source / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 29))
    with get_context("forkserver").Pool(1) as pool:
        assert pool.apply(growth, (source, tmp_path / "out")) < 100 << 10  # KiB
    assert (tmp_path / "out/model.safetensors").stat().st_size > 1 << 29
