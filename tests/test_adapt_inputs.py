"""ladder adapt for models that read more than text: classification by KL and by labels, features, encoder-decoders."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.cli import main
from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.scan.fit_inputs import fit_inputs
from ladder.scan.inputs import Inputs, output_distance
from ladder.scan.options import FitOptions
from ladder.train.distill_inputs import adapt_inputs
from ladder.train.folder import complete_checkpoints
from ladder.train.options import AdaptOptions, TrainingOptions
from tests import training as tiny
from tests.residuals import build
from tests.test_fit_inputs import examples, written
from tests.test_residuals_saved import auto
from tests.training import Stop, log, same, silent, until, weights

TRAIN, VALID, BATCH = 128, 16, 16


def labels(name: str, images: dict[str, Tensor]) -> Tensor:
    """What the original would say itself."""
    with torch.no_grad():
        return build(name)(**images).logits.argmax(-1)  # type: ignore[no-any-return]


def training(tmp_path: Path, name: str, **changes: Any) -> TrainingOptions:
    """A run on files that are written there."""
    for file, count, seed in (("train", TRAIN, 1), ("valid", VALID, 2)):
        data = examples(name, count, seed)
        if name == "vit":
            data["labels"] = labels(name, data)
        written(tmp_path / f"{file}.safetensors", data)
    files = {"data": tmp_path / "train.safetensors", "valid": tmp_path / "valid.safetensors"}
    often = {"batch": BATCH, "log_every": 2, "eval_every": 6, "save_every": 4, "device": "cpu", "lr": 1e-3}
    return TrainingOptions(**{**files, **often, **changes})


def saved(tmp_path: Path, name: str) -> str:
    build(name).save_pretrained(tmp_path / "in")
    return str(tmp_path / "in")


def begun(name: str, wiring: str) -> float:
    """How far the rewired model is from its original, on what the runs are evaluated on."""
    return distance_of(rewire(build(name), wiring), name)


def distance_of(model: Any, name: str) -> float:
    return output_distance(model, build(name), Inputs(examples(name, VALID, 2)), 8).value


@pytest.mark.parametrize("name, wiring, more", [
    ("vit", "ladder", {}),
    ("clip-vision", "parallel", {"method": "layers"}),
    ("siglip", "ladder", {"hidden_weight": 1.0}),
    ("dinov2", "standard:1 ladder:2", {"staleness_way": "last"}),
    ("modernbert", "ladder", {"staleness": 0.0}),
    ("bert", "ladder", {}),
    ("whisper", "ladder", {"hidden_weight": 0.5, "staleness": 0.0}),
    ("t5", "parallel", {"staleness": 0.0}),
])  # fmt: skip
def test_comes_near_to_the_original(name: str, wiring: str, more: dict[str, Any], tmp_path: Path) -> None:
    source, out = saved(tmp_path, name), tmp_path / "out"
    (tmp_path / "in" / "preprocessor_config.json").write_text("{}")
    options = AdaptOptions(source, out, wiring, examples=12 * BATCH, **more)
    found = adapt_inputs(options, training(tmp_path, name), silent)
    loaded = auto(name).from_pretrained(out, attn_implementation="eager")
    ended = distance_of(loaded, name)
    assert loaded.config.wiring == wiring and ended < 0.85 * begun(name, wiring)
    value = found.get("eval_kl", found.get("eval_distance"))
    assert value == pytest.approx(ended, rel=1e-3) and ("eval_agreement" in found) == ("eval_kl" in found)
    assert found["examples"] == 12 * BATCH and [step for step, _ in log(out, "eval_loss")] == [6, 12]
    assert {path.name for path in out.iterdir()} >= {"README.md", "preprocessor_config.json", "run.json"}
    own, given = (json.loads((folder / "config.json").read_text()) for folder in (out, tmp_path / "in"))
    assert not (out / "checkpoints").exists() and own.get("use_cache") == given.get("use_cache")
    card = " ".join((out / "README.md").read_text().split())
    assert "by distillation from the original:" in card and "ladder eval" not in card
    assert f"{auto(name).__name__}.from_pretrained" in card
    stacks = len({"siglip": "ti", "whisper": "ed", "t5": "ed"}.get(name, "1"))
    assert (f"Each of its {stacks} stacks of layers is wired so" if stacks > 1 else "of 3 layers are rewired") in card


def test_labels(tmp_path: Path) -> None:
    """Alone: no teacher is there to be compared with; and beside the original."""
    source, run = saved(tmp_path, "vit"), training(tmp_path, "vit")
    options = AdaptOptions(source, tmp_path / "alone", kl_weight=0.0, lm_weight=1.0, staleness=0.0, examples=160)
    found = adapt_inputs(options, run, silent)
    data = examples("vit", VALID, 2)
    loaded = auto("vit").from_pretrained(tmp_path / "alone", attn_implementation="eager").eval()
    with torch.no_grad():
        logits = loaded(**data).logits
    wanted = labels("vit", data)
    assert found["eval_cross_entropy"] == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, wanted)), rel=1e-3
    )
    assert found["eval_accuracy"] == float((logits.argmax(-1) == wanted).double().mean())
    assert "eval_kl" not in found and log(tmp_path / "alone")[-1][1] < 0.7 * log(tmp_path / "alone")[0][1]
    assert "by fine-tuning on labels alone" in (tmp_path / "alone/README.md").read_text()
    both = AdaptOptions(source, tmp_path / "both", lm_weight=0.5, examples=16)
    found = adapt_inputs(both, run, silent)
    assert found["eval_loss"] == pytest.approx(found["eval_kl"] + 0.5 * found["eval_cross_entropy"])


def test_stopped_and_continued(tmp_path: Path) -> None:
    """Before its first checkpoint and after it: the curve and the model of a run that was not."""
    source, run = saved(tmp_path, "vit"), training(tmp_path, "vit")
    whole, parts = (AdaptOptions(source, tmp_path / name, examples=8 * BATCH) for name in ("whole", "parts"))
    adapt_inputs(whole, run, silent)
    for at in (3, 6):
        with pytest.raises(Stop):
            adapt_inputs(parts, run, until(at))
    assert len(complete_checkpoints(parts.out / "checkpoints")) == 1 and not (parts.out / "config.json").exists()
    adapt_inputs(parts, run, silent)
    assert log(parts.out) == log(whole.out) and same(weights(parts.out), weights(whole.out))
    with pytest.raises(LadderError, match="whole is finished: name a new folder"):
        adapt_inputs(whole, run, silent)
    again = AdaptOptions(source, tmp_path / "again", examples=8 * BATCH)
    with pytest.raises(Stop):
        adapt_inputs(again, run, until(6))
    changed = examples("vit", TRAIN, 7)
    written(tmp_path / "train.safetensors", {**changed, "labels": labels("vit", changed)})
    with pytest.raises(LadderError, match=r"train.safetensors has changed since .*again was started"):
        adapt_inputs(again, run, silent)


def test_begins_with_fitted_weights(tmp_path: Path) -> None:
    source, run = saved(tmp_path, "vit"), training(tmp_path, "vit", lr=1e-9)
    fit_inputs(FitOptions(source, tmp_path / "fitted", data=run.data), silent)  # which leaves the labels alone
    options = AdaptOptions(source, tmp_path / "out", init_from=tmp_path / "fitted", examples=BATCH)
    found = adapt_inputs(options, run, silent)
    assert found["eval_kl"] == pytest.approx(
        distance_of(auto("vit").from_pretrained(tmp_path / "fitted", attn_implementation="eager"), "vit"), rel=1e-2
    )
    with pytest.raises(LadderError, match="fitted is wired 'ladder', not 'parallel'"):
        adapt_inputs(AdaptOptions(source, tmp_path / "o", "parallel", init_from=tmp_path / "fitted"), run, silent)


def test_desync_for_its_ranks(tmp_path: Path) -> None:
    source, run = saved(tmp_path, "vit"), training(tmp_path, "vit")
    options = AdaptOptions(source, tmp_path / "out", "desync-2x", ranks=2, staleness=0.0, examples=8 * BATCH)
    found = adapt_inputs(options, run, silent)
    loaded = auto("vit").from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert loaded.config.wiring_ranks == 2 and distance_of(loaded, "vit") == pytest.approx(found["eval_kl"], rel=1e-3)
    assert found["eval_kl"] < 0.8 * distance_of(rewire(build("vit"), "desync-2x", ranks=2), "vit")


@pytest.mark.parametrize("changes, run, message", [
    ({"wiring": "desync-2x"}, {}, "give --ranks, the degree that it is for"),
    ({"wiring": "rope"}, {}, "unknown wiring 'rope'"),
    ({"method": "lora"}, {}, "--method lora is for decoders of text: give full or layers"),
    ({"teacher_top": 4}, {}, "--teacher-top is for decoders of text"),
    ({}, {"tokens": 1000}, "--tokens counts tokens of text, and .* reads inputs: give --examples"),
    ({}, {"fsdp": True}, "--fsdp is for decoders of text"),
    ({}, {"batch": 1000}, "128 examples: a batch of 1000 is needed"),
    ({"method": "layers", "wiring": "standard"}, {}, "--method layers trains rewired layers"),
    ({"init_from": "valid.safetensors"}, {}, "has no config.json: name a finished model"),
    ({"lm_weight": 1.0}, {"labels": None}, "--lm-weight is for labels, which the file of inputs has not"),
    ({}, {"labels": torch.full((TRAIN,), 5)}, "labels must be from 0 to 4, or -100, not 5"),
    ({}, {"labels": torch.zeros(TRAIN, 2, dtype=torch.long)}, "labels must be 1 for each example, not 2"),
    ({}, {"labels": torch.zeros(TRAIN)}, "labels must be whole numbers"),
])  # fmt: skip
def test_refused(changes: dict[str, Any], run: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Before anything is written."""
    source, given = saved(tmp_path, "vit"), dict(run)
    if "labels" in given:
        data, told = examples("vit", TRAIN), given.pop("labels")
        files = written(tmp_path / "own.safetensors", data if told is None else {**data, "labels": told})
        options = training(tmp_path, "vit", **given, data=files, valid=None)
    else:
        options = training(tmp_path, "vit", **given)
    if "init_from" in changes:
        changes = {**changes, "init_from": tmp_path / changes["init_from"]}
    with pytest.raises(LadderError, match=message) as refused:
        adapt_inputs(AdaptOptions(source, tmp_path / "out", **changes), options, silent)
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name, changes, message", [
    ("clip-vision", {"labels": True}, "gives back features, which labels say nothing of"),
    ("vit", {"problem_type": "multi_label_classification"}, "whose logits are no probabilities"),
    ("vit", {"num_labels": 1}, "has a single logit"),
    ("bert", {"wiring": "parallel"}, "impossible in a post-norm model"),
])  # fmt: skip
def test_models_that_are_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    more = copy.copy(changes)
    wiring, labelled = more.pop("wiring", "ladder"), more.pop("labels", False)
    build(name, **more).save_pretrained(tmp_path / "in")
    data = examples(name, 40)
    told = {"labels": torch.zeros(40, dtype=torch.long)} if labelled else {}
    run = TrainingOptions(written(tmp_path / "data.safetensors", {**data, **told}), batch=8, device="cpu")
    with pytest.raises(LadderError, match=message) as refused:
        adapt_inputs(AdaptOptions(str(tmp_path / "in"), tmp_path / "out", wiring), run, silent)
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = tiny.flags(AdaptOptions(saved(tmp_path, "vit"), tmp_path / "out", examples=2 * BATCH))
    options += tiny.flags(training(tmp_path, "vit"))
    capsys.readouterr()
    for more, status, said in ((["--seq-len", "65"], 2, ""), ([], 0, "wrote "), ([], 2, "")):
        monkeypatch.setattr(sys, "argv", ["ladder", "adapt", *options, *more])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert (int(left.value.code or 0), out[:6]) == (status, said)
        assert err.count("\n") == 1 if status else "32 examples: loss" in out and "agreement" in out
