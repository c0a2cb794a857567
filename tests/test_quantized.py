"""Quantized checkpoints: what the engine computes with them is what it computes with the weights that they mean."""

import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ladder import LLM, SamplingParams
from ladder.checkpoint import Directory, load, save
from ladder.comm.base import Comm, RankOnly, Solo
from ladder.comm.emulated import World
from ladder.config import ModelConfig
from ladder.config.model import Experts
from ladder.config.quantization import DENSE, Quantization, Storage, read_quantization
from ladder.config.rope import Rope
from ladder.errors import LadderError
from ladder.layers import quantized as module
from ladder.layers.quantized import Quantized, numbers
from ladder.layers.shard import Piece
from ladder.model import Decoder
from tests.quantizing import RECIPES, Recipe, Tensors, quantized, regions, with_format, write
from tests.tolerance import apart, forward
from tests.weights import Given, draw, joined

WIRINGS = ("standard", "ladder", "parallel-1")
TOKENS = torch.randint(13, (2, 5), generator=torch.Generator().manual_seed(1))
# every rank of four has a whole group of 128 in each row-parallel matrix; a vocabulary that no degree divides
BASE: dict[str, Any] = {"hidden": 128, "layers": 2, "heads": 8, "kv_heads": 2, "head_dim": 64, "ffn": 512, "vocab": 13}
CONFIG = ModelConfig(**BASE)
Q = "model.layers.1.self_attn.q_proj"
NEAR = forward(2, 512, 5)  # of float32, far below the 1e-4 that is asked for


def drawn(config: ModelConfig) -> Tensors:
    return draw(config, deviation=0.06)


def logits(config: ModelConfig, weights: Mapping[str, Tensor], comm: Comm, expert_parallel: bool = False) -> Tensors:
    """By wiring; the weights are loaded once."""
    model = load(Decoder(config, comm, dtype=torch.float32, expert_parallel=expert_parallel), Given(weights))
    found = {}
    for wiring in WIRINGS:
        model.rewire(wiring)
        found[wiring] = joined(model, model(TOKENS))
    return found


def compare(
    world: World, config: ModelConfig, recipe: Recipe, head: bool = False, expert_parallel: bool = False
) -> None:
    stored, dense = quantized(drawn(config), recipe, head)
    form = with_format(config, recipe, head)
    found = world.run(lambda comm: logits(form, stored, comm, expert_parallel))[0]
    expected = world.run(lambda comm: logits(config, dense, comm, expert_parallel))[0]
    for wiring in WIRINGS:
        assert apart(found[wiring], expected[wiring]) < NEAR, wiring
    assert apart(expected["ladder"], expected["standard"]) > 100 * NEAR


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_every_format_at_every_degree(worlds: dict[int, World], name: str, ranks: int) -> None:
    compare(worlds[ranks], CONFIG, RECIPES[name])


FAMILIES: dict[str, dict[str, Any]] = {
    # queries and keys are permuted: many small pieces of one matrix
    "gpt_neox": {"kv_heads": 8, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "rope": Rope(share=0.25)},
    "phi3": {"rope": Rope(share=0.5)},  # matrices that are fused in the checkpoint
    "qwen2": {"qkv_bias": True},
    "mixtral": {"experts": Experts(4, 2, 256)},
}
KINDS = ("fp8-block", "int8-channel", "int4-32-zero", "awq-64", "gptq-64-zero")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(worlds: dict[int, World], family: str, name: str) -> None:
    config = ModelConfig(**{**BASE, **FAMILIES[family]}, family=family)
    compare(worlds[2], config, RECIPES[name])


def test_experts_as_a_whole(worlds: dict[int, World]) -> None:
    """Slices of experts would cut groups of 128, whole experts do not."""
    config = ModelConfig(**{**BASE, "experts": Experts(4, 2, 128)}, family="mixtral")
    compare(worlds[2], config, RECIPES["int4-128"], expert_parallel=True)
    form = with_format(config, RECIPES["int4-128"])
    assert form.degrees() == [1] and form.degrees(expert_parallel=True) == [1, 2, 4]


@pytest.mark.parametrize("vocab", [13, 16, 48])
@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-block", "int8-channel", "int8-packed", "int4-32", "int4-32-zero"])
def test_a_quantized_head(worlds: dict[int, World], name: str, vocab: int) -> None:
    compare(worlds[4], replace(CONFIG, vocab=vocab), RECIPES[name], head=True)


def test_a_tied_head_stays_the_embedding(worlds: dict[int, World]) -> None:
    compare(worlds[2], replace(CONFIG, tied=True), RECIPES["int4-32"])


def test_dequantized_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, weight = RECIPES["int4-32-zero"], torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    parts = recipe.pack(weight, recipe.storage)
    piece = Piece("x", (20, 64), slice(3, 20), slice(0, 64), 0)
    for many in (1, 3 * 64, 1 << 22):
        monkeypatch.setattr(module, "AT_A_TIME", many)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            matrix = Quantized(recipe.storage, 17, 64, False, dtype, [piece])
            for shard in matrix.shards():
                if shard.holds is None:
                    source = parts[shard.name.removeprefix("x.")][shard.index]
                    shard.target.copy_(source if shard.convert is None else shard.convert(source))
            scales = parts["weight_scale"].to(dtype).to(torch.promote_types(dtype, torch.float32))
            expected = recipe.unpack(parts | {"weight_scale": scales}, recipe.storage)
            assert torch.equal(matrix.dequantized(), expected[3:].to(dtype))
            assert matrix.dense is None and matrix.dequantized().dtype is dtype
            x = torch.randn(2, 64).to(dtype)
            assert torch.equal(matrix.multiply(x), x @ matrix.dequantized().t())


# --- folders --------------------------------------------------------------------------------------------------------

# read without a package of others
OWN = ("deepseek", "awq--1", "awq-64", "gptq--1", "gptq-128", "gptq-64-zero")


def folder(path: Path, name: str, config: ModelConfig = CONFIG, **changes: object) -> Path:
    recipe = RECIPES[name]
    return write(path, config, quantized(drawn(config), recipe)[0], {**recipe.settings, **changes})


def checked(path: Path, ranks: int = 1) -> Directory:
    source = Directory(path)
    for rank in range(ranks):
        source.check(Decoder(source.config, RankOnly(rank, ranks), device="meta").shards())
    return source


@pytest.mark.parametrize("name", OWN)
def test_folders_are_read(tmp_path: Path, worlds: dict[int, World], name: str) -> None:
    source = checked(folder(tmp_path, name), 2)
    assert {source.config.weights.of(f"model.layers.{n}.mlp.up_proj") for n in (0, 1)} == {RECIPES[name].storage}
    assert source.config.weights.of("lm_head") == DENSE

    def answer(comm: Comm) -> Tensor:
        model = load(Decoder(source.config, comm), source, check=True)
        return joined(model, model(TOKENS))

    dense = quantized(drawn(CONFIG), RECIPES[name])[1]
    expected = logits(CONFIG, dense, Solo())
    assert apart(worlds[2].run(answer)[0], expected["standard"]) < NEAR
    with pytest.raises(LadderError, match=r"^quantized weights cannot be saved"):
        save(load(Decoder(source.config), source), tmp_path / "out")


@pytest.mark.parametrize("name", ["deepseek", "awq-64", "gptq-64"])
def test_greedy_tokens(tmp_path: Path, name: str) -> None:
    config = replace(CONFIG, vocab=64)
    stored, dense = quantized(drawn(config), RECIPES[name])
    write(tmp_path / "dense", config, dense)
    write(tmp_path / "quantized", config, stored, RECIPES[name].settings)
    prompts, params, found = [[1, 2, 3], [60, 5]], SamplingParams(max_new_tokens=12), []
    for where, tp in (("dense", 1), ("quantized", 1), ("quantized", 2)):
        with LLM(tmp_path / where, tp=tp, wiring="ladder", check=True) as llm:
            found.append([result.token_ids for result in llm.generate(prompts, params)])
    assert found[0] == found[1] == found[2] and len({tuple(line) for line in found[0]}) == 2


def test_a_quantized_head_is_not_the_embedding(tmp_path: Path) -> None:
    """Whatever config.json says of ties, as in transformers: the files hold it."""
    recipe, config = RECIPES["gptq-64"], replace(CONFIG, vocab=16)
    stored, dense = quantized(drawn(config), recipe, head=True)
    write(tmp_path, replace(config, tied=True), stored, {**recipe.settings, "lm_head": True})
    source = checked(tmp_path)
    assert not source.config.tied
    found = load(Decoder(source.config), source)(TOKENS)
    assert apart(found, logits(config, dense, Solo())["standard"]) < NEAR


def test_tensors_of_activations_are_not_read(tmp_path: Path) -> None:
    tensors = load_file(folder(tmp_path, "deepseek") / "model.safetensors")
    save_file({**tensors, f"{Q}.input_scale": torch.ones(1)}, tmp_path / "model.safetensors")
    checked(tmp_path)
    save_file({**tensors, f"{Q}.weight_zero_point": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(LadderError, match=f"has the tensor '{Q}.weight_zero_point', which a model of"):
        checked(tmp_path)


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    folder(tmp_path, "deepseek")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.uint8)[3, 5] = 0xFF
    save_file(tensors, tmp_path / "model.safetensors")
    source = checked(tmp_path)
    with pytest.raises(LadderError, match=r"'model.layers.1.mlp.up_proj.weight' holds values that are not finite"):
        load(Decoder(source.config), source, check=True)


def _without(end: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{Q}.{end}")


def _with(end: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"{Q}.{end}": change(tensors[f"{Q}.{end}"]).contiguous()})


SPOILED = [
    ("awq-64", _without("scales"), f"lacks the tensor '{Q}.scales'"),
    ("gptq-64", _without("g_idx"), f"lacks the tensor '{Q}.g_idx'"),
    ("deepseek", _without("weight_scale_inv"), f"lacks the tensor '{Q}.weight_scale_inv'"),
    ("awq-64", _with("qzeros", lambda x: x[:1]), rf"'{Q}.qzeros' has shape \[1, 64\], its config.json calls for \[2, "),
    ("gptq-64", _with("qweight", lambda x: x.t()), rf"'{Q}.qweight' has shape \[512, 16\]"),
    ("deepseek", _with("weight_scale_inv", lambda x: x[:2]), rf"'{Q}.weight_scale_inv' has shape \[2, 1\]"),
    ("awq-64", _with("qweight", Tensor.float), f"'{Q}.qweight' has type F32, which is not int32"),
    ("deepseek", _with("weight", Tensor.bfloat16), f"'{Q}.weight' has type BF16, which is not float8_e4m3fn"),
    ("deepseek", _with("weight_scale_inv", Tensor.int), f"'{Q}.weight_scale_inv' has type I32, which is not a plain"),
    ("gptq-64", _with("g_idx", lambda x: x.flip(0)), f"'{Q}.g_idx' is not what its config.json calls for"),
]


@pytest.mark.parametrize("name, spoil, message", SPOILED, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(SPOILED)])
def test_spoiled_folders_are_refused_before_weights_are_read(
    tmp_path: Path, name: str, spoil: Callable[[Tensors], object], message: str
) -> None:
    tensors = load_file(folder(tmp_path, name) / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LadderError, match=message) as caught:
        checked(tmp_path)
    assert "\n" not in str(caught.value)
    if "g_idx" not in message:  # `load` by itself refuses it, too
        source = Directory(tmp_path)
        with pytest.raises(LadderError, match=Q):
            load(Decoder(source.config), source)


def test_truncated_folders_are_refused(tmp_path: Path) -> None:
    file = folder(tmp_path, "gptq-64") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(LadderError, match="is truncated or corrupted"):
        Directory(tmp_path)


def test_zeros_of_symmetric_gptq(tmp_path: Path) -> None:
    tensors = load_file(folder(tmp_path, "gptq-64") / "model.safetensors")
    tensors[f"{Q}.qzeros"][1, 3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    source = checked(tmp_path)
    with pytest.raises(LadderError, match=f"'{Q}.qzeros' has other values than those of symmetric weights"):
        load(Decoder(source.config), source)


@pytest.mark.parametrize("name, works", [("awq-128", "1, 2, 4"), ("awq--1", "1, 2, 4, 8"), ("deepseek", "1, 2, 4")])
def test_degrees_that_cut_groups_are_refused(tmp_path: Path, name: str, works: str) -> None:
    config = Directory(folder(tmp_path, name)).config
    assert ", ".join(map(str, config.degrees())) == works
    if "8" not in works:
        message = f"^8 ranks would cut the groups of 128 of a matrix's 512 inputs: the degrees that work are {works}$"
        with pytest.raises(LadderError, match=message):
            Decoder(config, RankOnly(0, 8), device="meta")
    with pytest.raises(LadderError, match=f"^3 ranks cannot share .* evenly: the degrees that work are {works}$"):
        Decoder(config, RankOnly(0, 3), device="meta")


def test_shapes_that_cannot_be_packed() -> None:
    for changes in ({"hidden": 100}, {"ffn": 500}):
        config = with_format(replace(CONFIG, **changes), RECIPES["awq-64"])  # type: ignore[arg-type]
        with pytest.raises(LadderError, match=r"_proj is stored as int4 in groups of 64 .*cannot be divided$"):
            Decoder(config, device="meta")
    with pytest.raises(LadderError, match="stored transposed are not supported"):
        gpt2 = ModelConfig(**{**BASE, "head_dim": 16, "kv_heads": 8, "qkv_bias": True}, family="gpt2")
        Decoder(replace(gpt2, weights=read_quantization({"quantization_config": RECIPES["gptq-64"].settings})))


def test_fused_matrices_must_be_stored_alike() -> None:
    one, other = RECIPES["int4-32"].storage, RECIPES["int4-64"].storage
    weights = Quantization(((("Linear",), one), (("re:.*k_proj",), other)), ("lm_head",))
    with pytest.raises(LadderError, match=r"q_proj is stored as int4 in groups of 32 inputs, .*k_proj as int4 in gro"):
        Decoder(replace(CONFIG, weights=weights), device="meta")
    with pytest.raises(LadderError, match=r"gate_proj is stored as dense, .*up_proj as int4"):
        ignoring = Quantization(((("Linear",), one),), ("model.layers.0.mlp.gate_proj",))
        Decoder(replace(CONFIG, weights=ignoring), device="meta")
    with pytest.raises(LadderError, match="embed_tokens is quantized"):
        Decoder(replace(CONFIG, weights=Quantization(((("Linear", "Embedding"), one),))), device="meta")


# --- quantization_config --------------------------------------------------------------------------------------------


def test_which_matrix_is_stored_how() -> None:
    """An ignored name goes first; a name goes before a regular expression, and that before a class."""
    four, eight, fp8 = Storage("int4", "compressed", 32), Storage("int8", "compressed"), Storage("fp8", "compressed")
    groups = ((("Linear",), four), (("re:.*down_proj", "re:model.layers.1"), eight), (("model.layers.1.a",), fp8))
    weights = Quantization(groups, ("lm_head", "re:.*skip", "Router"))
    names = {"model.layers.0.a": four, "model.layers.1.a": fp8, "model.layers.1.b": eight, "x.down_proj": eight}
    names |= {"lm_head": DENSE, "model.layers.1.skipped": DENSE, "model.lm_head": four}
    assert {name: weights.of(name) for name in names} == names
    assert weights.of("model.layers.1.b", "Router") == weights.of("x", "Embedding") == DENSE
    # transformers' name of every head: also of those that have another one in files
    assert weights.of("embed_out") == replace(weights, ignore=("re:lm_h",)).of("embed_out") == DENSE
    for target in ("lm_head", "re:.*head$"):
        assert Quantization((((target,), fp8), (("Linear",), four))).of("embed_out") == fp8
    assert not Quantization() and weights and ModelConfig(**BASE).weights.of("model.layers.0.a") == DENSE


@pytest.mark.parametrize("method", ["fp8", "awq"])
def test_modules_that_are_not_converted(method: str) -> None:
    name = "deepseek" if method == "fp8" else "awq-64"
    skipped = ["model.layers.1.mlp.gate", "self_attn", "lm_head"]
    found = read_quantization({"quantization_config": {**RECIPES[name].settings, "modules_to_not_convert": skipped}})
    dense = ("model.layers.1.mlp.gate", "model.layers.0.self_attn.q_proj", "lm_head")
    assert all(found.of(each) == DENSE for each in dense)
    kept = ("model.layers.1.mlp.gate_proj", "model.layers.11.mlp.gate", "model.layers.0.mlp.down_proj")
    assert all(found.of(each) == RECIPES[name].storage for each in kept)


def test_modules_of_gptq() -> None:
    settings = {**RECIPES["gptq-64"].settings, "lm_head": True}
    assert read_quantization({"quantization_config": settings}).of("lm_head") == RECIPES["gptq-64"].storage
    settings |= {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj", "mlp.up_proj"]]}
    found = read_quantization({"quantization_config": settings})
    of = {name: found.of(f"model.layers.3.{name}") != DENSE for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.x")}
    assert of == {"self_attn.q_proj": True, "mlp.up_proj": True, "mlp.x": False}


def _group(**changes: object) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, **changes}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gptq-64", {"desc_act": True}, r"\(gptq with act-order\) are not supported"),
    ("gptq-64", {"bits": 8}, "gptq, 8 bits"),
    ("gptq-64", {"bits": "4"}, "'bits' must be a whole number"),
    ("gptq-64", {"group_size": 48}, "gptq, group_size 48"),
    ("gptq-64", {"checkpoint_format": "gptq_v2"}, "checkpoint_format gptq_v2"),
    ("gptq-64", {"format": "gptq_v2"}, "checkpoint_format gptq_v2"),
    ("gptq-64", {"is_marlin_format": True}, "checkpoint_format marlin"),
    (
        "gptq-64",
        {"modules_in_block_to_quantize": 5},
        "^.*'modules_in_block_to_quantize' must be a list of names, not '5'$",
    ),
    ("gptq-64", {"modules_in_block_to_quantize": [["a"], 5]}, "'modules_in_block_to_quantize' must be a list of names"),
    (
        "awq-64",
        {"modules_to_not_convert": "lm_head"},
        "'modules_to_not_convert' must be a list of names, not 'lm_head'$",
    ),
    ("deepseek", {"modules_to_not_convert": {"lm_head": 1}}, "'modules_to_not_convert' must be a list of names"),
    ("deepseek", {"quant_method": "a\nb"}, r"\(a b\) are not supported"),
    ("deepseek", {"quant_method": "nvfp4"}, r"\(NVFP4\) are not supported"),
    ("gptq-64", {"dynamic": {"-:x": {}}}, "dynamic"),
    ("awq-64", {"bits": 3}, "awq, 3 bits"),
    ("awq-64", {"version": "gemv"}, "awq, version gemv"),
    ("awq-64", {"zero_point": False}, "awq without zero_point"),
    ("deepseek", {"weight_block_size": None}, "fp8, weight_block_size None"),
    ("deepseek", {"weight_block_size": [128, 0]}, r"weight_block_size \[128, 0\]"),
    ("deepseek", {"fmt": "e5m2"}, "fp8, fmt e5m2"),
    ("deepseek", {"quant_method": "gguf"}, r"\(GGUF\) are not supported in the native engine"),
    ("deepseek", {"quant_method": "exl3"}, r"\(EXL3\) are not supported"),
    ("deepseek", {"quant_method": "modelopt"}, "NVFP4"),
    ("deepseek", {"quant_method": "bitsandbytes"}, "in the native engine; the transformers host can read them$"),
    ("deepseek", {"quant_method": "torchao"}, "the transformers host can read them$"),
    ("int4-32", {"format": "nvfp4-pack-quantized"}, r"\(NVFP4\) are not supported"),
    ("int4-32", {"format": "marlin-24"}, r"\(marlin-24\)"),
    ("int4-32", {"format": "mixed-precision"}, r"\(mixed-precision\)"),
    ("int4-32", {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"\(sparse-24-bitmask\).*: sparse formats"),
    ("int4-32", {"transform_config": {"config_groups": {}}}, "transformed weights"),
    ("int4-32", {"quantization_status": "frozen"}, "quantization_status 'frozen'"),
    ("int4-32", _group(actorder="group"), r"\(act-order\).*actorder 'group'"),
    ("int4-32", _group(actorder=True), r"\(act-order\)"),
    (
        "int4-32",
        {"config_groups": ["Linear"]},
        "quantization_config: 'config_groups' must be an object, not \"\\['Linear",
    ),
    ("int4-32", {"config_groups": {"group_0": {"weights": "W4"}}}, "'weights' must be an object, not 'W4'$"),
    ("int4-32", {"sparsity_config": "x"}, "'sparsity_config' must be an object"),
]
NEED_PACKAGE: list[tuple[str, dict[str, Any], str]] = [
    ("int4-32", _group(num_bits=3), "pack-quantized, 3-bit int"),
    ("fp8-channel", {"format": "pack-quantized"}, "pack-quantized, 8-bit float"),
    ("int8-packed", _group(num_bits=8, group_size=16), "group_size 16"),
    ("int8-packed", _group(num_bits=8, symmetric=False), "pack-quantized, 8-bit int, asymmetric"),
    ("int4-32", _group(group_size=16), "group_size 16"),
    ("int4-32", _group(strategy="tensor", group_size=None), "strategy tensor"),
    ("int8-channel", _group(num_bits=8, symmetric=False), "int-quantized, 8-bit int, asymmetric"),
    ("int8-channel", _group(), "int-quantized, 4-bit int"),
    ("int8-channel", {"format": "float-quantized"}, "the format is for another type"),
    (
        "int4-32",
        _group(num_bits="many"),
        r"by compressed-tensors: config_groups.group_0.weights.num_bits: Input [^:]*$",
    ),
    (
        "int4-32",
        _group(group_size=0),
        "compressed-tensors: config_groups.group_0.weights: strategy group requires [^:]*$",
    ),
    ("int4-32", {"config_groups": {"group_0": {"targets": 5}}}, "group_0.targets: Input should be a valid list$"),
    ("int4-32", {"config_groups": {"W9": ["Linear"]}}, "cannot be read by compressed-tensors: .*W9"),
    ("int4-32", {"ignore": ["re:("]}, r"has 're:\(', which is no regular expression"),
]


@pytest.mark.parametrize("name, change, message", REFUSED, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(REFUSED)])
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, name: str, change: dict[str, Any], message: str) -> None:
    raw = CONFIG.to_hf() | {"quantization_config": {**RECIPES[name].settings, **change}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(LadderError, match=message) as caught:
        ModelConfig.from_directory(tmp_path)
    assert "\n" not in str(caught.value)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "compressed_tensors.quantization", None)
    with pytest.raises(LadderError, match=r"weights of compressed-tensors need that package: pip install "):
        read_quantization({"quantization_config": RECIPES["int4-32"].settings})


# --- with compressed-tensors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, change, message", NEED_PACKAGE, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(NEED_PACKAGE)]
)
def test_what_the_package_reads_and_we_do_not(tmp_path: Path, name: str, change: dict[str, Any], message: str) -> None:
    pytest.importorskip("compressed_tensors")
    test_what_is_not_read_is_refused_by_name(tmp_path, name, change, message)


@pytest.mark.parametrize(
    "name, change",
    [
        ("int4-32", _group(actorder="weight")),  # the order of calibration alone
        ("int4-32", {"sparsity_config": {"format": "dense"}, "transform_config": {}, "format": "mixed-precision"}
         | {"config_groups": {"group_0": {**_group()["config_groups"]["group_0"], "format": "pack-quantized"}}}),
        ("int4-128", {"config_groups": {"W4A16": ["Linear"]}}),
        ("int8-channel", {"format": "naive-quantized"}),
        ("fp8-block", {"format": "naive-quantized"}),
    ],
)  # fmt: skip
def test_other_ways_to_say_it(name: str, change: dict[str, Any]) -> None:
    pytest.importorskip("compressed_tensors")
    found = read_quantization({"quantization_config": {**RECIPES[name].settings, **change}})
    assert found.of("model.layers.0.mlp.up_proj") == RECIPES[name].storage and found.of("lm_head") == DENSE


TOKEN: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
GROUPS_OF_128 = {**TOKEN, "strategy": "group", "group_size": 128}
FP8_BLOCK = {"strategy": "block", "block_structure": [128, 128]}
ACTIVATIONS: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = [
    ("fp8-channel", {}, TOKEN, True),
    ("fp8-tensor", {}, TOKEN, True),
    ("fp8-tensor", {}, {**TOKEN, "strategy": "tensor"}, True),
    ("fp8-tensor", {}, {"num_bits": 8, "type": "float", "strategy": "tensor"}, True),  # static
    ("fp8-block", FP8_BLOCK, GROUPS_OF_128, True),
    ("fp8-block", FP8_BLOCK, TOKEN, True),
    ("fp8-channel", {}, GROUPS_OF_128, False),  # finer than ours
    ("fp8-block", FP8_BLOCK, {**GROUPS_OF_128, "group_size": 64}, False),
    ("fp8-block", {**FP8_BLOCK, "block_structure": [128, 64]}, TOKEN, False),  # no product has such groups
    ("fp8-channel", {}, {**TOKEN, "type": "int"}, False),
    ("fp8-channel", {}, {**TOKEN, "symmetric": False}, False),
    ("fp8-channel", {}, {**GROUPS_OF_128, "num_bits": 4, "strategy": "tensor_group", "dynamic": "local"}, False),
    ("int8-channel", {}, {**TOKEN, "type": "int"}, False),
    ("int8-channel", {}, TOKEN, False),
    ("int4-32", {}, TOKEN, False),
]  # fmt: skip


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The beginnings of what was logged."""
    return [" ".join(each.message.split()[:2]) for each in caplog.records if each.name.startswith("ladder")]


@pytest.mark.parametrize("name, weights, activations, allowed", ACTIVATIONS)
def test_activations_that_may_be_fp8(
    caplog: pytest.LogCaptureFixture, name: str, weights: dict[str, Any], activations: dict[str, Any], allowed: bool
) -> None:
    pytest.importorskip("compressed_tensors")
    settings = json.loads(json.dumps(RECIPES[name].settings))
    settings["config_groups"]["group_0"]["input_activations"] = activations
    settings["config_groups"]["group_0"]["weights"] |= weights
    with caplog.at_level(logging.INFO):
        found = read_quantization({"quantization_config": settings}).of("model.layers.0.mlp.up_proj")
    assert found.activations is allowed
    assert told(caplog) == ["activations become" if allowed else "quantized activations"]
    assert not RECIPES[name].storage.activations and (weights or found == RECIPES[name].storage)


def test_activations_of_fp8_in_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """As DeepSeek and Qwen publish it: dynamic where nothing is said."""
    without = {key: value for key, value in RECIPES["deepseek"].settings.items() if key != "activation_scheme"}
    for changes, allowed in (
        ({}, True),
        ({"activation_scheme": "dynamic"}, True),
        ({"activation_scheme": "static"}, False),
        ({"activation_scheme": None}, False),
        ({"weight_block_size": [64, 64]}, False),
        ({"weight_block_size": [64, 128]}, True),  # inputs come last
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            found = read_quantization({"quantization_config": without | changes}).of("model.layers.0.mlp.up_proj")
        assert found.activations is allowed and found.kind == "fp8"
        assert told(caplog) == ["activations become" if allowed else "quantized activations"]


def test_outputs_and_caches_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("compressed_tensors")
    settings = json.loads(json.dumps(RECIPES["fp8-tensor"].settings))
    settings["config_groups"]["group_0"]["output_activations"] = {**TOKEN, "strategy": "tensor"}
    settings["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    with caplog.at_level(logging.INFO):
        found = read_quantization({"quantization_config": settings}).of("model.layers.0.mlp.up_proj")
    assert found == RECIPES["fp8-tensor"].storage and not found.activations
    assert told(caplog) == ["quantized output_activations", "kv_cache_scheme is"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "name", [name for name, each in RECIPES.items() if each.storage.layout in ("compressed", "packed")]
)
def test_what_compressed_tensors_writes(tmp_path: Path, worlds: dict[int, World], name: str, ranks: int) -> None:
    """Its own quantizer, compressor and decompressor on a model's matrices."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams

    recipe = RECIPES[name]
    settings = QuantizationConfig.model_validate(dict(recipe.settings))
    scheme = settings.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(settings.format)
    weights = drawn(CONFIG)
    stored, dense = dict(weights), dict(weights)
    for key, weight in weights.items():
        if weight.dim() == 2 and "layers" in key:
            low, high = (x if recipe.storage.rows else x.view(1) for x in regions(weight, recipe.storage))
            scale, zero = calculate_qparams(low, high, scheme.weights)
            del stored[key]
            state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
            state = compressor.compress(state, scheme)
            stored |= {f"{key.removesuffix('weight')}{end}": tensor for end, tensor in state.items()}
            dense[key] = compressor.decompress(state, scheme)["weight"]
            assert 0 < apart(dense[key], weight) < 0.35
    write(tmp_path, CONFIG, stored, json.loads(settings.model_dump_json()))
    source = checked(tmp_path, ranks)

    def answers(comm: Comm) -> Tensors:
        model, found = load(Decoder(source.config, comm), source), {}
        for wiring in WIRINGS:
            model.rewire(wiring)
            found[wiring] = joined(model, model(TOKENS))
        return found

    found = worlds[ranks].run(answers)[0]
    expected = worlds[ranks].run(lambda comm: logits(CONFIG, dense, comm))[0]
    for wiring in WIRINGS:
        assert apart(found[wiring], expected[wiring]) < NEAR, wiring


def test_a_wrong_weight_shape(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    tensors = load_file(folder(tmp_path, "int4-32") / "model.safetensors")
    tensors[f"{Q}.weight_shape"][0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LadderError, match=f"'{Q}.weight_shape' is not what its config.json calls for"):
        checked(tmp_path)


def test_numbers_of_codes() -> None:
    """Every byte of fp8, read by its bits, whether or not there are NaN among them; rows that are not side by side."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    exact = codes.float()
    assert torch.equal(numbers(codes).nan_to_num(1000), exact.nan_to_num(1000))
    finite = codes[exact.isfinite()].view(torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(numbers(finite), finite.float())
    cut = finite.view(torch.uint8).view(2, -1).t().view(torch.float8_e4m3fn)
    assert not cut.is_contiguous() and torch.equal(numbers(cut), cut.float())
