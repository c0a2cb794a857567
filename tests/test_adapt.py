"""ladder adapt: the model that comes out, and how far it is from the original."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ladder.cli import main
from ladder.data.shards import Shards
from ladder.hf import rewire
from ladder.hf.measures import Distance, distance
from ladder.train.distill import adapt
from ladder.train.options import AdaptOptions
from ladder.train.side import SideModel
from tests import training as tiny
from tests.training import SEQ_LEN, adapting, distilling, log, silent, weights

ROWS = 12  # of an evaluation


def measured(model: Any, original: Path, data: Path) -> Distance:
    """By the measures of `ladder eval`, on the tokens of the evaluation."""
    text = Shards.open(data).read(0, ROWS * SEQ_LEN + 1)
    return distance(model, AutoModelForCausalLM.from_pretrained(original), text, window=SEQ_LEN)


@pytest.mark.parametrize("method", ["full", "lora", "side"])
def test_comes_near_to_the_original(method: str, model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    copied = shutil.copytree(model, tmp_path / "model")
    wishes = {
        "eos_token_id": [0, 5],
        "temperature": 0.9,
        "do_sample": False,
    }  # as of Llama 2: not to transformers' taste
    (copied / "generation_config.json").write_text(json.dumps(wishes))
    options = distilling(copied, out, method=method, reduction=1)
    found = adapt(options, adapting(data, 40, eval_every=20, save_every=20), silent)
    original = AutoModelForCausalLM.from_pretrained(copied)
    begun = measured(rewire(AutoModelForCausalLM.from_pretrained(copied), "ladder"), copied, data)
    if method == "side":
        loaded: Any = SideModel.load(out, rewire(original, "ladder"))
    else:
        loaded = AutoModelForCausalLM.from_pretrained(out)
        assert loaded.config.wiring == "ladder" and loaded.dtype == torch.float32 and loaded.config.use_cache
        assert "staleness" not in json.loads((out / "config.json").read_text())
        assert wishes.items() <= json.loads((out / "generation_config.json").read_text()).items()
        assert weights(out).keys() == weights(copied).keys()
    ended = measured(loaded, copied, data)
    assert ended.kl.value < (0.75 if method == "side" else 0.6) * begun.kl.value
    assert found["eval_kl"] == pytest.approx(ended.kl.value, abs=tiny.nats())
    assert found["eval_agreement"] == pytest.approx(ended.agreement.value, abs=1e-9)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_kl" in line] == [20, 40]
    assert all({"eval_loss", "eval_perplexity", "eval_agreement"} <= line.keys() for line in lines if "eval_kl" in line)
    stale = [line.get("staleness") for line in lines if "loss" in line]
    assert stale == ([None] * 20 if method == "side" else [min(1.0, step / 20) for step in range(2, 41, 2)])
    assert AutoTokenizer.from_pretrained(out)("never wait")["input_ids"] and (out / "README.md").exists()
    assert not (out / "checkpoints").exists()
    name = "side.safetensors" if method == "side" else "model.safetensors"
    assert (out / name).stat().st_mode & 0o777 == 0o644


def test_the_rewired_layers_alone(model: Path, data: Path, tmp_path: Path) -> None:
    """Everything else stays as it was, to the last bit; recomputed or not."""
    wiring, before = "standard:1 ladder:2", weights(model)
    for name, changes in {"out": {}, "again": {"recompute": True}}.items():
        options = distilling(model, tmp_path / name, wiring, method="layers", staleness=0.0)
        adapt(options, adapting(data, 16, eval_every=16, **changes), silent)
    after = weights(tmp_path / "out")
    kept = {name for name, weight in after.items() if torch.equal(weight, before[name])}
    assert kept == {name for name in before if "layers.1." not in name and "layers.2." not in name} and len(kept) > 9
    rewired = rewire(AutoModelForCausalLM.from_pretrained(model), wiring)
    begun, ended = (measured(each, model, data).kl.value for each in (
        rewired, AutoModelForCausalLM.from_pretrained(tmp_path / "out")))  # fmt: skip
    assert ended < 0.8 * begun
    one, other = ([value for _, value in log(tmp_path / name)] for name in ("out", "again"))
    assert one == pytest.approx(other, abs=tiny.nats(16))


def test_wirings_that_keep_sums_local(model: Path, data: Path, tmp_path: Path) -> None:
    """As the ranks that they are for would compute them."""
    out = tmp_path / "out"
    options = distilling(model, out, "desync-2x", ranks=2, staleness=0.0)
    found = adapt(options, adapting(data, 16, eval_every=16), silent)
    loaded, rewired = (AutoModelForCausalLM.from_pretrained(each) for each in (out, model))
    assert loaded.config.wiring_ranks == 2
    ended, begun = (measured(each, model, data).kl.value for each in (loaded, rewire(rewired, "desync-2x", ranks=2)))
    assert found["eval_kl"] == pytest.approx(ended, abs=tiny.nats()) and ended < 0.8 * begun


@pytest.mark.usefixtures("without_onednn")
def test_half_precision_and_recomputing(data: Path, tmp_path: Path) -> None:
    """The original's type in the file; what is computed is near to float32."""
    original = tiny.model(tmp_path / "half", data, torch.bfloat16, tie_word_embeddings=True)
    for name, changes in {"wide": {}, "narrow": {"dtype": "bfloat16", "recompute": True}}.items():
        adapt(distilling(original, tmp_path / name), adapting(data, 8, **changes), silent)
        found = weights(tmp_path / name)
        assert {each.dtype for each in found.values()} == {torch.bfloat16} and "lm_head.weight" not in found
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert loaded.dtype == torch.bfloat16 and loaded.config.wiring == "ladder" and loaded.config.tie_word_embeddings
    wide, narrow = ([value for _, value in log(tmp_path / name, "eval_kl")] for name in ("wide", "narrow"))
    assert narrow == pytest.approx(wide, rel=0.1) and narrow != wide


def test_evaluation_is_under_the_wiring_itself(model: Path, data: Path, tmp_path: Path) -> None:
    """With hardly any learning: the loss grows with the staleness, from nothing; the evaluations know none."""
    out = tmp_path / "out"
    adapt(distilling(model, out), adapting(data, 12, lr=1e-12, log_every=1, eval_every=1), silent)
    wanted = measured(rewire(AutoModelForCausalLM.from_pretrained(model), "ladder"), model, data)
    assert [value for _, value in log(out, "eval_kl")] == pytest.approx([wanted.kl.value] * 12, abs=tiny.nats())
    losses = [value for _, value in log(out)]
    assert losses[0] < tiny.nats() and losses[:6] == sorted(losses[:6]) and losses[-1] > 0.5 * wanted.kl.value


def test_the_teachers_top(model: Path, data: Path, adapted: Path, tmp_path: Path) -> None:
    """Almost all of the vocabulary on disk teaches what the teacher in memory does; a few words teach less."""
    out = tmp_path / "out"
    told: list[str] = []
    options = distilling(model, out, teacher_top=298)
    found = adapt(options, adapting(data), lambda done, total, what: told.append(what))
    assert [value for _, value in log(out)] == pytest.approx([value for _, value in log(adapted)], abs=5e-3)
    assert "eval_kl" not in found and "running the original" in told and (out / "teacher/teacher.json").exists()
    one, other = (measured(AutoModelForCausalLM.from_pretrained(each), model, data).kl.value for each in (out, adapted))
    assert one == pytest.approx(other, rel=0.02)
    few = tmp_path / "few"
    adapt(distilling(model, few, teacher_top=1), adapting(data), silent)
    assert measured(AutoModelForCausalLM.from_pretrained(few), model, data).kl.value > 1.1 * one


def test_plain_fine_tuning(model: Path, data: Path, tmp_path: Path) -> None:
    """No teacher: the text alone, at once under the wiring."""
    options = distilling(model, tmp_path / "out", kl_weight=0.0, lm_weight=1.0, staleness=0.0)
    found = adapt(options, adapting(data, 12), silent)
    losses = [value for _, value in log(tmp_path / "out")]
    assert losses[-1] < losses[0] - 0.5 and "eval_kl" not in found
    assert log(tmp_path / "out", "staleness") == []
    assert "by fine-tuning on text alone" in " ".join((tmp_path / "out" / "README.md").read_text().split())
    both = distilling(model, tmp_path / "both", lm_weight=0.5, staleness=0.0)
    adapt(both, adapting(data, 1), silent)
    card = " ".join((tmp_path / "both" / "README.md").read_text().split())
    assert "by distillation from the original and by fine-tuning on text" in card


def test_the_originals_streams_teach_too(model: Path, data: Path, tmp_path: Path) -> None:
    """Without a word about its answers: what it says comes near, since what it is made of does."""
    options = distilling(model, tmp_path / "out", kl_weight=0.0, hidden_weight=1.0, staleness=0.0)
    found = adapt(options, adapting(data, 30), silent)
    losses = [value for _, value in log(tmp_path / "out")]
    begun = measured(rewire(AutoModelForCausalLM.from_pretrained(model), "ladder"), model, data)
    assert losses[-1] < 0.7 * losses[0] and found["eval_kl"] < 0.7 * begun.kl.value


def test_the_command_line(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = tiny.flags(AdaptOptions(str(model), tmp_path / "out")) + tiny.flags(adapting(data, 2), "adapt")
    for more, status, said in ((["--seq-len", "65"], 2, ""), ([], 0, "wrote "), ([], 2, "")):
        monkeypatch.setattr(sys, "argv", ["ladder", "adapt", *options, *more])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert (int(left.value.code or 0), out[:6]) == (status, said)
        assert err.startswith("ladder: ") and err.count("\n") == 1 if status else err == "" and "kl " in out
