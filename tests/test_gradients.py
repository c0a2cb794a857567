"""Gradients over ranks: two processes against one, the emulated ranks against both, and one step of an optimizer."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ladder.checkpoint import load
from ladder.comm.base import Comm, Solo
from ladder.comm.differentiable import Differentiable
from ladder.comm.distributed import Distributed
from ladder.comm.emulated import World
from ladder.config import ModelConfig
from ladder.errors import LadderError
from ladder.model import Decoder
from ladder.train.loss import IGNORED
from ladder.train.tensor_parallel.loss import cross_entropy
from ladder.train.tensor_parallel.replicas import Replicas
from tests.processes import run_processes
from tests.recording import Event, Recording
from tests.tolerance import backward, summed, unit
from tests.weights import TINY, Given, draw, joined, shard_gradients, tiny

LIMIT = 120.0  # seconds, for processes that would otherwise hang
LAYERS = 4
TOLERANCE = backward(LAYERS, 32, 6, torch.float64)  # of gradients of magnitude one
SAME = ("standard", "parallel", "parallel-1", "ladder", "ladder-2", "ladder-1-2", "standard:2 ladder:2")
DRIFTING = ("desync-2x", "desync-2x-1", "desync-4x", "desync-3x", "desync-3x-local", "desync-2x:2 ladder:2", "none")
# each with what is replicated in its own way: one key/value head for two ranks, norms of queries and keys, biases
HABITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one_kv_head": {"kv_heads": 1, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qk_norm": {"family": "qwen3", "kv_heads": 1},
    "tied": {"tied": True},
    "one_norm": {"shared_norm": True},
}
CASES = [(habit, text) for text in (*SAME, *DRIFTING) for habit in HABITS if habit == "plain" or text in
         ("ladder", "desync-2x")]  # fmt: skip
CASES += [("one_norm", text) for text in ("parallel", "desync-3x")]
RATE = 0.1  # of the step

Named = dict[str, Tensor]


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and what is to follow them, two of which do not count."""
    ids = torch.randint(TINY["vocab"], (2, 6), generator=torch.Generator().manual_seed(seed))
    targets = ids[:, 1:].clone()
    targets[0, :2] = IGNORED
    return ids[:, :-1], targets


def made(config: ModelConfig, weights: Mapping[str, Tensor], comm: Comm) -> Decoder:
    return load(Decoder(config, comm, dtype=torch.float64), Given(weights)).requires_grad_(True)


def settings(habit: str, text: str) -> tuple[ModelConfig, Named]:
    config = tiny(LAYERS, **HABITS[habit])
    return config.rewired(text), {name: weight.double() for name, weight in draw(config).items()}


def by_name(model: Decoder) -> Named:
    return {shard.name: gradient.clone() for shard, gradient in shard_gradients(model)}


# --- the two processes ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], dict[str, Any]]]:
    """What each of two processes found, by case."""
    directory = tmp_path_factory.mktemp("gradients")
    run_processes(work, 2, directory, LIMIT)
    return [torch.load(directory / f"{rank}.pt") for rank in range(2)]


def work(rank: int, size: int, directory: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT))
    try:
        found = {case: trained(*settings(*case), Differentiable(Distributed())) for case in CASES}
        torch.save(found, Path(directory) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def trained(config: ModelConfig, weights: Named, comm: Comm) -> dict[str, Any]:
    """One step: the loss, the gradients by name with their places, and the parameters after two steps of Adam."""
    model = made(config, weights, comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    loss, gradients = None, {}
    for seed in (1, 2):
        tokens, targets = batch(seed)
        optimizer.zero_grad()
        loss_ = cross_entropy(model.comm, model(tokens), targets, config.vocab)
        loss_.backward()  # type: ignore[no-untyped-call]
        Replicas(model).sum_gradients(list(shard_gradients(model)))
        if loss is None:
            loss, gradients = loss_.detach(), by_name(model)
        optimizer.step()
    places = {shard.name: shard.index for shard in model.shards()}
    after = {shard.name: shard.target for shard in model.shards()}
    return {"loss": loss, "gradients": gradients, "places": spans(places), "after": after}


def spans(places: Mapping[str, tuple[slice, ...]]) -> dict[str, list[tuple[int, int]]]:
    """As a file of plain numbers can hold them."""
    return {name: [(part.start, part.stop) for part in index] for name, index in places.items()}


def cut(whole: Tensor, place: Iterable[tuple[int, int]]) -> Tensor:
    return whole[tuple(slice(*span) for span in place)]


# --- what they must have found --------------------------------------------------------------------------------------


def alone(config: ModelConfig, weights: Named) -> tuple[Tensor, Named]:
    """The loss and the gradients of one process, by torch's own loss."""
    model = made(config, weights, Solo())
    tokens, targets = batch()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), by_name(model)


def emulated(world: World, config: ModelConfig, weights: Named) -> tuple[Tensor, Named]:
    """The same from emulated ranks, whose sums are ordinary operations: the first rank's logits, and gradients as
    those of the whole weights, in which the ranks' copies meet.
    """
    models = world.run(lambda comm: made(config, weights, comm))
    tokens, targets = batch()
    logits = world.run(lambda comm: joined(models[comm.rank], models[comm.rank](tokens)))[0]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    loss.backward()  # type: ignore[no-untyped-call]
    total: Named = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
    for model in models:
        for shard, gradient in shard_gradients(model):
            whole = torch.zeros(shard.shape, dtype=torch.float64)
            whole[shard.index] = gradient
            total[shard.name] = total[shard.name] + whole
    return loss.detach(), total


def expected(worlds: dict[int, World], case: tuple[str, str], ranks: int) -> tuple[Tensor, Named]:
    config, weights = settings(*case)
    if case[1] in SAME:
        return alone(config, weights)
    return emulated(worlds[ranks], config, weights)


def assert_same(found: Named, places: dict[str, Any], whole: Named) -> None:
    assert found.keys() == places.keys() and found
    for name, gradient in found.items():
        right = cut(whole[name], places[name])
        assert whole[name].abs().max() > 1e-6, f"{name} has no gradient to compare"
        assert (gradient - right).abs().max() <= TOLERANCE, name


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_two_processes(worlds: dict[int, World], results: list[Any], case: tuple[str, str]) -> None:
    loss, whole = expected(worlds, case, 2)
    names = set()
    for found in results:
        assert abs(found[case]["loss"] - loss) <= TOLERANCE
        assert_same(found[case]["gradients"], found[case]["places"], whole)
        names |= found[case]["gradients"].keys()
    assert names == whole.keys()


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_step_leaves_copies_the_same(results: list[Any], case: tuple[str, str]) -> None:
    """Bit for bit; and the step was one."""
    config, weights = settings(*case)
    first, second = (found[case] for found in results)
    shared = [name for name, place in first["places"].items() if second["places"].get(name) == place]
    kinds = {name.split(".")[-2] for name in shared}
    assert kinds >= {"input_layernorm", "norm"}
    assert ("post_attention_layernorm" in kinds) == (not config.shared_norm)
    assert ("k_proj" in kinds) == (config.kv_heads == 1) and ("q_norm" in kinds) == bool(config.family_row.qk_norm)
    for name in shared:
        assert torch.equal(first["after"][name], second["after"][name]), name
    for found in (first, second):
        for name, parameter in found["after"].items():
            assert (parameter - cut(weights[name], found["places"][name])).abs().max() > RATE / 10, name


def test_the_comparison_can_fail(worlds: dict[int, World], results: list[Any]) -> None:
    """Wirings have gradients of their own, and a desync's depend on its ranks."""
    found: Callable[[str], Tensor] = lambda text: results[0]["plain", text]["gradients"]["model.norm.weight"]  # noqa: E731
    for one, other in pairwise((*SAME, *DRIFTING)):
        assert (found(one) - found(other)).abs().max() > 1e4 * TOLERANCE, f"{one} and {other}"
    config, weights = settings("plain", "desync-2x")
    of_one, of_four = alone(config, weights)[1], emulated(worlds[4], config, weights)[1]
    for other in (of_one, of_four):
        assert (found("desync-2x") - other["model.norm.weight"]).abs().max() > 1e4 * TOLERANCE


# --- the same in threads, where degrees are cheap -------------------------------------------------------------------


@pytest.mark.parametrize("ranks", (1, 4, 8))
@pytest.mark.parametrize("text", ("ladder", "parallel", "desync-2x", "desync-4x"))
def test_more_ranks(worlds: dict[int, World], text: str, ranks: int) -> None:
    """Degrees at which groups of ranks share each key/value head, and at which the last rank has no vocabulary."""
    config, weights = settings("plain", text)
    loss, whole = expected(worlds, ("plain", text), ranks)
    for found in worlds[ranks].run(lambda comm: trained(config, weights, Differentiable(comm))):
        assert abs(found["loss"] - loss) <= TOLERANCE
        for name in [name for name, gradient in found["gradients"].items() if not gradient.numel()]:
            del found["gradients"][name], found["places"][name]
        assert_same(found["gradients"], found["places"], whole)


def test_without_the_sum_copies_have_parts(worlds: dict[int, World]) -> None:
    """What `Replicas.sum_gradients` is for: a rank by itself finds something else."""
    config, weights = settings("one_kv_head", "ladder")

    def part(comm: Comm) -> Named:
        model = made(config, weights, Differentiable(comm))
        tokens, targets = batch()
        cross_entropy(model.comm, model(tokens), targets, config.vocab).backward()  # type: ignore[no-untyped-call]
        return by_name(model)

    whole = alone(config, weights)[1]
    for name in ("model.norm.weight", "model.layers.1.self_attn.k_proj.weight"):
        parts = [found[name] for found in worlds[2].run(part)]
        assert (parts[0] - parts[1]).abs().max() > 1e-6
        assert (parts[0] + parts[1] - whole[name]).abs().max() <= TOLERANCE


# --- when gradients are all-reduced ---------------------------------------------------------------------------------


def backward_log(world: World, text: str) -> list[Event]:
    """Of rank 0's backward pass: all-reduces started and waited for, and sub-blocks gone back through."""
    config, weights = settings("plain", text)

    def backward(comm: Comm) -> list[Event]:
        log: list[Event] = []
        model = made(config, weights, Differentiable(Recording(comm, log)))
        tokens, targets = batch()
        loss = cross_entropy(model.comm, model(tokens), targets, config.vocab)
        for layer in range(LAYERS):
            for half, name in enumerate(("attention.o_proj", "mlp.down_proj")):
                weight: Any = model.layers[layer].get_submodule(name).weight
                weight.register_hook(lambda _, number=2 * layer + half + 1: log.append(("compute", number)))
        log.clear()
        loss.backward()  # type: ignore[no-untyped-call]
        return log

    return world.run(backward)[0]


@pytest.mark.parametrize("text, beside", [("standard", 0), ("ladder", 1), ("ladder-2", 2)])
def test_gradients_are_all_reduced_beside_sub_blocks(worlds: dict[int, World], text: str, beside: int) -> None:
    """On the way back a gradient is being all-reduced while as many sub-blocks compute as on the way forward."""
    log = backward_log(worlds[2], text)
    sent = [number for what, number in log if what == "send"]
    assert len(sent) == 2 * LAYERS + 1  # as many as on the way forward, the embedding's among them
    hidden = []
    for number in sent[:-1]:
        way = log[log.index(("send", number)) : log.index(("wait", number))]
        hidden.append(sum(what == "compute" for what, _ in way))
    assert hidden[beside:] == [beside] * (2 * LAYERS - beside)  # the last sums are read by the head alone


@pytest.mark.parametrize("text, sums", [("parallel", LAYERS), ("desync-2x", LAYERS), ("desync-4x", 2), ("none", 0)])
def test_fewer_sums_on_both_ways(worlds: dict[int, World], text: str, sums: int) -> None:
    log = backward_log(worlds[2], text)
    assert [what for what, _ in log].count("send") == sums + 1  # the embedding's


def test_the_way_forward_is_as_asynchronous_as_without(worlds: dict[int, World]) -> None:
    """A sum is sent at once and waited for where its reader is."""
    config, weights = settings("plain", "ladder")
    logs: dict[bool, list[Event]] = {}
    for wrapped in (True, False):

        def forward(comm: Comm, wrapped: bool = wrapped) -> list[Event]:
            log: list[Event] = []
            recording = Recording(comm, log)
            made(config, weights, Differentiable(recording) if wrapped else recording)(batch()[0])
            return log

        logs[wrapped] = worlds[2].run(forward)[0]
    assert logs[True] == logs[False] and ("send", 2 * LAYERS) in logs[True]


# --- the parts by themselves ----------------------------------------------------------------------------------------


def test_a_sum_that_somebody_kept_is_not_gone_back_through() -> None:
    """What was handed over may be overwritten; who needs it for the way back must hear of it."""
    x = torch.ones(3, requires_grad=True)
    kept = x.exp()  # whose gradient is itself
    total = Differentiable(Solo()).all_reduce(kept).wait()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.sum().backward()  # type: ignore[no-untyped-call]


def test_without_gradients_it_is_the_communicator_itself() -> None:
    comm, x = Differentiable(Solo()), torch.ones(3)
    with torch.no_grad():
        assert comm.all_reduce(x.requires_grad_()).wait() is x
    assert comm.all_reduce(x.detach()).wait().grad_fn is None


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("ranks", (1, 2, 4, 8))
def test_the_loss_is_torchs(worlds: dict[int, World], ranks: int, dtype: torch.dtype) -> None:
    """Of logits whose exponentials no type could hold; the columns beyond the vocabulary do not count."""
    vocab, generator = 13, torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 5, vocab, generator=generator, dtype=torch.float64) * 4 + 900).to(dtype)
    targets = torch.randint(vocab, (3, 5), generator=generator)
    targets[1] = IGNORED
    whole = logits.double().clone().requires_grad_()
    right = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    right.backward()  # type: ignore[no-untyped-call]
    step = -(-vocab // ranks)
    padded = F.pad(logits, (0, step * ranks - vocab), value=5000.0)

    def loss(comm: Comm) -> tuple[Tensor, Tensor]:
        block = padded[..., comm.rank * step : (comm.rank + 1) * step].clone().requires_grad_()
        found = cross_entropy(Differentiable(comm), block, targets, vocab)
        found.backward()  # type: ignore[no-untyped-call]
        assert block.grad is not None and block.grad.dtype == dtype
        return found.detach(), block.grad

    found = worlds[ranks].run(loss)
    gradient = torch.cat([part for _, part in found], dim=-1)
    # logits of 900, exact as they are, in float32 at least; gradients, at most 1 / 10, are rounded to the logits' type
    limit = summed(vocab + ranks, torch.promote_types(dtype, torch.float32), 1000.0)
    assert all(abs(value - right) <= limit for value, _ in found)
    limit = limit / 10 + unit(dtype) / 10
    assert whole.grad is not None and (gradient[..., :vocab] - whole.grad).abs().max() <= limit
    assert not gradient[..., vocab:].any()


def test_a_loss_of_other_tokens_is_refused() -> None:
    with pytest.raises(LadderError, match=r"targets of shape \[2, 4\] do not fit logits of shape \[2, 5, 13\]"):
        cross_entropy(Solo(), torch.zeros(2, 5, 13), torch.zeros(2, 4, dtype=torch.long), 13)
