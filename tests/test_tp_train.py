"""ladder train --tp: a step of several ranks is the step of one, its all-reduces overlap, and runs under torchrun."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import ladder.hf
from ladder import LLM, SamplingParams
from ladder.checkpoint import load
from ladder.comm.base import Comm, Solo
from ladder.comm.differentiable import Differentiable
from ladder.comm.emulated import World
from ladder.config import ModelConfig
from ladder.model import Decoder
from ladder.train.options import ScratchOptions, TrainingOptions
from ladder.train.run import TrainingData
from ladder.train.scratch import hf_config, train
from ladder.train.tensor_parallel.loop import Run
from ladder.train.tensor_parallel.mesh import Mesh
from ladder.train.tensor_parallel.replicas import Gathered
from ladder.train.tensor_parallel.step import Initial, Masters, Step
from tests import training as tiny_run
from tests.processes import world as torchrun
from tests.recording import Event, Recording, record_sub_blocks
from tests.test_train import nats
from tests.training import BATCH, SEQ_LEN, log, same, silent, training, weights
from tests.weights import TINY, Given, draw, tiny

assert ladder.hf
LAYERS, STEPS = 2, 16
OPTIONS = TrainingOptions(lr=0.01, clip=0.5, device="cpu")  # a norm that is above the limit
MEAN = 12 * SEQ_LEN * torch.finfo(torch.float32).eps  # what the mean of an evaluation's terms is off by, of itself
ADAM = 1e-8  # what AdamW adds to a gradient's size before it divides by it
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "replicated": {"kv_heads": 1, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "tied": {"tied": True},
}
Named = dict[str, Tensor]

# --- one step -------------------------------------------------------------------------------------------------------


def batch(number: int) -> Tensor:
    return torch.randint(TINY["vocab"], (4, 6), generator=torch.Generator().manual_seed(number))


def made(config: ModelConfig, comm: Comm) -> Decoder:
    drawn = {name: weight.double() for name, weight in draw(config).items()}
    return load(Decoder(config, Differentiable(comm), dtype=torch.float64), Given(drawn))


def stepped(config: ModelConfig, comm: Comm, steps: int = 3) -> tuple[list[Tensor], list[Tensor], Named]:
    """Losses, norms of gradients and the whole weights after some steps of two backward passes each."""
    step = Step(made(config, comm), Mesh(tp=comm), OPTIONS)
    losses, norms = [], []
    for number in range(steps):
        losses.append(sum((step.backward(half, 0.5) for half in batch(number).chunk(2)), torch.zeros(())))
        norms.append(step.update())
    return losses, norms, whole(step)


def whole(step: Step) -> Named:
    source = Gathered(step.model, step.replicas, step.masters.of)
    shapes = {shard.name: shard.shape for shard in Decoder(step.model.config, device="meta").shards()}
    return {name: source.read(name, shape, tuple(map(slice, shape))) for name, shape in shapes.items()}


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("kind, text", [
    ("plain", "standard"), ("plain", "ladder"), ("plain", "parallel"), ("plain", "standard:1 ladder-2:1"),
    ("replicated", "ladder"), ("tied", "ladder"),
])  # fmt: skip
def test_a_step_is_that_of_one_process(worlds: dict[int, World], kind: str, text: str, ranks: int) -> None:
    config = tiny(LAYERS, **MODELS[kind]).rewired(text)
    losses, norms, right = stepped(config, Solo())
    # of a sum of so many terms of magnitude one, which the ranks add up in another order
    rounding = batch(0).numel() * max(config.vocab, config.hidden) * torch.finfo(torch.float64).eps
    moved = 3 * OPTIONS.lr * rounding / ADAM  # AdamW moves a weight by lr g / (|g| + eps) at most
    for found in worlds[ranks].run(lambda comm: stepped(config, comm)):
        for one, other in zip((*losses, *norms), (*found[0], *found[1]), strict=True):
            assert abs(one - other) <= max(rounding, moved)
        assert found[2].keys() == right.keys()
        for name, weight in right.items():
            assert (found[2][name] - weight).abs().max() <= moved, name
    assert norms[0] > OPTIONS.clip  # else clipping would not be seen
    first = draw(config)
    assert all((weight - first[name]).abs().max() > 100 * moved for name, weight in right.items())


def test_copies_of_the_model_share_the_batch(worlds: dict[int, World]) -> None:
    """Two ranks with half of the sequences each, and one with all."""
    config = tiny(LAYERS).rewired("ladder")

    def half(comm: Comm) -> tuple[Tensor, Named]:
        step = Step(made(config, Solo()), Mesh(data=comm), OPTIONS)
        step.backward(batch(0).chunk(2)[comm.rank])
        return step.update(), whole(step)

    _, norms, right = stepped(config, Solo(), 1)
    rounding = batch(0).numel() * config.hidden * torch.finfo(torch.float64).eps
    for norm, found in worlds[2].run(half):
        assert abs(norm - norms[0]) <= rounding
        assert all((found[name] - right[name]).abs().max() <= OPTIONS.lr * rounding / ADAM for name in right)


@pytest.mark.parametrize("text, beside", [("standard", 0), ("ladder", 1), ("ladder-2", 2)])
def test_all_reduces_overlap_both_ways(worlds: dict[int, World], text: str, beside: int) -> None:
    """Between the start of an all-reduce and its end as many sub-blocks compute, forward and backward, as the lag."""

    def events(comm: Comm) -> list[list[Event]]:
        log: list[Event] = []
        model = made(tiny(4).rewired(text), Recording(comm, log))
        step = Step(model, Mesh(tp=comm), OPTIONS)
        record_sub_blocks(model, log)
        loss = step.loss(batch(0))
        forward = log.copy()
        log.clear()
        owners = {weight.untyped_storage().data_ptr(): weight for weight in model.parameters()}
        for shard in model.shards():
            if shard.name.endswith(("o_proj.weight", "down_proj.weight")):
                weight = owners[shard.target.untyped_storage().data_ptr()]
                weight.register_hook(lambda _, name=shard.name: log.append(("compute", hash(name))))
        loss.backward()  # type: ignore[no-untyped-call]
        return [forward, log]

    for way in worlds[2].run(events)[0]:
        sent = [number for what, number in way if what == "send"]
        assert len(sent) == 2 * 4 + 1 and sum(what == "compute" for what, _ in way) == 2 * 4
        spans = [way[way.index(("send", number)) : way.index(("wait", number))] for number in sent]
        hidden = [sum(what == "compute" for what, _ in span) for span in spans]
        # the embedding's has nothing to run beside, and those next to the head have less
        assert sorted(hidden) == sorted([0, *[beside] * (8 - beside), *range(beside)]), (text, hidden)


def test_bfloat16_is_rounded_from_float32() -> None:
    """Steps that are too small for bfloat16 add up, and so do gradients of several backward passes."""
    model: Any = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, 1.0)
    masters = Masters(model)
    master = masters.of[model.weight]
    tiny_step = torch.finfo(torch.bfloat16).eps / 8
    for _ in range(8):
        for _ in range(4):
            model.weight.grad = torch.full((1, 1), tiny_step / 4, dtype=torch.bfloat16)
            masters.take_gradients()
        assert model.weight.grad is None and master.grad is not None and master.grad.item() == tiny_step
        with torch.no_grad():
            master += master.grad
        master.grad = None
        masters.round()
    assert model.weight.item() == master.item() == 1 + 8 * tiny_step
    assert 1 + torch.tensor(tiny_step, dtype=torch.bfloat16) == 1  # by itself it would have stayed


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of one process, of two TP ranks, and of two times two."""
    folder = tmp_path_factory.mktemp("runs")
    found = {name: folder / name for name in ("one", "two", "four")}
    options = training(data, STEPS, valid=data, log_every=1)
    config = ModelConfig.named("tiny").rewired("ladder")
    config = replace(config, vocab=tiny_run.VOCABULARY, eos=(0,))
    model = load(Decoder(config, dtype=torch.float32), Initial(options.seed, config.layers))
    found["one"].mkdir()
    plain = hf_config(replace(config, wiring=ModelConfig.named("tiny").wiring))
    Run(Step(model, Mesh(), options), TrainingData.open(options, 1), Mesh(), options, found["one"], silent).go(
        None, plain
    )
    for name, ranks in (("two", 2), ("four", 4)):
        own = ScratchOptions(found[name], size="tiny", tp=2)
        assert tiny_run.end(tiny_run.start("train", own, options, ranks=ranks)) == [0] * ranks
    return found


@pytest.mark.parametrize("name", ["two", "four"])
def test_the_curve_is_that_of_one_process(runs: dict[str, Path], name: str) -> None:
    options, parameters = training(Path("data"), STEPS), sum(w.numel() for w in weights(runs[name]).values())
    for key in ("loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "tokens"):
        assert [step for step, _ in log(runs[name], key)] == [step for step, _ in log(runs["one"], key)]
    for key in ("learning_rate", "epoch", "tokens"):
        assert log(runs[name], key) == log(runs["one"], key)
    eps = torch.finfo(torch.float32).eps
    (_, first), (_, right) = log(runs[name])[0], log(runs["one"])[0]
    assert abs(first - right) <= SEQ_LEN * BATCH * eps * right  # a mean of so many terms
    # A gradient g is off by eps at most (its norm is clipped to 1), and AdamW's step by lr eps / |g|: to first order a
    # loss moves by the sum of |g| times that, lr eps for each parameter and step.
    bound = 2 * STEPS * options.lr * parameters * eps
    for key in ("loss", "eval_loss"):
        for (_, value), (_, right) in zip(log(runs[name], key), log(runs["one"], key), strict=True):
            assert abs(value - right) <= bound
    losses = [value for _, value in log(runs[name])]
    assert losses[0] - losses[-1] > 100 * bound


def test_what_is_left(runs: dict[str, Path], data: Path) -> None:
    """The files of `ladder train`, which transformers and the engine load."""
    out = runs["two"]
    assert {path.name for path in out.iterdir()} == {
        "run.json", "log.jsonl", "config.json", "generation_config.json", "model.safetensors", "README.md",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert "Made by `ladder train`" in (out / "README.md").read_text()
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert all(line["tokens_per_s"] > 0 for line in lines if "loss" in line)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.wiring == "ladder" and model.dtype == torch.float32
    evaluated = log(out, "eval_loss")[-1][1]
    assert nats(model, data, 12) == pytest.approx(evaluated, rel=MEAN)
    with LLM(out, dtype="float32") as llm:
        found = llm.generate([[1, 2, 3]], SamplingParams(4))[0]
    ids = torch.tensor([[1, 2, 3]])
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert list(found.token_ids) == wanted[0, 3:].tolist()


def test_killed(runs: dict[str, Path], data: Path, tmp_path: Path) -> None:
    """In the middle, then while a checkpoint is half written: the curve is that of a run that nothing happened to."""
    own = ScratchOptions(tmp_path / "out", size="tiny", tp=2), training(data, STEPS, valid=data, log_every=1)
    begun = tiny_run.kill_behind_a_checkpoint(tiny_run.start("train", *own, ranks=2), tmp_path / "out")
    assert 0 < begun < STEPS
    assert -9 in tiny_run.end(tiny_run.start("train", *own, ranks=2, broken=f"checkpoint-{STEPS}"))
    assert not (tmp_path / "out/config.json").exists()
    assert tiny_run.end(tiny_run.start("train", *own, ranks=2)) == [0, 0]
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert log(tmp_path / "out", key) == log(runs["two"], key)
    assert same(weights(tmp_path / "out"), weights(runs["two"]))
    assert not (tmp_path / "out/checkpoints").exists()


def test_a_wiring_that_depends_on_its_ranks(data: Path, tmp_path: Path) -> None:
    own = ScratchOptions(tmp_path / "out", size="tiny", wiring="desync-2x", tp=2)
    assert tiny_run.end(tiny_run.start("train", own, training(data, 4, valid=data), ranks=2)) == [0, 0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.wiring_ranks == 2
    evaluated = log(tmp_path / "out", "eval_loss")[-1][1]
    assert nats(model, data, 12) == pytest.approx(evaluated, rel=MEAN)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, more, message", [
    (0, "--tp 2", "--tp 2 needs ranks: start it with torchrun --nproc-per-node 2 -m ladder train"),
    (3, "--tp 2", "--tp 2 does not divide the 3 ranks that torchrun started"),
    (2, "--tp 3", "3 ranks cannot share 8 heads"),
    (2, "--tp 0", "tp must be at least 1, not 0"),
    (2, "--tp 2 --fsdp", "--fsdp shards what --tp has sharded already: leave one out"),
    (2, "--tp 2 --optimizer muon", "--optimizer muon needs whole matrices, which --tp takes apart: leave one out"),
    (2, "--tp 2 --recompute", "--recompute would repeat the all-reduces of --tp: leave one out"),
    (2, "--tp 2 --compile yes", "--compile yes compiles the layers of transformers"),
    (2, "--tp 2 --ranks 2", "--ranks emulates tensor-parallel ranks, and --tp has real ones: leave one out"),
    (2, "--tp 2 --wiring none", "'none' ends with partial sums that are kept local"),
    (4, "--tp 2 --batch 7", "a batch of 7 sequences cannot be divided evenly by 2 ranks"),
    (2, "--tp 2 --batch 5000", "a step needs 80000, and an evaluation"),
])  # fmt: skip
def test_refused_before_the_ranks_meet(
    ranks: int,
    more: str,
    message: str,
    data: Path,
    tmp_path: Path,
    run: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of them is here alone: it does not wait for the others, and leaves nothing."""
    for name, value in torchrun(ranks)[-1].items() if ranks else ():
        monkeypatch.setenv(name, value)
    flags = f"--size tiny --device cpu --seq-len 16 --tokens 1000 --data {data} {more}".split()
    status, out, err = run("train", tmp_path / "out", *flags)
    assert status == 2 and out == "" and err.count("\n") == 1 and message in err
    assert not (tmp_path / "out").exists()


def test_another_degree_is_another_run(runs: dict[str, Path], data: Path) -> None:
    with pytest.raises(ValueError, match="is a run with tp 2, not 4: give the same"):
        train(ScratchOptions(runs["two"], size="tiny", tp=4), training(data, STEPS, valid=data, log_every=1), silent)
