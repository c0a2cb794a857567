"""`ladder quantize`: what it writes is what compressed-tensors writes, and every host computes the same with it."""

import errno
import json
import os
import resource
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from math import prod
from multiprocessing import get_context
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import ladder.hf
from ladder.checkpoint import INDEX, SINGLE, Directory, load
from ladder.comm.base import Comm, RankOnly
from ladder.comm.emulated import World
from ladder.config import ModelConfig
from ladder.config.quantization import DENSE, Storage
from ladder.errors import LadderError
from ladder.hf.convert import convert
from ladder.layers.quantized import Quantized
from ladder.model import Decoder
from ladder.quantize import write as module
from ladder.quantize.options import QuantizeOptions
from ladder.quantize.packing import words
from ladder.quantize.rounding import Rounded, dequantized, round_to_nearest
from ladder.quantize.tensors import Output, side_by_side
from ladder.quantize.write import quantize
from tests.checkpoints import byte_tokenizer
from tests.families import make
from tests.quantizing import regions, write
from tests.tolerance import apart, forward
from tests.weights import Given, draw, joined

packaged = pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed")

FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"format": "fp8"},
    "fp8-block": {"format": "fp8-block"},
    "int8": {"format": "int8"},
    "int4": {"format": "int4"},
    "int4-32": {"format": "int4", "group": 32},
    "int4-channel": {"format": "int4", "group": 0},
    "int4-64-zero": {"format": "int4", "group": 64, "asymmetric": True},
    "int4-channel-zero": {"format": "int4", "group": 0, "asymmetric": True},
}
TOKENS = torch.randint(13, (2, 5), generator=torch.Generator().manual_seed(1))
BASE: dict[str, Any] = {"hidden": 128, "layers": 2, "heads": 8, "kv_heads": 2, "head_dim": 64, "ffn": 512, "vocab": 13}
CONFIG = ModelConfig(**BASE, dtype="bfloat16")
Q = "model.layers.1.self_attn.q_proj"
NEAR = forward(2, 512, 5)  # of float32, far below the 1e-4 that is asked for


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A standard checkpoint in bfloat16, with a tokenizer."""
    weights = {name: weight.bfloat16() for name, weight in draw(CONFIG, deviation=0.06).items()}
    folder = write(tmp_path_factory.mktemp("quantize") / "source", CONFIG, weights)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wired(source: Path) -> Path:
    convert(str(source), source.with_name("wired"), "ladder")
    return source.with_name("wired")


def made(source: Path, out: Path, **options: Any) -> Path:
    quantize(QuantizeOptions(source, out, **options))
    return out


def native(folder: Path, tokens: Tensor = TOKENS, comm: Comm | None = None) -> Tensor:
    found = Directory(folder)
    ranks = 2 if 2 in found.config.degrees() else 1
    for rank in range(ranks):
        found.check(Decoder(found.config, RankOnly(rank, ranks), device="meta").shards())
    model = load(Decoder(found.config, comm, dtype=torch.float32), found, check=True)
    return joined(model, model(tokens))


# --- with compressed-tensors ----------------------------------------------------------------------------------------


def library(folder: Path) -> tuple[Any, Any]:
    """compressed-tensors' own reading of a folder's config.json: its scheme and its compressor."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    settings = QuantizationConfig.model_validate(
        json.loads((folder / "config.json").read_text())["quantization_config"]
    )
    scheme = settings.config_groups["group_0"]
    assert scheme.format == settings.format
    return scheme, BaseCompressor.get_value_from_registry(settings.format)


def parts_of(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): each for key, each in tensors.items() if key.startswith(f"{name}.")}


@packaged
@pytest.mark.parametrize("name", FORMATS)
def test_tensors_are_those_of_the_library(source: Path, tmp_path: Path, name: str) -> None:
    """Names, types, packing, scales and codes: all bits. Its quantizer works in float32 here, as ours does."""
    from compressed_tensors.quantization.utils import calculate_qparams

    tensors = load_file(made(source, tmp_path / "out", **FORMATS[name]) / SINGLE)
    scheme, compressor = library(tmp_path / "out")
    dense, storage = load_file(source / SINGLE), QuantizeOptions(source, tmp_path, **FORMATS[name]).storage
    left = dict(tensors)
    for key, weight in dense.items():
        if "proj" not in key:
            assert torch.equal(left.pop(key), weight) and weight.dtype is torch.bfloat16
            continue
        scale, zero = calculate_qparams(*regions(weight.float(), storage), scheme.weights)
        scale = scale.bfloat16()
        if storage.zero:  # by the scale that is written
            zero = (-8 - regions(weight.float(), storage)[0] / scale.float()).clamp(-8, 7).round().to(torch.int8)
        state = {"weight": weight.float(), "weight_scale": scale, "weight_zero_point": zero}
        expected = compressor.compress(state, scheme)
        found = parts_of(tensors, key.removesuffix(".weight"))
        assert found.keys() == expected.keys() == set(compressor.compression_param_names(scheme))
        for end, each in expected.items():
            assert left.pop(f"{key.removesuffix('weight')}{end}").dtype is each.dtype, end
            assert torch.equal(found[end].float(), each.float()), (key, end)
    assert not left


@packaged
@pytest.mark.parametrize("shape", [(13, 40), (8, 1), (1, 8), (130, 3)])
def test_words(shape: tuple[int, int]) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes = torch.randint(16, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    signed = (codes.int() - 8).to(torch.int8)
    assert torch.equal(words(codes), pack_to_int32(signed, 4))
    assert torch.equal(words(codes.t()).t(), pack_to_int32(signed, 4, packed_dim=0))


@packaged
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("wiring", ["standard", "ladder"])
@pytest.mark.parametrize("name", FORMATS)
def test_logits_of_the_engine(
    source: Path, wired: Path, tmp_path: Path, worlds: dict[int, World], name: str, wiring: str, ranks: int
) -> None:
    folder = made(source if wiring == "standard" else wired, tmp_path / "out", **FORMATS[name])
    scheme, compressor = library(folder)
    tensors, weights = load_file(folder / SINGLE), {}
    for key, weight in load_file(source / SINGLE).items():
        weights[key] = weight.float()
        if parts := parts_of(tensors, key.removesuffix(".weight")) if "proj" in key else {}:
            parts["weight_scale"] = parts["weight_scale"].float()
            weights[key] = compressor.decompress(parts, scheme)["weight"]
            assert 0 < apart(weights[key], weight.float()) < 0.2
    config = CONFIG.rewired(wiring)

    def expected(comm: Comm) -> Tensor:
        model = load(Decoder(config, comm, dtype=torch.float32), Given(weights))
        return joined(model, model(TOKENS))

    assert Directory(folder).config.wiring == config.wiring
    found = worlds[ranks].run(lambda comm: native(folder, comm=comm))[0]
    assert apart(found, worlds[ranks].run(expected)[0]) < NEAR


@packaged
@pytest.mark.parametrize("name", FORMATS)
def test_logits_of_transformers(source: Path, wired: Path, tmp_path: Path, name: str) -> None:
    found = {}
    for folder in (source, wired):
        out = made(folder, tmp_path / folder.name, **FORMATS[name])
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        with torch.no_grad():
            found[folder] = model(TOKENS).logits
        assert apart(native(out), found[folder]) < NEAR
    assert apart(found[source], found[wired]) > 100 * NEAR


@packaged
@pytest.mark.parametrize("name", ["fp8", "fp8-block"])
def test_fp8_activations(source: Path, wired: Path, tmp_path: Path, run: Any, name: str) -> None:
    """The same weights; a config.json that the library reads as its own scheme, and we as one that allows them."""
    plain = made(wired, tmp_path / "plain", format=name)
    status, out, _ = run("quantize", wired, tmp_path / "out", "--format", name, "--fp8-activations", "--json")
    assert status == 0 and json.loads(out)["fp8_activations"] is True
    found, expected = (load_file(folder / SINGLE) for folder in (tmp_path / "out", plain))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key].float(), each.float()) for key, each in expected.items())
    scheme, activations = library(tmp_path / "out")[0], library(tmp_path / "out")[0].input_activations
    assert scheme.weights == library(plain)[0].weights and library(plain)[0].input_activations is None
    assert (activations.num_bits, str(activations.type)) == (8, "float")
    assert activations.dynamic is True and activations.symmetric and scheme.output_activations is None
    shared = (str(activations.strategy), activations.group_size)
    assert shared == (("token", None) if name == "fp8" else ("group", 128))
    for folder, allowed in ((plain, False), (tmp_path / "out", True)):
        config = Directory(folder).config
        stored = {
            config.weights.of(f"model.layers.{n}.{part}") for n in (0, 1) for part in ("mlp.up_proj", "self_attn.o")
        }
        assert {each.activations for each in stored} == {allowed} and config.weights.of("lm_head") == DENSE
        packed = [each.packed for each in Decoder(config, device="meta").modules() if isinstance(each, Quantized)]
        assert len(packed) == 2 * 4 and all(each is not None and each.activations is allowed for each in packed)
        assert ("for fp8 activations" in (folder / "README.md").read_text()) is allowed
    assert apart(native(tmp_path / "out"), native(plain)) == 0  # float32 takes activations as they are


@packaged
@pytest.mark.parametrize("name", ["fp8", "fp8-block"])
def test_fp8_activations_in_transformers(wired: Path, tmp_path: Path, name: str) -> None:
    """It loads, and is the model but for what rounds activations: each to 2^-4 of it at most, in four products a
    layer, one on top of the other.
    """
    out = made(wired, tmp_path / "out", format=name, fp8_activations=True)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        found = model(TOKENS).logits
    assert 100 * NEAR < apart(native(out), found) < 2 * 2**-4 * (CONFIG.layers * 4 / 3) ** 0.5


FAMILIES = ["smollm2", "qwen2", "phi3-partial", "gemma2", "olmo2", "gpt-neox", "falcon", "mixtral", "qwen3-moe"]


@packaged
@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Path, family: str) -> None:
    """As transformers saves them once they are rewired, which is what fit and adapt do."""
    changes: dict[str, int] = {"hidden_size": 64}
    changes |= {"num_attention_heads": 8, "num_key_value_heads": 4} if family == "smollm2" else {}
    changes |= {"moe_intermediate_size": 32} if family == "qwen3-moe" else {}
    ladder.hf.rewire(make(family, **changes), "ladder@1-3").save_pretrained(tmp_path / "source")
    form = {"format": "int8"} if family == "falcon" else {"format": "int4", "group": 32}  # transformers packs no Falcon
    out = made(tmp_path / "source", tmp_path / "out", **form)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model(TOKENS).logits
    assert apart(native(out), expected) < forward(4, 128, 5)
    config, names = Directory(out).config, [name for name in load_file(out / SINGLE) if name.endswith("_scale")]
    assert len(names) >= 4 * 4 and not any(config.names.head in name for name in names)
    assert str(config.wiring) == "standard:1 ladder:3" and config.weights.of(config.names.head) == DENSE
    if config.experts is not None:
        router = f"model.layers.0.{config.names.router}"
        assert config.weights.of(router) == DENSE and f"{router}.weight" in load_file(out / SINGLE)
        assert any("experts.3." in name for name in names)


# --- rounding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_the_nearest_code(name: str) -> None:
    """No weight is farther from its code than half a step; a row of zeros stays one."""
    storage = QuantizeOptions(Path(), Path(), **FORMATS[name]).storage
    weight = torch.randn(130, 256, generator=torch.Generator().manual_seed(3))
    weight[5] = 0
    rounded = round_to_nearest(weight, storage)
    found = dequantized(rounded, storage, torch.float32)
    assert torch.equal(found[5], weight[5]) and rounded.scales.dtype is torch.float32
    low, high = (each.abs() for each in regions(weight, storage))
    largest = torch.maximum(low, high).repeat_interleave(storage.rows, 0)[:130]
    largest = largest.repeat_interleave(storage.group or 256, 1)[:, :256]
    # of fp8: four bits of each weight, or the smallest code; of integers half a step, and where the range is
    # symmetric the largest weights are half a step beyond the last code
    half = {"fp8": (weight.abs() / 16).clamp(min=2**-10 / 448 * largest), "int8": largest / 255, "int4": largest / 15}
    assert ((found - weight).abs() <= half[storage.kind] * (1 + 1e-5) + largest * 1e-6).all()
    assert (found - weight).abs().max() > 0


# --- what is written ------------------------------------------------------------------------------------------------


def test_what_a_folder_has(wired: Path, tmp_path: Path, run: Any) -> None:
    status, out, err = run("quantize", wired, tmp_path / "out", "--format", "int4", "--group", 64, "--json")
    assert status == 0 and not err
    line = json.loads(out)
    stored, files = line["bytes_after"], {file.name for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "README.md", SINGLE, "tokenizer.json", "tokenizer_config.json"} <= files
    assert 0 < (tmp_path / "out" / SINGLE).stat().st_size - stored < 10_000
    assert line["bytes_before"] == 2 * sum(each.numel() for each in load_file(wired / SINGLE).values()) > 3 * stored
    assert (line["wiring"], line["matrices"], line["group"]) == ("ladder", 14, 64) and line["seconds"] > 0
    assert 0.05 < line["relative_error"] < 0.15
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert {key: raw.pop(key) for key in ("quantization_config",)} and raw == json.loads(
        (wired / "config.json").read_text()
    )
    card = (tmp_path / "out/README.md").read_text()
    assert "The weights of `wired`" in card and "int4 in groups of 64 inputs" in card and "ladder quantize" in card
    status, out, err = run("quantize", wired, tmp_path / "text", "--format", "int8")
    assert status == 0 and out.startswith(f"wrote {tmp_path / 'text'}: 14 matrices as int8, 0.00 GB to 0.00 GB in ")


@pytest.mark.parametrize("name", ["fp8-block", "int4-64-zero"])
def test_files_and_rows(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """However the source is cut into files, the matrices into rows, and the result into files."""
    whole = load_file(made(source, tmp_path / "whole", **FORMATS[name]) / SINGLE)
    parts = list(load_file(source / SINGLE).items())
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "config.json").write_text((source / "config.json").read_text())
    table = {}
    for number in range(3):  # without the first part of their names, as in checkpoints without a head
        piece = {key.removeprefix("model."): each for key, each in parts[number::3]}
        save_file(piece, cut / f"{number}.safetensors")
        table |= dict.fromkeys(piece, f"{number}.safetensors")
    (cut / INDEX).write_text(json.dumps({"weight_map": table}))
    monkeypatch.setattr(module, "AT_A_TIME", 1)
    monkeypatch.setattr(module, "Output", partial(Output, file_bytes=100_000))
    told: list[tuple[int, int, str]] = []
    quantize(QuantizeOptions(cut, tmp_path / "out", **FORMATS[name]), lambda *now: told.append(now))
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 3 and names[0] == f"model-00001-of-{len(names):05}.safetensors"
    found = {}
    for file in names:
        held = load_file(tmp_path / "out" / file)
        assert set(held) == {key for key, at in index["weight_map"].items() if at == file}
        assert len(held) == 1 or sum(each.nbytes for each in held.values()) <= 100_000
        found |= held
    assert found.keys() == whole.keys() and all(torch.equal(found[key], each) for key, each in whole.items())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in whole.values())
    assert told[-1][0] == told[-1][1] == sum(each.nbytes for _, each in parts)


def test_another_way_to_round(source: Path, tmp_path: Path) -> None:
    seen: dict[str, list[int]] = {}

    def rounder(name: str, first: int, weight: Tensor) -> Rounded:
        seen.setdefault(name, []).append(first)
        return round_to_nearest(weight / 2, Storage("int8", "compressed"))

    quantize(QuantizeOptions(source, tmp_path / "out", "int8"), rounder=rounder)
    found, plain = load_file(tmp_path / "out" / SINGLE), load_file(made(source, tmp_path / "x", format="int8") / SINGLE)
    assert torch.equal(2 * found[f"{Q}.weight_scale"], plain[f"{Q}.weight_scale"])
    assert len(seen) == 14 and seen[Q] == [0]


def test_side_by_side() -> None:
    """Results in order, each by a thread that computes alone; torch's threads come back, after a failure, too."""
    before, inside = torch.get_num_threads(), list[int]()

    def tried(number: int) -> int:
        sleep(0.002 * (number % 3))
        inside.append(torch.get_num_threads())
        if number == 13:
            raise LadderError("unlucky")
        return 2 * number

    taken = []
    with side_by_side(4) as each:
        assert list(each(tried, range(9))) == list(range(0, 18, 2))
        with pytest.raises(LadderError, match="unlucky"):
            for _ in each(tried, (taken.append(number) or number for number in range(9, 1000))):
                pass
    assert set(inside) == {1} and torch.get_num_threads() == before
    assert len(taken) < 20


# --- memory ---------------------------------------------------------------------------------------------------------


def growth(options: QuantizeOptions, cores: int) -> int:
    """By how many KiB this process's largest memory, mapped files included, has grown when it has quantized to a slow
    disk.
    """
    torch.set_num_threads(1)
    real = os.pwrite

    def slow(*given: Any) -> int:
        sleep(0.004)
        return real(*given)

    os.pwrite = slow  # of a process that ends
    os.sched_getaffinity = lambda _: set(range(cores))
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    quantize(options)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin


@pytest.mark.parametrize("name, files, cores", [("int8", 1, 2), ("int4", 3, 2), ("fp8", 3, 2)])
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path, name: str, files: int, cores: int) -> None:
    """Half a gigabyte of holes, a matrix and the embedding of 100 MB each, and a process that holds less than one."""
    config = ModelConfig(2048, 1, 16, 8, 24_576, vocab=40_000, dtype="bfloat16", tied=True)
    shapes = [(shard.name, shard.shape) for shard in Decoder(config, device="meta").shards()]
    assert sum(2 * prod(shape) for _, shape in shapes) > 0.48e9
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config.to_hf()))
    table: dict[str, str] = {}
    for number in range(files):
        file = f"{number}.safetensors" if files > 1 else SINGLE
        holes(source / file, dict(shapes[number::files]))
        table |= dict.fromkeys(dict(shapes[number::files]), file)
    if files > 1:
        (source / INDEX).write_text(json.dumps({"weight_map": table}))
    with get_context("forkserver").Pool(1) as pool:
        assert pool.apply(growth, (QuantizeOptions(source, tmp_path / "out", name), cores)) < 100 << 10
    assert (tmp_path / "out" / SINGLE).stat().st_size > 0.2e9


def holes(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Tensors of zeros that take no place on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end := end + 2 * prod(shape)]}
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)


# --- refusals -------------------------------------------------------------------------------------------------------

BAD_OPTIONS = [
    ({"format": "int3"}, "unknown format 'int3': known are fp8, fp8-block, int8, int4"),
    ({"format": "fp8", "group": 128}, "--group is for int4, not for fp8"),
    ({"format": "int8", "asymmetric": True}, "--asymmetric is for int4, not for int8"),
    ({"format": "int8", "fp8_activations": True}, "--fp8-activations is for fp8 and fp8-block, not for int8"),
    ({"format": "int4", "fp8_activations": True}, "--fp8-activations is for fp8 and fp8-block, not for int4"),
    ({"format": "int4", "group": 48}, "--group must be 32, 64, 128, or 0 for all inputs, not 48"),
]


@pytest.mark.parametrize("options, message", BAD_OPTIONS)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LadderError, match=message):
        QuantizeOptions(Path("a"), Path("b"), **options)


def refused(source: Path, out: Path, message: str, **options: Any) -> None:
    """By one sentence, and nothing is left behind."""
    before = sorted(out.parent.rglob("*"))
    with pytest.raises(LadderError, match=message) as caught:
        quantize(QuantizeOptions(source, out, **({"format": "int4"} | options)))
    assert "\n" not in str(caught.value) and sorted(out.parent.rglob("*")) == before


def test_groups_that_do_not_divide(tmp_path: Path) -> None:
    config = replace(CONFIG, ffn=480)
    write(tmp_path / "source", config, draw(config))
    down = "model.layers.0.mlp.down_proj has 480 inputs"
    refused(
        tmp_path / "source", tmp_path / "out", f"^{down}, which groups of 128 do not divide: --group 32 or 0 works$"
    )
    refused(tmp_path / "source", tmp_path / "out", f"^{down}, which groups of 64", group=64, asymmetric=True)
    config = replace(CONFIG, ffn=100)
    write(tmp_path / "other", config, draw(config))
    refused(
        tmp_path / "other", tmp_path / "out", "100 inputs, which words of 8 do not.*: choose another format$", group=0
    )
    quantize(QuantizeOptions(tmp_path / "other", tmp_path / "out", "fp8-block"))


def test_what_cannot_be_quantized(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    make("gpt2", tmp_path / "gpt2")
    refused(tmp_path / "gpt2", out, "the matrices of gpt2 are stored transposed, and cannot be quantized$")
    make("mixtral", tmp_path / "mixtral")
    for options, what in (({"format": "int8"}, "int8"), ({"format": "fp8-block"}, "fp8-block")):
        refused(tmp_path / "mixtral", out, f"has experts, of which transformers reads no {what}: choose", **options)
    refused(tmp_path / "mixtral", out, "reads no int4 with zero points: choose fp8 or int4$", asymmetric=True)
    made(source, tmp_path / "done", format="int8")
    refused(tmp_path / "done", out, "is quantized already: name the checkpoint it was made from$")
    refused(tmp_path / "nowhere", out, "no such file: .*nowhere")
    refused(source, tmp_path / "done", "done is there already: name a new folder$")
    refused(source, source, "is there already")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("ladder.checkpoint.shutil.disk_usage", lambda path: usage)
    refused(source, out, r"needs 0\.[0-9] MB, its disk has 1000 bytes left$")


def test_a_full_disk(source: Path, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the writing thread meets is told, whenever it meets it, and nothing is left."""
    real, calls = os.pwrite, 0

    def pwrite(*given: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*given)

    monkeypatch.setattr("ladder.quantize.tensors.os.pwrite", pwrite)
    for room in (0, 5, 10**6):
        calls = 0
        status, _, err = run("quantize", source, tmp_path / "out", "--format", "int8")
        assert (status, (tmp_path / "out").exists()) == ((0, True) if room > 5 else (1, False))
        assert room > 5 or ("No space left on device" in err and err.count("\n") == 1)
        assert [each.name for each in tmp_path.iterdir()] == (["out"] if room > 5 else [])
    assert calls > 5


def test_spoiled_sources(source: Path, tmp_path: Path, run: Any) -> None:
    folder, out = tmp_path / "source", tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    tensors, file = load_file(source / SINGLE), folder / SINGLE
    file.write_bytes((source / SINGLE).read_bytes()[:-1000])
    refused(folder, out, "is truncated or corrupted")
    save_file({name: each for name, each in tensors.items() if name != f"{Q}.weight"}, file)
    refused(folder, out, f"lacks the tensor '{Q}.weight'")
    save_file(tensors | {f"{Q}.weight": tensors[f"{Q}.weight"].to(torch.int8)}, file)
    refused(folder, out, f"'{Q}.weight' has type I8, which is not a plain float")
    save_file(tensors | {f"{Q}.weight": tensors[f"{Q}.weight"][:8].contiguous()}, file)
    refused(folder, out, rf"'{Q}.weight' has shape \[8, 128\]")
    for value in (float("nan"), float("inf"), float("-inf")):
        spoiled = tensors[f"{Q}.weight"].clone()
        spoiled[-1, 3] = value
        save_file(tensors | {f"{Q}.weight": spoiled}, file)
        for options in FORMATS.values():
            refused(folder, out, f"'{Q}.weight' holds values that are not finite", **options)
    status, text, err = run("quantize", folder, out, "--format", "int8")
    assert status == 2 and not text and err.startswith("ladder: the tensor") and err.count("\n") == 1
    assert run("quantize", folder, out)[0] == 2
