"""ladder adapt: runs that are killed, stopped and continued, on one rank and on two."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

from ladder.errors import LadderError
from ladder.train import distill as module
from ladder.train.distill import adapt
from ladder.train.folder import complete_checkpoints
from tests import training as tiny
from tests.training import Stop, adapting, distilling, log, same, silent, until, weights


def test_killed_twice(model: Path, data: Path, adapted: Path, tmp_path: Path) -> None:
    """Once between two checkpoints, once in the middle of one: the curve and the model of a run that was not."""
    out = tmp_path / "out"
    options = (distilling(model, out), adapting(data))
    step = tiny.kill_behind_a_checkpoint(tiny.start("adapt", *options), out)
    assert step in (4, 8, 12) and not (out / "config.json").exists()
    assert tiny.end(tiny.start("adapt", *options, broken="checkpoint-16")) == [-signal.SIGKILL]
    assert (out / "checkpoints/checkpoint-16/optimizer.pt").stat().st_size == 100
    assert [path.name for path in complete_checkpoints(out / "checkpoints")] == ["checkpoint-12"]
    assert tiny.end(tiny.start("adapt", *options)) == [0]
    for key in ("loss", "eval_loss", "eval_kl", "eval_agreement", "grad_norm", "learning_rate", "staleness"):
        assert log(out, key) == log(adapted, key)
    assert same(weights(out), weights(adapted))
    assert not (out / "checkpoints").exists() and {path.name for path in out.iterdir()} == {
        path.name for path in adapted.iterdir()
    }


@pytest.mark.parametrize("method, way, top, at", [
    ("lora", "together", 0, 3), ("lora", "first", 0, 6), ("side", "together", 0, 6), ("full", "chance", 8, 16),
    ("full", "chance", 0, 6), ("layers", "last", 0, 6),
])  # fmt: skip
def test_stopped(method: str, way: str, top: int, at: int, model: Path, data: Path, tmp_path: Path) -> None:
    """Before its first checkpoint; after it; while the teacher was being asked."""
    outs, options = (tmp_path / "whole", tmp_path / "parts"), adapting(data, 8)
    more: dict[str, Any] = {"method": method, "reduction": 1, "staleness_way": way}
    more |= {} if method == "side" else {"staleness": 0.9}
    own = [distilling(model, out, teacher_top=top, **more) for out in outs]
    adapt(own[0], options, silent)
    with pytest.raises(Stop):
        adapt(own[1], options, until(at, building=top > 0))
    assert len(complete_checkpoints(outs[1] / "checkpoints")) == (at == 6)
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
    options = (distilling(model, tmp_path / "out"), adapting(data, 8, save_every=2, keep=2))
    with pytest.raises(Stop):
        adapt(*options, until(6))
    before, checkpoint = complete_checkpoints(tmp_path / "out/checkpoints")
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


def test_a_run_from_before_an_option_was_refused_is_continued(model: Path, data: Path, tmp_path: Path) -> None:
    """It named a way for a staleness that does not move; without it the run goes on."""
    options = distilling(model, tmp_path / "out", staleness=0.0)
    with pytest.raises(Stop):
        adapt(options, adapting(data, 8), until(6))
    run = json.loads((tmp_path / "out/run.json").read_text())
    (tmp_path / "out/run.json").write_text(json.dumps({**run, "staleness_way": "last"}))
    assert adapt(options, adapting(data, 8), silent)["eval_kl"] > 0


def test_a_run_from_before_there_was_an_option_is_continued(model: Path, data: Path, tmp_path: Path) -> None:
    options = (distilling(model, tmp_path / "out"), adapting(data, 8))
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


def test_a_run_with_the_old_names_of_options_is_continued(
    model: Path, data: Path, adapted: Path, tmp_path: Path
) -> None:
    """run.json had window, micro, begin and rank."""
    options = (distilling(model, tmp_path / "out", init_from=adapted), adapting(data, 8))
    with pytest.raises(Stop):
        adapt(*options, until(6))
    file = tmp_path / "out/run.json"
    run = json.loads(file.read_text())
    names = {"seq_len": "window", "micro_batch_size": "micro", "init_from": "begin", "lora_rank": "rank"}
    assert names.keys() <= run.keys() and "init_from" in run["contents"]
    contents = {names.get(name, name): value for name, value in run["contents"].items()}
    file.write_text(json.dumps({**{names.get(name, name): value for name, value in run.items()}, "contents": contents}))
    with pytest.raises(LadderError, match="out is a run with seq-len 16, not 8: give the same"):
        adapt(options[0], replace(options[1], seq_len=8), silent)
    adapt(*options, silent)
    assert (tmp_path / "out/config.json").exists() and json.loads(file.read_text())["seq_len"] == tiny.SEQ_LEN


@pytest.mark.parametrize("what", ["data", "model"])
def test_what_a_run_began_with_is_not_exchanged(what: str, model: Path, data: Path, tmp_path: Path) -> None:
    folders = {name: shutil.copytree(path, tmp_path / name) for name, path in (("data", data), ("model", model))}
    options = distilling(folders["model"], tmp_path / "out"), adapting(folders["data"], 8)
    with pytest.raises(Stop):
        adapt(*options, until(6))
    shutil.rmtree(folders[what])
    if what == "data":
        shutil.copytree(tiny.tokens(tmp_path / "other", seed=2), folders[what])
        shutil.rmtree(folders[what] / "tokenizer")
        shutil.copytree(data / "tokenizer", folders[what] / "tokenizer")
    else:
        tiny.model(folders[what], data, torch.bfloat16)
    with pytest.raises(LadderError, match=f"{what} has changed since .*out was started: name a new folder"):
        adapt(*options, silent)


def test_no_model_of_no_numbers(model: Path, data: Path, tmp_path: Path) -> None:
    path = shutil.copytree(model, tmp_path / "model")
    found = weights(path)
    found["model.norm.weight"][0] = float("nan")
    save_file(found, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(LadderError, match=r"'model\.norm\.weight' holds values that are not finite"):
        adapt(distilling(path, tmp_path / "out"), adapting(data, 12), silent)
    found["model.norm.weight"][0] = 3e38  # finite, but no logit is
    save_file(found, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(LadderError, match="the loss is nan at step 2: there is no model; try a smaller --lr"):
        adapt(distilling(path, tmp_path / "out"), adapting(data, 12), silent)
    assert not (tmp_path / "out/config.json").exists()


def test_experts_are_found_again(data: Path, tmp_path: Path) -> None:
    """In memory they lie together, in a checkpoint of the hub each by itself."""
    sizes = {name: getattr(tiny.config(), name) for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    config = MixtralConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, vocab_size=300, num_local_experts=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(data / "tokenizer").save_pretrained(tmp_path / "model")
    outs, options = (tmp_path / "whole", tmp_path / "parts"), adapting(data, 8)
    own = [distilling(tmp_path / "model", out, kl_weight=0.0, lm_weight=1.0) for out in outs]
    adapt(own[0], options, silent)
    with pytest.raises(Stop):
        adapt(own[1], options, until(6))
    adapt(own[1], options, silent)
    assert log(outs[0]) == log(outs[1]) and same(weights(outs[0]), weights(outs[1]))
    assert weights(outs[0]).keys() == weights(tmp_path / "model").keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, torch shards there")
@pytest.mark.parametrize("method, wiring", [("full", "ladder"), ("layers", "standard:1 ladder:2")])
def test_two_ranks_share_the_parameters(method: str, wiring: str, data: Path, tmp_path: Path) -> None:
    """FSDP2, tied weights, a teacher, rows in two goes."""
    original = tiny.model(tmp_path / "model", data, tie_word_embeddings=True)
    outs, options = (tmp_path / "one", tmp_path / "two"), adapting(data, 10, micro_batch_size=2)
    adapt(distilling(original, outs[0], wiring, method), options, silent)
    two = distilling(original, outs[1], wiring, method), replace(options, fsdp=True)
    assert tiny.end(tiny.start("adapt", *two, ranks=2)) == [0, 0]
    for key in ("loss", "eval_kl", "eval_agreement"):
        assert [value for _, value in log(outs[1], key)] == pytest.approx(
            [value for _, value in log(outs[0], key)], abs=tiny.nats(10)
        )
    tiny.assert_moved_alike(weights(outs[0]), weights(outs[1]), options.lr, options.steps)


def test_other_options_and_finished_runs(model: Path, data: Path, adapted: Path) -> None:
    with pytest.raises(LadderError, match=r"is a run with staleness 0\.5, not 0\.25: give the same"):
        adapt(distilling(model, adapted, staleness=0.25), adapting(data), silent)
    with pytest.raises(LadderError, match=f"out is a run with init-from None, not {model}: give the same"):
        adapt(distilling(model, adapted, init_from=model, staleness=0.0), adapting(data), silent)
    with pytest.raises(LadderError, match="out is finished: name a new folder"):
        adapt(distilling(model, adapted), adapting(data), silent)
