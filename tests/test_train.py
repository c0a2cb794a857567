"""ladder train: what is learned, logged and left; runs that are killed, and runs of several ranks."""

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModelForCausalLM

import ladder.hf
from ladder.config import SIZES, ModelConfig
from ladder.data.shards import EvenSample, Shards
from ladder.errors import LadderError
from ladder.train import folder as place
from ladder.train import log as told
from ladder.train import trainer as module
from ladder.train.options import ScratchOptions, TrainingOptions
from ladder.train.recipes import RECIPES, Recipe
from ladder.train.run import TrainingData
from ladder.train.scratch import new_model, train
from tests import training as tiny
from tests.training import BATCH, SEQ_LEN, Stop, log, same, silent, training, until, weights

assert ladder.hf
STEPS = 20


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole") / "out"
    train(ScratchOptions(out, size="tiny"), training(data, STEPS, valid=data), silent)
    return out


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def nats(model: Any, data: Path, rows: int) -> float:
    """Of the first windows, each token of a window but its first."""
    ids = Shards.open(data).read(0, rows * SEQ_LEN).view(rows, SEQ_LEN)
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten()))


# --- one run --------------------------------------------------------------------------------------------------------


def test_learns_logs_and_tells(data: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    options = training(data, 23, valid=data, eval_tokens=10 * SEQ_LEN, log_every=4)
    found = train(ScratchOptions(tmp_path / "out", size="tiny"), options, lambda *what: told.append(what))
    seen = lines(tmp_path / "out")
    losses = [line for line in seen if "loss" in line]
    assert [line["step"] for line in losses] == [4, 8, 12, 16, 20, 23]
    assert losses[-1]["loss"] < losses[0]["loss"] - 1
    for line in losses:
        assert {"learning_rate", "grad_norm", "epoch"} <= line.keys() and line["tokens_per_s"] > 0
        assert line["tokens"] == line["step"] * SEQ_LEN * BATCH and "staleness" not in line
    evaluations = [line for line in seen if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [5, 10, 15, 20, 23]
    assert len(seen) == len(losses) + len(evaluations)
    last = {name: evaluations[-1][name] for name in ("eval_loss", "eval_perplexity")}
    assert found == {"main": True, "tokens": 23 * SEQ_LEN * BATCH, **last}
    assert math.exp(found["eval_loss"]) == pytest.approx(found["eval_perplexity"])
    assert told[-1][:2] == (23, 23) and [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert any("tokens/s" in what for _, _, what in told) and any(what.startswith("valid ") for _, _, what in told)
    card = (tmp_path / "out/README.md").read_text()
    assert (
        "import ladder.hf  # without it, loading fails" in card and "hidden behind the sub-blocks that follow" in card
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.wiring == "ladder" and model.config.use_cache and model.dtype == torch.float32
    assert nats(model, data, 10) == pytest.approx(found["eval_loss"], abs=tiny.nats(1, tiny.TINY))
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {
        "run.json", "log.jsonl", "config.json", "generation_config.json", "model.safetensors", "README.md",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


def test_the_last_of_the_data_is_not_trained_on(data: Path, tmp_path: Path) -> None:
    """Without --valid: the last hundredth, here two windows."""
    options = training(data, 2, seq_len=8)
    found = train(ScratchOptions(tmp_path / "out", size="tiny"), options, silent)
    shards, model = Shards.open(data), AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    windows = shards.tokens // 8
    rows = windows // 100
    ids = shards.read((windows - rows) * 8, rows * 8).view(rows, 8)
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
    wanted = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert rows > 1 and found["eval_loss"] == pytest.approx(float(wanted), abs=tiny.nats(1, tiny.TINY))
    seen = TrainingData.open(training(data, 10**4, seq_len=8), ranks=1)
    last = seen.valid[0]["input_ids"], seen.valid[len(seen.valid) - 1]["input_ids"]
    assert torch.equal(torch.stack(last), ids[[0, -1]])
    assert windows - rows - BATCH < len(seen.train) <= windows - rows
    assert torch.equal(seen.train[len(seen.train) - 1]["input_ids"], shards.read((len(seen.train) - 1) * 8, 8))


def test_a_short_run_reads_from_everywhere(data: Path) -> None:
    shards = Shards.open(data)
    seen = TrainingData.open(training(data, 3, valid=data), ranks=1).train
    whole = shards.tokens // SEQ_LEN // BATCH * BATCH
    assert len(seen) == 3 * BATCH < whole and isinstance(seen, EvenSample)
    for index in (0, 7, len(seen) - 1):
        wanted = shards.read(index * whole // len(seen) * SEQ_LEN, SEQ_LEN)
        assert torch.equal(seen[index]["input_ids"], wanted)
    with pytest.raises(IndexError):
        seen[len(seen)]


def test_options_in_transformers_words(data: Path, tmp_path: Path) -> None:
    """Every one of them, at values that are nobody's default."""
    options = training(
        data, 50, lr=0.25, warmup=0.1, weight_decay=0.03, beta2=0.77, clip=0.5, seed=23, log_every=3, eval_every=7,
        save_every=6, batch=12, recompute=True, schedule="linear",
    )  # fmt: skip
    made = module.arguments(options, tmp_path)
    found = (made.learning_rate, made.weight_decay, made.adam_beta2, made.max_grad_norm, made.seed, made.data_seed)
    assert found == (0.25, 0.03, 0.77, 0.5, 23, 23)
    assert (made.max_steps, made.warmup_steps, made.logging_steps, made.eval_steps, made.save_steps) == (34, 4, 3, 7, 6)
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (6, 2)
    assert made.gradient_checkpointing and made.lr_scheduler_type == "polynomial" and not made.bf16
    for batch, micro, wanted in ((64, None, (8, 8)), (7, None, (7, 1)), (64, 32, (32, 2))):
        assert replace(options, batch=batch, micro_batch_size=micro).micro_batches(1) == wanted


def test_share_of_the_peak(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "peak", lambda device: 1e9)
    monkeypatch.setattr(told, "operations", lambda model, window: 3e4)
    train(ScratchOptions(tmp_path / "out", size="tiny"), training(data, 4), silent)
    found = [line for line in lines(tmp_path / "out") if "mfu" in line]
    assert len(found) == 2
    for line in found:
        assert line["mfu"] == pytest.approx(line["tokens_per_s"] * 3e4 / 1e9, abs=1e-4)


def test_micro_batches_and_recomputing_change_nothing(data: Path, whole: Path, tmp_path: Path) -> None:
    for name, changes in {"micro": {"micro_batch_size": 2}, "recompute": {"recompute": True}}.items():
        train(ScratchOptions(tmp_path / name, size="tiny"), training(data, STEPS, valid=data, **changes), silent)
        for key in ("loss", "eval_loss", "grad_norm"):
            found, wanted = log(tmp_path / name, key), log(whole, key)
            assert [step for step, _ in found] == [step for step, _ in wanted]
            assert [value for _, value in found] == pytest.approx(
                [value for _, value in wanted], rel=tiny.nats(STEPS, tiny.TINY) / 10
            )
        assert log(tmp_path / name) != log(whole) or name != "micro"  # it did compute otherwise


def test_compiled_it_is_the_same(data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and loss as torch.compile sees them, without a compiler of C++: nothing of it falls back to eager, however
    few forms of a layer torch would compile by itself.
    """
    forms: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        forms.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=1):
            options = training(data, STEPS, valid=data, compile="yes")
            train(ScratchOptions(tmp_path / "out", size="tiny"), options, silent)
    finally:
        torch._dynamo.reset()
    assert len(forms) >= 4  # a first layer and a later one, trained and evaluated; and the loss
    for key in ("loss", "eval_loss"):
        found, wanted = log(tmp_path / "out", key), log(whole, key)
        assert [value for _, value in found] == pytest.approx(
            [value for _, value in wanted], rel=tiny.nats(STEPS, tiny.TINY) / 10
        )


@pytest.mark.usefixtures("without_onednn")
def test_half_precision_is_near(data: Path, whole: Path, tmp_path: Path) -> None:
    options = training(data, STEPS, valid=data, dtype="bfloat16")
    seen: dict[str, set[torch.dtype]] = {"LlamaDecoderLayer": set(), "Linear": set()}

    def look(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if (kind := type(module).__name__) in seen:
            seen[kind].add(output.dtype if kind == "Linear" else output[0].dtype)

    with register_module_forward_hook(look):  # type: ignore[arg-type]
        train(ScratchOptions(tmp_path / "out", size="tiny"), options, silent)
    assert all(kinds == {torch.bfloat16} for kinds in seen.values())  # neither stream nor logits are ever float32
    found, wanted = [value for _, value in log(tmp_path / "out")], [value for _, value in log(whole)]
    assert found == pytest.approx(wanted, rel=0.02) and found != wanted
    assert {each.dtype for each in weights(tmp_path / "out").values()} == {torch.float32}  # the size's own


def test_what_is_added_to_the_stream_is_drawn_smaller() -> None:
    torch.manual_seed(0)
    model = new_model(ModelConfig(64, 8, 4, 2, 128, vocab=320, context=64))
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            smaller = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert float(weight.detach().std()) == pytest.approx(0.02 / (4 if smaller else 1), rel=0.1), name


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedules(schedule: str, data: Path, tmp_path: Path) -> None:
    options = training(data, 6, log_every=1, eval_every=6, save_every=6, schedule=schedule, warmup=0.3, lr=1e-3)
    train(ScratchOptions(tmp_path / "out", size="tiny"), options, silent)
    found = [rate for _, rate in log(tmp_path / "out", "learning_rate")]
    wanted = [0.0, 0.0005]  # two steps of warm-up
    for step in range(4):
        fallen = {"cosine": (1 - math.cos(math.pi * step / 4)) / 2, "linear": step / 4, "constant": 0.0}[schedule]
        wanted.append(0.001 * (1 - 0.9 * fallen))
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.usefixtures("without_onednn")
def test_a_recipe_stands_below_what_is_given(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(32, 2, 4, 2, 48, vocab=999, context=64, tied=True, dtype="bfloat16")
    values = {"tokens": 4 * 8 * 16, "seq_len": 16, "batch": 8, "lr": 5e-3, "log_every": 1, "beta2": 0.9}
    monkeypatch.setitem(SIZES, "small", config)
    monkeypatch.setitem(RECIPES, "small", Recipe("small", "a test's", values))
    given = TrainingOptions(data=data, lr=2e-3, seq_len=8, device="cpu")
    train(ScratchOptions(tmp_path / "out", recipe="small", wiring="standard:1 ladder:1"), given, silent)
    run = json.loads((tmp_path / "out/run.json").read_text())
    assert {name: run[name] for name in ("tokens", "seq_len", "batch", "lr", "beta2", "clip")} == {
        "tokens": 512, "seq_len": 8, "batch": 8, "lr": 2e-3, "beta2": 0.9, "clip": 1.0,
    }  # fmt: skip
    assert [step for step, _ in log(tmp_path / "out")] == [1, 2, 3, 4, 5, 6, 7, 8]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.vocab_size, model.config.num_hidden_layers) == (Shards.open(data).vocab, 2)
    assert model.config.wiring == "standard:1 ladder:1" and model.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_an_option_that_is_given_at_its_default_stands_too(
    run: Callable[..., tuple[int, str, str]], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A default of the command line cannot be told from the same value that was given, unless one asks."""
    config = ModelConfig(32, 2, 4, 2, 48, vocab=999, context=64, tied=True)
    monkeypatch.setitem(SIZES, "small", config)
    monkeypatch.setitem(RECIPES, "small", Recipe("small", "a test's", {"lr": 5e-3, "seq_len": 16, "batch": 8}))
    flags = ["--data", data, "--recipe", "small", "--lr", "0.001", "--tokens", "128", "--device", "cpu"]
    status, _, err = run("train", tmp_path / "out", *flags)
    assert (status, err) == (0, "")
    found = json.loads((tmp_path / "out/run.json").read_text())
    assert TrainingOptions.lr == found["lr"] == 1e-3 and (found["seq_len"], found["batch"]) == (16, 8)


def test_every_recipe_can_be_begun(data: Path) -> None:
    for name, row in RECIPES.items():
        filled = row.filled(TrainingOptions(data=data))
        micro, times = filled.micro_batches(8)
        assert 8 * micro * times == filled.batch and filled.seq_len <= row.config.context and filled.steps > 100, name
        assert row.filled(replace(filled, lr=0.5)).lr == 0.5


# --- runs that are killed -------------------------------------------------------------------------------------------


def test_killed_behind_its_last_step(data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of the last step is only written down as a model: no step more, no evaluation more."""
    out, options = tmp_path / "out", training(data, STEPS, valid=data)

    def full(folder: Path) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(place, "finish", full)
        with pytest.raises(OSError, match="no space"):
            train(ScratchOptions(out, size="tiny"), options, silent)
    assert not (out / "config.json").exists() and (out / place.FINAL).exists()
    found = train(ScratchOptions(out, size="tiny"), options, silent)
    assert found["eval_loss"] == log(whole, "eval_loss")[-1][1]
    for key in ("loss", "eval_loss"):
        assert log(out, key) == log(whole, key)
    assert (
        same(weights(out), weights(whole)) and not (out / "checkpoints").exists() and not (out / place.FINAL).exists()
    )


def test_over_the_end_of_the_data(data: Path, tmp_path: Path) -> None:
    """A run that reads its data more than twice, with two rows at a time, stopped in its second turn."""
    outs = tmp_path / "whole", tmp_path / "parts"
    turn = len(module_windows(data)) // 64
    often = {"eval_every": 100, "save_every": turn + 1, "log_every": 1}
    options = training(data, batch=64, micro_batch_size=32, tokens=(2 * turn + 3) * 64 * SEQ_LEN, **often)
    train(ScratchOptions(outs[0], size="tiny"), options, silent)
    with pytest.raises(Stop):
        train(ScratchOptions(outs[1], size="tiny"), options, until(turn + 2))
    assert len(place.complete_checkpoints(outs[1] / "checkpoints")) == 1
    train(ScratchOptions(outs[1], size="tiny"), options, silent)
    assert log(outs[0]) == log(outs[1]) and same(weights(outs[0]), weights(outs[1]))
    # evaluation lines come once, also where a turn ends
    assert [step for step, _ in log(outs[0], "eval_loss")] == [options.steps]


def module_windows(data: Path) -> range:
    """The windows that are trained on."""
    windows = Shards.open(data).tokens // SEQ_LEN
    return range((windows - max(1, windows // 100)) // 64 * 64)


# --- ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, torch shards there")
@pytest.mark.parametrize("fsdp", [False, True])
def test_two_ranks_train_as_one_does(fsdp: bool, data: Path, whole: Path, tmp_path: Path) -> None:
    """Killed and gone on with on the way: DDP, and FSDP2."""
    out = tmp_path / "out"
    run = (ScratchOptions(out, size="tiny"), training(data, STEPS, valid=data, fsdp=fsdp))
    step = tiny.kill_behind_a_checkpoint(tiny.start("train", *run, ranks=2), out)
    assert step < STEPS
    shards = {path.name for path in (out / f"checkpoints/checkpoint-{step}/pytorch_model_fsdp_0").glob("*.distcp")}
    assert shards == ({"__0_0.distcp", "__1_0.distcp"} if fsdp else set())  # each rank its own
    before = log(out)
    assert tiny.end(tiny.start("train", *run, ranks=2)) == [0, 0]
    assert [line for line in before if line[0] <= step] == [line for line in log(out) if line[0] <= step]
    for key in ("loss", "eval_loss", "learning_rate", "grad_norm"):
        found, wanted = log(out, key), log(whole, key)
        assert [step for step, _ in found] == [step for step, _ in wanted]
        assert [value for _, value in found] == pytest.approx(
            [value for _, value in wanted], abs=tiny.nats(STEPS, tiny.TINY)
        )
    one, other = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (out, whole))
    tiny.assert_moved_alike(one, other, run[1].lr, STEPS, tiny.TINY)
    assert not (out / "checkpoints").exists()


# --- what is refused ------------------------------------------------------------------------------------------------


def test_other_options_and_finished_runs(data: Path, whole: Path) -> None:
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    own = training(data, STEPS, valid=data)
    for changes, message in (
        ({"lr": 0.5}, r"is a run with lr 0\.003, not 0\.5: give the same, or name a new folder"),
        ({"save_every": None}, "is a run with save-every 4, not None"),
        ({"keep": 2}, "is finished: name a new folder"),
    ):
        with pytest.raises(LadderError, match=message):
            train(ScratchOptions(whole, size="tiny"), replace(own, **changes), silent)  # type: ignore[arg-type]
    with pytest.raises(LadderError, match="is a run with wiring ladder, not standard"):
        train(ScratchOptions(whole, size="tiny", wiring="standard"), own, silent)
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


def test_ctrl_c_tells_where_the_same_command_goes_on(
    run: Callable[..., tuple[int, str, str]], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*tiny.flags(ScratchOptions(tmp_path / "out", size="tiny")), *tiny.flags(training(data, 12))]
    for step, how in ((2, "begins again, since no checkpoint was written yet"), (10, "continues from step 8")):

        def interrupt(done: int, total: int, what: str, at: int = step) -> None:
            if done >= at:
                raise KeyboardInterrupt

        monkeypatch.setattr("ladder.cli.train.steps_bar", lambda what, progress=interrupt: nullcontext(progress))
        assert run("train", *flags) == (130, "", f"ladder: stopped: the same command {how}\n")
    monkeypatch.undo()
    assert run("train", *flags)[0] == 0


def test_the_command_line(run: Callable[..., tuple[int, str, str]], data: Path, tmp_path: Path) -> None:
    def trained(*options: Any) -> tuple[int, str, str]:
        return run("train", *(part for each in options for part in tiny.flags(each)))

    own = ScratchOptions(tmp_path / "out", size="tiny")
    code, out, err = trained(own, training(data, 2))
    assert (code, err) == (0, "") and out.startswith(f"wrote {tmp_path / 'out'}, {2 * SEQ_LEN * BATCH} tokens: loss ")
    assert out.count("\n") == 1 and "perplexity" in out and "epoch" not in out
    code, out, err = trained(own, training(data, 2))
    sentence = f"ladder: {own.out} is finished: name a new folder (and --init-from {own.out}, to train it further)\n"
    assert (code, out, err) == (2, "", sentence)
    longer = replace(own, out=tmp_path / "longer", init_from=own.out)
    assert trained(longer, training(data, 2))[0] == 0
    first, then = (json.loads((each / "log.jsonl").read_text().splitlines()[0]) for each in (own.out, longer.out))
    assert then["loss"] < first["loss"] - 0.05  # it goes on from what was learned, and does not begin anew
    for other, message in (
        (replace(longer, wiring="standard"), "is wired 'ladder', not 'standard'"),
        (replace(longer, shared_norm=True), "has other norms"),
        (replace(longer, tp=2), "--init-from is not for --tp"),
        (replace(longer, init_from=tmp_path / "nothing"), "no such folder"),
    ):
        with pytest.raises(LadderError, match=message):
            train(replace(other, out=tmp_path / "other"), training(data, 2), silent)
    code, out, err = trained(replace(own, out=tmp_path / "more"), training(tmp_path / "nothing"))
    assert (code, out) == (2, "") and err.startswith("ladder: no such folder of tokens") and err.count("\n") == 1
    assert not (tmp_path / "more").exists()
