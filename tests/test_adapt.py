"""ladder adapt: the model that comes out, how far it is from the original, and runs that are killed."""

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

from ladder.adapt import distill as module
from ladder.adapt.distill import adapt
from ladder.adapt.folder import complete
from ladder.adapt.options import AdaptOptions, TrainingOptions
from ladder.adapt.shards import Shards, Windows
from ladder.adapt.side import SideModel
from ladder.adapt.teacher import remember
from ladder.cli import main
from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.measures import Distance, distance
from tests import training as tiny
from tests.checkpoints import byte_tokenizer
from tests.training import WINDOW, Stop, log, same, silent, training, until, weights

ROWS = 12  # of an evaluation


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"), data)


@pytest.fixture(scope="module")
def whole(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to: 24 steps, staleness 1 after 12."""
    out = tmp_path_factory.mktemp("whole") / "out"
    adapt(AdaptOptions(str(model), out), run_of(data), silent)
    return out


def run_of(data: Path, steps: int = 24, **changes: Any) -> TrainingOptions:
    return training(data, steps, **{"valid": data, "eval_every": 6, "lr": 1e-2, **changes})


def measured(model: Any, original: Path, data: Path) -> Distance:
    """By the measures of `ladder eval`, on the tokens of the evaluation."""
    text = Shards.open(data).read(0, ROWS * WINDOW + 1)
    return distance(model, AutoModelForCausalLM.from_pretrained(original), text, window=WINDOW)


# --- what comes out -------------------------------------------------------------------------------------------------


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
    options = AdaptOptions(str(copied), out, method=method, reduction=1)
    found = adapt(options, run_of(data, 40, eval_every=20, save_every=20), silent)
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
    assert found["eval_kl"] == pytest.approx(ended.kl.value, rel=1e-4)
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


def test_wirings_that_keep_sums_local(model: Path, data: Path, tmp_path: Path) -> None:
    """As the ranks that they are for would compute them."""
    out = tmp_path / "out"
    options = AdaptOptions(str(model), out, "desync-2x", ranks=2, staleness=0.0)
    found = adapt(options, run_of(data, 16, eval_every=16), silent)
    loaded, rewired = (AutoModelForCausalLM.from_pretrained(each) for each in (out, model))
    assert loaded.config.wiring_ranks == 2
    ended, begun = (measured(each, model, data).kl.value for each in (loaded, rewire(rewired, "desync-2x", ranks=2)))
    assert found["eval_kl"] == pytest.approx(ended, rel=1e-4) and ended < 0.8 * begun


def test_half_precision_and_recomputing(data: Path, tmp_path: Path) -> None:
    """The original's type in the file; what is computed is near to float32."""
    original = tiny.model(tmp_path / "half", data, torch.bfloat16, tie_word_embeddings=True)
    for name, changes in {"wide": {}, "narrow": {"dtype": "bfloat16", "recompute": True}}.items():
        adapt(AdaptOptions(str(original), tmp_path / name), run_of(data, 8, **changes), silent)
        found = weights(tmp_path / name)
        assert {each.dtype for each in found.values()} == {torch.bfloat16} and "lm_head.weight" not in found
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert loaded.dtype == torch.bfloat16 and loaded.config.wiring == "ladder" and loaded.config.tie_word_embeddings
    wide, narrow = ([value for _, value in log(tmp_path / name, "eval_kl")] for name in ("wide", "narrow"))
    assert narrow == pytest.approx(wide, rel=0.1) and narrow != wide


def test_evaluation_is_under_the_wiring_itself(model: Path, data: Path, tmp_path: Path) -> None:
    """With hardly any learning: the loss grows with the staleness, from nothing; the evaluations know none."""
    out = tmp_path / "out"
    adapt(AdaptOptions(str(model), out), run_of(data, 12, lr=1e-12, log_every=1, eval_every=1), silent)
    wanted = measured(rewire(AutoModelForCausalLM.from_pretrained(model), "ladder"), model, data)
    assert [value for _, value in log(out, "eval_kl")] == pytest.approx([wanted.kl.value] * 12, rel=1e-3)
    losses = [value for _, value in log(out)]
    assert losses[0] < 1e-6 and losses[:6] == sorted(losses[:6]) and losses[-1] > 0.5 * wanted.kl.value


def test_the_teachers_top(model: Path, data: Path, whole: Path, tmp_path: Path) -> None:
    """Almost all of the vocabulary on disk teaches what the teacher in memory does; a few words teach less."""
    out = tmp_path / "out"
    told: list[str] = []
    options = AdaptOptions(str(model), out, teacher_top=298)
    found = adapt(options, run_of(data), lambda done, total, what: told.append(what))
    assert [value for _, value in log(out)] == pytest.approx([value for _, value in log(whole)], abs=5e-3)
    assert "eval_kl" not in found and "asking the original" in told and (out / "teacher/teacher.json").exists()
    one, other = (measured(AutoModelForCausalLM.from_pretrained(each), model, data).kl.value for each in (out, whole))
    assert one == pytest.approx(other, rel=0.02)
    few = tmp_path / "few"
    adapt(AdaptOptions(str(model), few, teacher_top=1), run_of(data), silent)
    assert measured(AutoModelForCausalLM.from_pretrained(few), model, data).kl.value > 1.1 * one


def test_the_teacher_is_asked_once(data: Path, tmp_path: Path) -> None:
    """Not even loaded where its answers are there; of other facts, or cut, they are refused; so is a full disk."""
    windows, loads = Windows(Shards.open(data), WINDOW), list[int]()

    def original() -> Any:
        loads.append(1)
        return AutoModelForCausalLM.from_config(tiny.config())

    def ask(count: int, name: str, folder: str = "teacher") -> Any:
        return remember(original, windows, tmp_path / folder, count, {"model": name}, silent)

    first, again = ask(2, "a"), ask(2, "a")
    assert len(loads) == 1 and torch.equal(first[3]["teacher_ids"], again[3]["teacher_ids"])
    for count, name in ((2, "b"), (3, "a")):
        with pytest.raises(LadderError, match="holds the answers of another teacher or to other data: remove it"):
            ask(count, name)
    os.truncate(tmp_path / "teacher/logs.bin", 100)
    with pytest.raises(LadderError, match="teacher is damaged: remove it"):
        ask(2, "a")
    with pytest.raises(LadderError, match=r"the teacher's answers need .* GB, the disk has .* GB: lower --teacher-top"):
        ask(10**12, "a", "full")
    assert len(loads) == 1 and not (tmp_path / "full").exists()


def test_plain_fine_tuning(model: Path, data: Path, tmp_path: Path) -> None:
    """No teacher: the text alone, at once under the wiring."""
    options = AdaptOptions(str(model), tmp_path / "out", kl_weight=0.0, lm_weight=1.0, staleness=0.0)
    found = adapt(options, run_of(data, 12), silent)
    losses = [value for _, value in log(tmp_path / "out")]
    assert losses[-1] < losses[0] - 0.5 and "eval_kl" not in found
    assert log(tmp_path / "out", "staleness") == []


def test_the_originals_streams_teach_too(model: Path, data: Path, tmp_path: Path) -> None:
    """Without a word about its answers: what it says comes near, since what it is made of does."""
    options = AdaptOptions(str(model), tmp_path / "out", kl_weight=0.0, hidden_weight=1.0, staleness=0.0)
    found = adapt(options, run_of(data, 30), silent)
    losses = [value for _, value in log(tmp_path / "out")]
    begun = measured(rewire(AutoModelForCausalLM.from_pretrained(model), "ladder"), model, data)
    assert losses[-1] < 0.7 * losses[0] and found["eval_kl"] < 0.7 * begun.kl.value


# --- runs that are killed -------------------------------------------------------------------------------------------


def test_killed_twice(model: Path, data: Path, whole: Path, tmp_path: Path) -> None:
    """Once between two checkpoints, once in the middle of one: the curve and the model of a run that was not."""
    out = tmp_path / "out"
    options = (AdaptOptions(str(model), out), run_of(data))
    step = tiny.kill_behind_a_checkpoint(tiny.start("adapt", *options), out)
    assert step in (4, 8, 12) and not (out / "config.json").exists()
    assert tiny.end(tiny.start("adapt", *options, broken="checkpoint-16")) == [-signal.SIGKILL]
    assert (out / "checkpoints/checkpoint-16/optimizer.pt").stat().st_size == 100
    assert [path.name for path in complete(out / "checkpoints")] == ["checkpoint-12"]
    assert tiny.end(tiny.start("adapt", *options)) == [0]
    for key in ("loss", "eval_loss", "eval_kl", "eval_agreement", "grad_norm", "learning_rate", "staleness"):
        assert log(out, key) == log(whole, key)
    assert same(weights(out), weights(whole))
    assert not (out / "checkpoints").exists() and {path.name for path in out.iterdir()} == {
        path.name for path in whole.iterdir()
    }


@pytest.mark.parametrize("method, way, top, at", [
    ("lora", "together", 0, 3), ("lora", "first", 0, 6), ("side", "together", 0, 6), ("full", "chance", 8, 16),
    ("full", "chance", 0, 6),
])  # fmt: skip
def test_stopped(method: str, way: str, top: int, at: int, model: Path, data: Path, tmp_path: Path) -> None:
    """Before its first checkpoint; after it; while the teacher was being asked."""
    outs, options = (tmp_path / "whole", tmp_path / "parts"), run_of(data, 8)
    more: dict[str, Any] = {"method": method, "reduction": 1, "staleness": 0.9, "staleness_way": way}
    own = [AdaptOptions(str(model), out, teacher_top=top, **more) for out in outs]
    adapt(own[0], options, silent)
    with pytest.raises(Stop):
        adapt(own[1], options, until(at, asking=top > 0))
    assert len(complete(outs[1] / "checkpoints")) == (at == 6)
    assert (outs[1] / "teacher").exists() == (top > 0) and not (outs[1] / "teacher/teacher.json").exists()
    adapt(own[1], options, silent)
    name = "side.safetensors" if method == "side" else "model.safetensors"
    assert log(outs[0]) == log(outs[1]) and same(weights(outs[0], name), weights(outs[1], name))


@pytest.mark.parametrize("name, damage, how", [
    ("model.safetensors", b"half", r"model.safetensors has 4 bytes of \d+"),
    ("optimizer.pt", None, r"optimizer.pt has 0 bytes of \d+"),
    ("complete", b"{", "complete cannot be read"), ("complete", b"\0" * 8, "complete cannot be read"),
    ("complete", b"\xff", "complete cannot be read"), ("complete", b'{"optimizer.pt": "x"}', "complete cannot be read"),
])  # fmt: skip
def test_a_damaged_checkpoint(
    name: str, damage: bytes | None, how: str, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is refused before a model is loaded, and without it the run goes on from the one before it."""
    options = (AdaptOptions(str(model), tmp_path / "out"), run_of(data, 8, save_every=2, keep=2))
    with pytest.raises(Stop):
        adapt(*options, until(6))
    before, checkpoint = complete(tmp_path / "out/checkpoints")
    (checkpoint / name).unlink()
    if damage is not None:
        (checkpoint / name).write_bytes(damage)
    with monkeypatch.context() as patch, pytest.raises(LadderError, match=f"checkpoint-4 is damaged, {how}: remove it"):
        patch.setattr(module, "rewire", None)
        adapt(*options, silent)
    shutil.rmtree(checkpoint)
    (before / "complete").write_bytes(b"")  # as it was before sizes were written down
    begun = []
    adapt(*options, lambda done, total, what: begun.append(done))
    assert begun[0] == 3 and [step for step, _ in log(tmp_path / "out")] == [2, 4, 6, 8]


def test_a_run_from_before_there_was_an_option_is_continued(model: Path, data: Path, tmp_path: Path) -> None:
    options = (AdaptOptions(str(model), tmp_path / "out"), run_of(data, 8))
    with pytest.raises(Stop):
        adapt(*options, until(6))
    file = tmp_path / "out/run.json"
    asked = json.loads(file.read_text())
    assert asked.pop("optimizer") == "adamw"
    file.write_text(json.dumps(asked))
    with pytest.raises(LadderError, match="out is a run with optimizer adamw, not muon"):
        adapt(options[0], replace(options[1], optimizer="muon"), silent)
    adapt(*options, silent)
    assert (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize("what", ["data", "model"])
def test_what_a_run_began_with_is_not_exchanged(what: str, model: Path, data: Path, tmp_path: Path) -> None:
    folders = {name: shutil.copytree(path, tmp_path / name) for name, path in (("data", data), ("model", model))}
    options = AdaptOptions(str(folders["model"]), tmp_path / "out"), run_of(folders["data"], 8)
    with pytest.raises(Stop):
        adapt(*options, until(6))
    shutil.rmtree(folders[what])
    if what == "data":
        shutil.copytree(tiny.tokens(tmp_path / "other", seed=2), folders[what])
        shutil.rmtree(folders[what] / "tokenizer")
        shutil.copytree(data / "tokenizer", folders[what] / "tokenizer")
    else:
        tiny.model(folders[what], data, torch.bfloat16)
    with pytest.raises(LadderError, match=f"{what} is not what it was when .*out was begun: name a new folder"):
        adapt(*options, silent)


def test_no_model_of_no_numbers(model: Path, data: Path, tmp_path: Path) -> None:
    path = shutil.copytree(model, tmp_path / "model")
    found = weights(path)
    found["model.norm.weight"][0] = float("nan")
    save_file(found, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(LadderError, match="the loss is nan at step 2: there is no model; try a smaller --lr"):
        adapt(AdaptOptions(str(path), tmp_path / "out"), run_of(data, 12), silent)
    assert not (tmp_path / "out/config.json").exists()


def test_experts_are_found_again(data: Path, tmp_path: Path) -> None:
    """In memory they lie together, in a checkpoint of the hub each by itself."""
    sizes = {name: getattr(tiny.config(), name) for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    config = MixtralConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, vocab_size=300, num_local_experts=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(data / "tokenizer").save_pretrained(tmp_path / "model")
    outs, options = (tmp_path / "whole", tmp_path / "parts"), run_of(data, 8)
    own = [AdaptOptions(str(tmp_path / "model"), out, kl_weight=0.0, lm_weight=1.0) for out in outs]
    adapt(own[0], options, silent)
    with pytest.raises(Stop):
        adapt(own[1], options, until(6))
    adapt(own[1], options, silent)
    assert log(outs[0]) == log(outs[1]) and same(weights(outs[0]), weights(outs[1]))
    assert weights(outs[0]).keys() == weights(tmp_path / "model").keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, torch shards there")
def test_two_ranks_share_the_parameters(data: Path, tmp_path: Path) -> None:
    """FSDP2, tied weights, a teacher, rows in two goes."""
    original = tiny.model(tmp_path / "model", data, tie_word_embeddings=True)
    outs, options = (tmp_path / "one", tmp_path / "two"), run_of(data, 10, micro=2)
    adapt(AdaptOptions(str(original), outs[0]), options, silent)
    two = AdaptOptions(str(original), outs[1]), replace(options, fsdp=True)
    assert tiny.end(tiny.start("adapt", *two, ranks=2)) == [0, 0]
    for key in ("loss", "eval_kl", "eval_agreement"):
        assert [value for _, value in log(outs[1], key)] == pytest.approx(
            [value for _, value in log(outs[0], key)], abs=1e-5
        )
    one, other = weights(outs[0]), weights(outs[1])
    assert one.keys() == other.keys() and all((one[name] - other[name]).abs().max() < 1e-4 for name in one)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_other_options_and_finished_runs(model: Path, data: Path, whole: Path) -> None:
    with pytest.raises(LadderError, match=r"is a run with staleness 0\.5, not 0\.25: give the same"):
        adapt(AdaptOptions(str(model), whole, staleness=0.25), run_of(data), silent)
    with pytest.raises(LadderError, match="out is finished: name a new folder"):
        adapt(AdaptOptions(str(model), whole), run_of(data), silent)


@pytest.mark.parametrize("what, message", [
    ("wired", "wired is wired already: name its original"),
    ("small", "tokens has a vocabulary of 300, .*small one of 200: run ladder data OUT FILE... --tokenizer .*small"),
    ("tokenizer", "tokens was tokenized with another tokenizer than .*tokenizer's: run ladder data OUT FILE..."),
    ("no tokenizer", "bare cannot be loaded"),
    ("no model", "nothing is neither a directory nor the name of a model on the hub"),
    ("no weights", "empty cannot be loaded"),
    ("window", "a window of 65 is more than the model's 64"),
    ("wiring", "covers more than the model's 3 layers"),
    ("fsdp", "--fsdp shards what --method full trains, lora trains little: leave one out"),
    ("recompute", "--recompute has nothing to do for --method side"),
    ("top", "--teacher-top 300 is no part of a vocabulary of 300"),
    ("valid", "other was tokenized with another tokenizer than .*model"),
    ("peft", "--method lora needs peft: pip install"),
    ("local", "'desync-2x' keeps sums on their ranks, and on one rank is the standard model: give --ranks"),
    ("stale", "there is no way between the standard model and 'desync-2x': give --staleness 0"),
    ("ranks", "3 ranks cannot share 4 heads"),
    ("emulated", "--ranks emulates ranks for --method full, not for lora: leave one out"),
])  # fmt: skip
def test_refused(
    what: str, message: str, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: dict[str, Any] = {}
    more: dict[str, Any] = {}
    path = tmp_path / what.split()[-1]
    if what == "wired":
        rewire(AutoModelForCausalLM.from_pretrained(model), "ladder").save_pretrained(path)
    elif what == "small":
        tiny.model(path, data, vocab_size=200)
    elif what == "tokenizer":
        byte_tokenizer(43).save_pretrained(tiny.model(path, data))
    elif what == "no tokenizer":
        path = tmp_path / "bare"
        AutoModelForCausalLM.from_pretrained(model).save_pretrained(path)
    elif what == "no model":
        path = tmp_path / "nothing"
    elif what == "no weights":
        path = shutil.copytree(model, tmp_path / "empty")
        (path / "model.safetensors").write_bytes(b"")
    else:
        path = model
        monkeypatch.setattr(module, "find_spec", lambda name: None)
        own, more = {
            "window": ({}, {"window": 65}), "wiring": ({"wiring": "ladder:5"}, {}), "peft": ({"method": "lora"}, {}),
            "fsdp": ({"method": "lora"}, {"fsdp": True}), "recompute": ({"method": "side"}, {"recompute": True}),
            "top": ({"teacher_top": 300}, {}), "valid": ({}, {"valid": tmp_path / "other"}),
            "local": ({"wiring": "desync-2x"}, {}), "stale": ({"wiring": "desync-2x", "ranks": 2}, {}),
            "ranks": ({"ranks": 3}, {}), "emulated": ({"ranks": 2, "method": "lora"}, {}),
        }[what]  # fmt: skip
        if what == "valid":
            tiny.tokens(tmp_path / "other", seed=2, vocab=280)
    with pytest.raises(LadderError, match=message) as refused:
        adapt(AdaptOptions(str(path), tmp_path / "out", **own), run_of(data, **more), silent)
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes, message", [
    ({"method": "magic"}, "unknown method 'magic': known are full, lora, side"),
    ({"kl_weight": 0.0}, "--kl-weight and --lm-weight are both 0: nothing would be learned"),
    ({"kl_weight": -1.0}, "kl-weight must be from 0 to 1000, not -1.0"),
    ({"hidden_weight": 1.0, "teacher_top": 4}, "--hidden-weight needs the original in memory"),
    ({"hidden_weight": 1.0, "method": "side"}, "--hidden-weight trains the model's layers"),
    ({"kl_weight": 0.0, "lm_weight": 1.0, "teacher_top": 4}, "--teacher-top needs a --kl-weight above 0"),
    ({"staleness": 1.5}, "staleness must be from 0 to 1, not 1.5"),
    ({"staleness_way": "slowly"}, "unknown staleness-way .slowly.: known are together, first, last, chance"),
    ({"teacher_top": -1}, "teacher-top must be 0 or more, not -1"),
    ({"rank": 0}, "rank must be at least 1, not 0"),
    ({"ranks": 0}, "ranks must be at least 1, not 0"),
])  # fmt: skip
def test_refused_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LadderError, match=message):
        AdaptOptions("model", Path("out"), **changes)


def test_the_command_line(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = tiny.flags(AdaptOptions(str(model), tmp_path / "out")) + tiny.flags(run_of(data, 2))
    for more, status, said in ((["--window", "65"], 2, ""), ([], 0, "wrote "), ([], 2, "")):
        monkeypatch.setattr(sys, "argv", ["ladder", "adapt", *options, *more])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert (int(left.value.code or 0), out[:6]) == (status, said)
        assert err.startswith("ladder: ") and err.count("\n") == 1 if status else err == "" and "kl " in out
