"""ladder adapt: its own defaults, and the fit that it begins with."""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ladder.data.check import INDEX
from ladder.data.shards import Shards
from ladder.errors import LadderError
from ladder.hf.measures import distance
from ladder.scan.fit import fit
from ladder.scan.options import FIT_TOKENS, FitOptions
from ladder.train.distill import adapt
from ladder.train.options import AdaptOptions, TrainingOptions
from ladder.train.recipes import INPUTS, AdaptTrainingOptions
from ladder.train.stages import fitted as module
from tests import training as tiny
from tests.training import SEQ_LEN, Stop, adapting, log, same, silent, until, weights

Run = Callable[..., tuple[int, str, str]]
FIT = 32 * SEQ_LEN  # tokens of a fit


@pytest.fixture(scope="module")
def fitted(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `ladder fit` makes of the model."""
    out = tmp_path_factory.mktemp("fitted") / "out"
    fit(FitOptions(str(model), out, data=data, tokens=FIT, seq_len=SEQ_LEN, dtype="float32", device="cpu"), silent)
    return out


def fitting(model: Path, out: Path, **changes: Any) -> AdaptOptions:
    return AdaptOptions(str(model), out, fit_tokens=FIT, **changes)


# --- defaults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, rate", [("full", 3e-4), ("layers", 3e-4), ("lora", 1e-3), ("side", 3e-3)])
def test_defaults_by_method(method: str, rate: float) -> None:
    """Those of the run that docs/quality.md found best; what is given stays, and `ladder train` has its own."""
    found = AdaptTrainingOptions().filled(method)
    assert (found.lr, found.batch, found.warmup, found.weight_decay) == (rate, 16, 0.05, 0.01)
    assert replace(found, lr=1e-3, batch=64, warmup=0.02, weight_decay=0.1) == TrainingOptions()
    given = AdaptTrainingOptions(lr=1e-5, batch=64, clip=0.5, weight_decay=0.0).filled(method)
    assert given == TrainingOptions(lr=1e-5, batch=64, clip=0.5, weight_decay=0.0, warmup=0.05)
    assert AdaptTrainingOptions().filled(INPUTS) == TrainingOptions()
    assert TrainingOptions(lr=0.5).filled(method) == TrainingOptions(lr=0.5)


def test_the_help_has_them(run: Run) -> None:
    status, text, _ = run("adapt", "--help")
    flat = " ".join(text.replace("│", " ").split())
    assert status == 0 and "default: 0.0003, with lora 0.001, with side 0.003, for a file of inputs 0.001." in flat
    assert "default: 16, for a file of inputs 64." in flat and "default: 0.5, for a file of inputs 0." in flat
    assert f"[default: {FIT_TOKENS}]" in flat
    with pytest.raises(LadderError, match="warmup must be from 0 to below 1, not 1"):
        AdaptTrainingOptions(warmup=1.0)


def test_one_command(model: Path, data: Path, tmp_path: Path, run: Run) -> None:
    """What a run was started with is what it says; nothing but the data and lengths was given."""
    out = tmp_path / "out"
    some = ("--data", data, "--seq-len", SEQ_LEN, "--tokens", 16 * SEQ_LEN, "--device", "cpu", "--eval-tokens", 64)
    status, said, err = run("adapt", model, out, *some)
    assert (status, err) == (0, "") and said.startswith("wrote ")
    begun = json.loads((out / "run.json").read_text())
    wanted = {"lr": 3e-4, "batch": 16, "warmup": 0.05, "weight_decay": 0.01, "kl_weight": 1.0, "lm_weight": 0.5}
    wanted |= {"fit_tokens": FIT_TOKENS, "staleness": 0.0, "on_policy": 0.0, "init_from": None}
    assert wanted.items() <= begun.items()
    assert "weights that were fitted" in " ".join((out / "README.md").read_text().split())
    for method, more in (("side", {"lr": 3e-3, "fit_tokens": 0}), ("lora", {"lr": 1e-3, "fit_tokens": FIT_TOKENS})):
        assert run("adapt", model, tmp_path / method, *some, "--method", method, "--reduction", 1)[0] == 0
        assert more.items() <= json.loads((tmp_path / method / "run.json").read_text()).items()
        assert (tmp_path / method / "fitted").exists() == (method == "lora")


# --- the fit --------------------------------------------------------------------------------------------------------


def test_it_begins_with_the_fitted_weights(model: Path, data: Path, fitted: Path, tmp_path: Path) -> None:
    """Those of `ladder fit`, under the wiring from the first step on, on the original and on the text."""
    run = adapting(data, 4, log_every=1, eval_every=4, lr=1e-9)
    found = adapt(fitting(model, tmp_path / "out"), run, silent)
    assert same(weights(tmp_path / "out/fitted"), weights(fitted))
    text = Shards.open(data).read(0, 12 * SEQ_LEN + 1)
    loaded, original = (AutoModelForCausalLM.from_pretrained(each) for each in (fitted, model))
    begun = distance(loaded, original, text, window=SEQ_LEN)
    assert found["eval_kl"] == pytest.approx(begun.kl.value, abs=tiny.nats())
    assert log(tmp_path / "out", "staleness") == []
    adapt(tiny.distilling(model, tmp_path / "kl", init_from=fitted), run, silent)
    adapt(tiny.distilling(model, tmp_path / "text", init_from=fitted, kl_weight=0.0, lm_weight=1.0), run, silent)
    both, kl, nats = ([value for _, value in log(tmp_path / name)] for name in ("out", "kl", "text"))
    assert both == pytest.approx([one + 0.5 * other for one, other in zip(kl, nats, strict=True)], abs=tiny.nats(4))


@pytest.mark.parametrize("method", ["full", "layers", "lora"])
def test_stopped(method: str, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the fit, and after a checkpoint: the fit is not made twice, and the run is one that was not stopped."""
    outs, run = (tmp_path / "whole", tmp_path / "parts"), adapting(data, 8)
    own = [fitting(model, out, method=method) for out in outs]
    adapt(own[0], run, silent)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "fit", interrupted)
        adapt(own[1], run, silent)
    assert {path.name for path in outs[1].iterdir()} == {"run.json", "fitted.partial"}
    with pytest.raises(Stop):
        adapt(own[1], run, behind_the_fit(6))
    monkeypatch.setattr(module, "fit", None)
    with pytest.raises(LadderError, match=f"is a run with fit-tokens {FIT}, not 0: give the same"):
        adapt(replace(own[1], fit_tokens=0, staleness=0.0), run, silent)
    adapt(own[1], run, silent)
    assert log(outs[0]) == log(outs[1]) and same(weights(outs[0]), weights(outs[1]))
    assert same(weights(outs[0] / "fitted"), weights(outs[1] / "fitted"))
    assert {path.name for path in outs[0].iterdir()} == {path.name for path in outs[1].iterdir()}


def interrupted(options: FitOptions, progress: Any) -> None:
    """A fit that Ctrl-C ends, and that cannot clean up."""
    options.out.with_name("fitted.partial").mkdir()
    raise KeyboardInterrupt


def behind_the_fit(step: int) -> Callable[[int, int, str], None]:
    """Stops at a step of the training."""
    stop = until(step)
    return lambda done, total, what: stop(done, total, what) if total == 8 else None


@pytest.mark.parametrize("changes, reason", [
    ({"method": "side", "reduction": 1}, "--method side leaves the model's weights"),
    ({"staleness": 0.5}, "--staleness begins with the original's"),
    ({"staleness_way": "last"}, "--staleness begins with the original's"),
    ({"wiring": "desync-2x", "ranks": 2, "staleness": 0.0}, "--staleness begins"),
    ({"ranks": 2}, "emulated --ranks have no weights of their own"),
    ({"wiring": "standard"}, "the wiring is standard, as the model is"),
    ({"wiring": "desync-2x"}, "'desync-2x' leaves partial sums on their ranks"),
    ({"data": 7}, r"short has \d+ tokens, too few to fit on"),
    ({"quantized": True, "method": "lora"}, r"the weights of .* are quantized \(gptq\)"),
    ({"fit_tokens": 0}, None), ({"init_from": Path("fitted")}, None),
])  # fmt: skip
def test_where_it_is_not_made(
    changes: dict[str, Any], reason: str | None, model: Path, data: Path, tmp_path: Path
) -> None:
    """Staleness rises then, unless something else is said; and there is one reason."""
    changes, given, config = dict(changes), data, AutoConfig.from_pretrained(model)
    if changes.pop("data", None):
        given = shutil.copytree(data, tmp_path / "short")
        cut(given, 5 * SEQ_LEN)
    if changes.pop("quantized", False):
        config.quantization_config = {"quant_method": "gptq", "bits": 4}
    asked = AdaptOptions(str(model), tmp_path / "out", **changes)
    found, told = module.decided(asked, adapting(given), config)
    assert not found.fits and (told is None) == (reason is None)
    assert found.staleness_share == (0.0 if asked.init_from or asked.method == "side" else asked.staleness or 0.5) or (
        asked.staleness == found.staleness_share == 0
    )
    if reason is not None:
        with pytest.raises(LadderError, match=reason):
            raise LadderError(told)


def cut(folder: Path, tokens: int) -> None:
    """Shards of so few tokens."""
    index = json.loads((folder / INDEX).read_text())
    shard = {**index["files"][0], "tokens": tokens}
    file = folder / shard["name"]
    file.write_bytes(file.read_bytes()[: tokens * Shards.open(folder).index.width])
    (folder / INDEX).write_text(json.dumps({**index, "files": [shard], "tokens": tokens}))


def test_the_reason_is_told_once(model: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a warning where the user did not choose it."""
    caplog.set_level(logging.INFO, "ladder")
    for number, (changes, level) in enumerate((({"wiring": "standard"}, "WARNING"), ({"staleness": 0.0}, "INFO"))):
        caplog.clear()
        adapt(AdaptOptions(str(model), tmp_path / str(number), **changes), adapting(data, 1), silent)  # type: ignore[arg-type]
        told = [record for record in caplog.records if "are not fitted before the training: " in record.getMessage()]
        assert [record.levelname for record in told] == [level] and not (tmp_path / str(number) / "fitted").exists()


def test_it_fails_in_one_sentence(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options of this verb, and nothing is left behind."""

    def farther(options: FitOptions, progress: Any) -> None:
        raise module.FitFailed("fitted on 512 tokens the model is farther", "give more --tokens, or a larger --ridge")

    monkeypatch.setattr(module, "fit", farther)
    with pytest.raises(LadderError, match=r"the model is farther: give other --fit-tokens, or 0 to train without$"):
        adapt(fitting(model, tmp_path / "out"), adapting(data, 2), silent)
    assert not (tmp_path / "out").exists()


def test_a_run_that_has_begun_outlives_a_fit_that_fails(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has removed its fitted weights, which are made once more."""
    out, run = tmp_path / "out", adapting(data, 8)
    with pytest.raises(Stop):
        adapt(fitting(model, out), run, behind_the_fit(6))
    shutil.rmtree(out / "fitted")

    def fails(options: FitOptions, progress: Any) -> None:
        raise LadderError("the disk is full")

    with monkeypatch.context() as patched, pytest.raises(LadderError, match=r"^the disk is full$"):
        patched.setattr(module, "fit", fails)
        adapt(fitting(model, out), run, silent)
    adapt(fitting(model, out), run, silent)
    assert (out / "model.safetensors").exists()


def test_no_room_for_a_rising_staleness(model: Path, data: Path, tmp_path: Path) -> None:
    """Where the weights cannot be fitted, staleness rises: the user hears why there is one."""
    asked = AdaptOptions(str(model), tmp_path / "out", "standard", on_policy=0.6)
    with pytest.raises(
        LadderError, match=r"cannot be fitted first \(the wiring is standard.*\), and then --on-policy 0.6"
    ):
        module.decided(asked, adapting(data), AutoConfig.from_pretrained(model))


def test_the_memory_of_a_fit(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has room for float32, for the checkpoint's own dtype, or is refused before a weight is read."""
    config = AutoConfig.from_pretrained(model)
    config.dtype = torch.bfloat16
    options, run = fitting(model, tmp_path / "out"), adapting(data)
    count = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(model).parameters())
    numbers = 2 * count + 10 * FIT * config.hidden_size
    monkeypatch.setattr(module, "read_original", lambda *_: (config, None, SEQ_LEN))
    monkeypatch.setattr(type(run), "device_type", "cuda")
    for room, wanted in ((4.0, "float32"), (3.9, "auto"), (2.0, "auto"), (1.9, None)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda room=room: (room * numbers / module.USABLE + 1, 0))
        if wanted is None:
            with pytest.raises(LadderError, match=r"on one GPU, which has .* give fewer --fit-tokens, or 0"):
                module._dtype(options, run)
        else:
            assert module._dtype(options, run) == wanted


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, ranks want one each")
def test_two_ranks(model: Path, data: Path, fitted: Path, tmp_path: Path) -> None:
    """One fits, both begin there; and both end, with nothing left, where it fails."""
    run, broken = adapting(data, 4), shutil.copytree(model, tmp_path / "broken")
    adapt(fitting(model, tmp_path / "one"), run, silent)
    assert tiny.end(tiny.start("adapt", fitting(model, tmp_path / "two"), run, ranks=2)) == [0, 0]
    assert same(weights(tmp_path / "two/fitted"), weights(fitted))
    one, two = ([value for _, value in log(tmp_path / name)] for name in ("one", "two"))
    assert one == pytest.approx(two, abs=tiny.nats(4))
    held = weights(broken)
    held["model.norm.weight"][0] = float("nan")
    save_file(held, broken / "model.safetensors", {"format": "pt"})
    assert tiny.end(tiny.start("adapt", fitting(broken, tmp_path / "none"), run, ranks=2)) == [2, 2]
    assert not (tmp_path / "none").exists()


# --- runs from before -----------------------------------------------------------------------------------------------


def test_a_run_with_the_defaults_of_before(model: Path, data: Path, tmp_path: Path) -> None:
    """The same command says how it goes on, all at once; nothing changes silently."""
    out, run = tmp_path / "out", adapting(data, 8, lr=1e-3, warmup=0.02, weight_decay=0.1)
    with pytest.raises(Stop):
        adapt(tiny.distilling(model, out), run, until(6))
    file = out / "run.json"
    begun = json.loads(file.read_text())
    for name in ("fit_tokens", "on_policy", "on_policy_prompt", "reverse_kl"):
        del begun[name]
    file.write_text(json.dumps(begun))
    missing = dict.fromkeys(("lr", "warmup", "weight_decay"))
    now = AdaptTrainingOptions(**{**{name: getattr(run, name) for name in vars(run)}, **missing, "batch": 8})
    with pytest.raises(LadderError) as refused:
        adapt(AdaptOptions(str(model), out), now, silent)
    flags = "--lr 0.001 --warmup 0.02 --weight-decay 0.1 --lm-weight 0.0 --fit-tokens 0"
    wanted = f"{out} was begun when defaults were others: add {flags} to continue it, or name a new folder"
    assert str(refused.value) == wanted
    assert json.loads(file.read_text()) == begun
    with pytest.raises(LadderError, match=r"is a run with staleness 0\.5, not 0.25: give the same"):
        adapt(tiny.distilling(model, out, staleness=0.25), run, silent)
    again = replace(now, lr=1e-3, warmup=0.02, weight_decay=0.1)
    assert adapt(tiny.distilling(model, out), again, silent)["eval_kl"] > 0
