"""`ladder quantize --calibrate`: GPTQ against its bounds, models against round-to-nearest, the verb, and refusals."""

import copy
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ladder.checkpoint import Directory, load
from ladder.cli import main
from ladder.config.quantization import DENSE, Storage
from ladder.data.shards import Shards
from ladder.hf import rewire
from ladder.model import Decoder
from ladder.quantize.calibrate import calibrated
from ladder.quantize.gptq import gptq
from ladder.quantize.rounding import Rounded, dequantized, round_to_nearest, scales_of
from ladder.wiring import Wiring
from tests import training as tiny
from tests.families import make

STORAGES = {
    "fp8": Storage("fp8", "compressed"),
    "fp8-tensor": Storage("fp8", "compressed", rows=0),
    "fp8-block": Storage("fp8", "compressed", 128, 128),
    "int8": Storage("int8", "compressed"),
    "int4": Storage("int4", "compressed"),
    "int4-32": Storage("int4", "compressed", 32),
    "int4-64-zero": Storage("int4", "compressed", 64, zero=True),
    "int4-128": Storage("int4", "compressed", 128),
}
packaged = pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed")
INPUTS, OUTPUTS = 192, 160  # blocks of 128 are not full


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(rounded: Rounded, weight: Tensor, square: Tensor, storage: Storage) -> Tensor:
    """(q - w) H (q - w)^T of each row, in float64."""
    wrong = dequantized(rounded, storage, torch.float64) - weight.double()
    return (wrong @ square.double() * wrong).sum(1)


# --- one matrix -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STORAGES)
def test_gptq_is_nearer_than_the_nearest_codes(name: str) -> None:
    """Never farther in any unit of outputs that shares scales, up to the float32 of the comparison; together nearer."""
    storage, weight = STORAGES[name], drawn(1, OUTPUTS, INPUTS)
    x = drawn(2, 512, INPUTS) @ drawn(3, INPUTS, INPUTS) * drawn(4, INPUTS).exp()
    square = x.mT @ x
    found, nearest = gptq(weight, square, storage), round_to_nearest(weight, storage)
    assert (found.codes.dtype, found.codes.shape) == (nearest.codes.dtype, nearest.codes.shape)
    assert (found.scales.dtype, found.scales.shape) == (nearest.scales.dtype, nearest.scales.shape)
    ours, theirs = (
        torch.stack([part.sum() for part in error(each, weight, square, storage).split(storage.rows or OUTPUTS)])
        for each in (found, nearest)
    )
    assert (ours <= theirs * (1 + INPUTS * 2**-23)).all()
    assert ours.sum() < 0.6 * theirs.sum()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_inputs_that_are_almost_one(name: str) -> None:
    """H = 1 1^T + e: what an input's rounding changes, the others take back, all but the last one's.

    An input's error of half a step counts as much as the input varies when those behind it are known. With m behind it
    that is e + e / (m + e); the last one's is 1 + e. That holds while no code is clipped: weights are below 0.4 of the
    largest, which comes first, and shares of half a step from each of 128 others add up to log(128) / 2 < 2.5 steps.
    To the nearest code the mean is a twelfth of a squared step for each input.
    """
    storage, inputs, e = STORAGES[name], 128, 1e-3
    weight = drawn(5, 64, inputs).clamp(-2, 2) / 5
    weight[:, 0] = 1
    square = torch.ones(inputs, inputs, dtype=torch.float64) + e * torch.eye(inputs, dtype=torch.float64)
    steps = scales_of(weight, storage)[0].double().square().flatten()
    bound = steps / 4 * (1 + e + sum(e + e / (m + e) for m in range(1, inputs)))
    assert (error(gptq(weight, square, storage), weight, square, storage) <= bound * 1.001).all()
    nearest = error(round_to_nearest(weight, storage), weight, square, storage)
    assert nearest.sum() > 10 * bound.sum()


@pytest.mark.parametrize("name", STORAGES)
def test_inputs_that_do_not_depend_on_each_other_are_rounded_to_the_nearest_codes(name: str) -> None:
    storage, weight = STORAGES[name], drawn(6, OUTPUTS, INPUTS)
    found = gptq(weight, torch.diag(drawn(7, INPUTS).exp()), storage)
    again = round_to_nearest(weight, storage, found.scales, found.zeros)
    assert torch.equal(found.codes.float(), again.codes.float())
    if storage.kind != "int4":  # whose scales are chosen among several
        assert torch.equal(found.scales, scales_of(weight, storage)[0])


def test_scales_are_of_the_dtype_that_is_written() -> None:
    storage, weight, square = STORAGES["int4-32"], drawn(8, 8, 64), torch.eye(64)
    assert gptq(weight, square, storage, torch.bfloat16).scales.dtype == torch.bfloat16


# --- models ---------------------------------------------------------------------------------------------------------


def kl(original: Any, model: Any, ids: Tensor) -> float:
    with torch.no_grad():
        p, q = (each(ids).logits.double().log_softmax(-1) for each in (original, model))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(
    "family, wiring", [("llama-3", "standard"), ("llama-3", "ladder"), ("olmo2", "standard:2 ladder:2")]
)
def test_a_calibrated_model_is_nearer_to_its_original(family: str, wiring: str) -> None:
    """Than one that is rounded to the nearest codes, on other tokens. (OLMo 2: norms follow its projections.)"""
    storage = Storage("int4", "compressed", 16)
    ids = torch.randint(131, (40, 24), generator=torch.Generator().manual_seed(9))
    original = rewire(make(family), wiring)
    model, nearest = copy.deepcopy(original), copy.deepcopy(original)
    stored = {name for name, each in original.named_modules() if isinstance(each, nn.Linear) and "layers" in name}
    found = dict(calibrated(model, lambda name: storage if name in stored else DENSE, ids[:32], batch=8))
    assert found.keys() == stored and len(stored) == 28
    for name, rounded in found.items():
        dense = dequantized(rounded, storage, torch.float32)
        assert torch.equal(model.get_parameter(f"{name}.weight"), dense)
        weight = nearest.get_parameter(f"{name}.weight")
        weight.data = dequantized(round_to_nearest(weight.data, storage), storage, torch.float32)
    assert kl(original, model, ids[32:]) < 0.75 * kl(original, nearest, ids[32:])


def test_wiring_and_rounding_in_one_go() -> None:
    """A model that is rewired and rounded comes nearer to the standard one than merely rewired, without rounding."""
    storage = Storage("int8", "compressed")
    ids = torch.randint(131, (72, 24), generator=torch.Generator().manual_seed(9))
    original = make("llama-3")
    model, wiring = copy.deepcopy(original), Wiring.parse("standard:2 ladder:2", 4)
    for _ in calibrated(model, lambda name: storage if "layers" in name else DENSE, ids[:64], wiring, batch=8):
        pass
    rewired = rewire(copy.deepcopy(original), wiring)
    assert model.config.wiring == str(wiring)
    assert kl(original, model, ids[64:]) < 0.9 * kl(original, rewired, ids[64:])


# --- the verb -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tokens(tmp_path_factory.mktemp("calibrate") / "data")


@pytest.fixture(scope="module")
def source(data: Path) -> Path:
    return tiny.model(data.with_name("source"), data, torch.bfloat16, hidden_size=64, intermediate_size=96)


Run = Callable[..., bool]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line; whether it succeeded."""

    def call(*words: object) -> bool:
        monkeypatch.setattr("sys.argv", ["ladder", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        return not end.value.code

    return call


COMMON = ("--seq-len", tiny.SEQ_LEN, "--device", "cpu", "--tokens", 2048)


def native(folder: Path, ids: Tensor) -> Tensor:
    found = Directory(folder)
    assert found.config.weights
    return load(Decoder(found.config, dtype=torch.float32), found, check=True)(ids)


@packaged
@pytest.mark.parametrize("wiring", [None, "standard:1 ladder:2"])
def test_the_verb(source: Path, data: Path, tmp_path: Path, run: Run, wiring: str | None) -> None:
    """From a file or a folder of tokens: read natively, it is nearer to the original than without --calibrate."""
    texts = (data.with_suffix(".txt"), data)
    given = ("quantize", source, "--format", "int4", "--group", 32)
    for number, text in enumerate(texts):
        more = () if wiring is None else ("--wiring", wiring)
        assert run(*given[:2], tmp_path / f"{number}", *given[2:], "--calibrate", text, *COMMON, *more)
    files = [(tmp_path / f"{number}" / "model.safetensors").read_bytes() for number in range(2)]
    assert files[0] == files[1]
    folder = tmp_path / "0"
    assert "GPTQ on 2048 tokens" in (folder / "README.md").read_text()
    assert run(*given[:2], tmp_path / "nearest", *given[2:])
    shards = Shards.open(data)
    ids = shards.read(shards.tokens - 8 * tiny.SEQ_LEN, 8 * tiny.SEQ_LEN).view(8, -1)  # not calibrated on
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    other = native(tmp_path / "nearest", ids) if wiring is None else rewire(copy.deepcopy(original), wiring)(ids).logits
    with torch.no_grad():
        exact, ours = original(ids).logits, native(folder, ids)
    assert (ours - exact).square().mean() < 0.8 * (other - exact).square().mean()
    assert Directory(folder).config.wiring == Wiring.parse(wiring or "standard", 3)


REFUSED: list[tuple[tuple[object, ...], str]] = [
    (("--tokens", 9), "--tokens needs a text"),
    (("--wiring", "ladder"), "--wiring needs a text"),
    (("--calibrate", "nowhere.txt", "--seq-len", 16), "no such file: nowhere.txt"),
    (("--calibrate", "DATA", "--seq-len", 65), "more than the model's context of 64"),
    (("--calibrate", "DATA", "--seq-len", 16, "--batch", 4096), "give more data"),
    (("--calibrate", "DATA", "--seq-len", 16, "--wiring", "desync-2x"), "leaves partial sums on their ranks"),
    (("--calibrate", "DATA", "--seq-len", 16, "--wiring", "ladders"), "ladders"),
    (("--calibrate", "DATA", "--ridge", 0.0), "ridge must be from"),
]


@pytest.mark.parametrize("given, sentence", REFUSED)
def test_what_is_refused(
    run: Run,
    source: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    given: tuple[object, ...],
    sentence: str,
) -> None:
    given = tuple(data if word == "DATA" else word for word in given)
    assert not run("quantize", source, tmp_path / "out", "--format", "int8", *given)
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_wired_model_keeps_its_wiring(
    run: Run, source: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("convert", source, tmp_path / "wired", "--wiring", "ladder")
    given = ("--format", "int8", "--calibrate", data, *COMMON)
    assert run("quantize", tmp_path / "wired", tmp_path / "out", *given)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["wiring"] == "ladder" and raw["model_type"] == "ladder"
    assert not run("quantize", tmp_path / "wired", tmp_path / "other", *given, "--wiring", "ladder-2")
    assert "is wired already" in capsys.readouterr().err
