"""Which layers bear another wiring: against naive figures, by brute force, rewired and fitted."""

import copy
import math
import re
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.measures import distance, perplexity
from ladder.scan.scan import Scan, extend, fit_sequences, scan, scan_sequences, sizes
from ladder.scan.solve import solve
from ladder.wiring import Wiring
from tests.hosts import host, oracle

LAYERS = 4


def planted(loud: int) -> Any:
    """In double precision; all layers but one say little, so that it hurts most where that one reads too little."""
    found = host("llama").double()
    with torch.no_grad():
        for index, layer in enumerate(found.model.layers):
            for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
                output.weight.mul_(3.0 if index == loud else 0.3)
    return found


@pytest.fixture(scope="module")
def model() -> Any:
    return planted(2)


@pytest.fixture(scope="module")
def windows() -> Tensor:
    return torch.randint(2, 97, (3, 13), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def found(model: Any, windows: Tensor) -> Scan:
    return scan(model, windows, points=0, batch=2)


def naive(model: Any, windows: Tensor, layers: tuple[int, ...], row: str = "ladder") -> tuple[float, ...]:
    """KL, its standard error, perplexity, agreement: every position on its own, from the oracle's logits."""
    wiring = [row if at in layers else "standard" for at in range(LAYERS)]
    apart: list[list[float]] = []
    surprise: list[float] = []
    same: list[bool] = []
    for line in windows:
        with torch.no_grad():
            source = oracle(model, ["standard"] * LAYERS, input_ids=line[None, :-1])[0].double().log_softmax(-1)
            wired = oracle(model, wiring, input_ids=line[None, :-1])[0].double().log_softmax(-1)
        pairs = [zip(*both, strict=True) for both in zip(source.tolist(), wired.tolist(), strict=True)]
        apart.append([sum(math.exp(p) * (p - q) for p, q in both) for both in pairs])
        surprise += [-float(wired[at, line[at + 1]]) for at in range(len(line) - 1)]
        same += (source.argmax(-1) == wired.argmax(-1)).tolist()
    means = [sum(window) / len(window) for window in apart]
    mean = sum(means) / len(means)
    error = math.sqrt(sum((each - mean) ** 2 for each in means) / (len(means) - 1) / len(means))
    return mean, error, math.exp(sum(surprise) / len(surprise)), sum(same) / len(same)


def test_every_figure_against_a_naive_one(model: Any, windows: Tensor, found: Scan) -> None:
    assert [damage.layers for damage in found.alone] == [(0,), (1,), (2,), (3,)]
    assert [len(damage.layers) for damage in found.grown] == [1, 2, 3, 4]
    assert [damage.layers for damage in found.last] == [(3,), (2, 3), (1, 2, 3), (0, 1, 2, 3)]
    assert found.tokens == 3 * 12
    for damage in (found.original, *found.alone, *found.grown, *found.last):
        kl, error, value, agreement = naive(model, windows, damage.layers)
        assert damage.kl == pytest.approx(kl, rel=1e-9, abs=1e-12)
        assert damage.kl_stderr == pytest.approx(error, rel=1e-9, abs=1e-12)
        assert damage.perplexity == pytest.approx(value, rel=1e-9)
        pattern = tuple("ladder" if at in damage.layers else "standard" for at in range(LAYERS))
        assert Wiring.parse(damage.wiring, LAYERS).layers == pattern
        assert damage.agreement == pytest.approx(agreement)
    assert min(damage.kl for damage in found.alone) > 1e-4  # no layer is free
    assert len({damage.agreement for damage in found.alone}) > 2


@pytest.mark.parametrize("loud", range(LAYERS))
def test_the_layer_that_must_hurt_most_comes_last(windows: Tensor, loud: int) -> None:
    found = scan(planted(loud), windows, points=0)
    costs = [damage.kl for damage in found.alone]
    assert max(costs) == costs[loud] and found.order[-1] == loud
    assert list(found.order) == sorted(range(LAYERS), key=costs.__getitem__)
    for damage in found.grown:
        assert damage.layers == tuple(sorted(found.order[: len(damage.layers)]))


def test_greedy_tries_all_that_remain(model: Any, windows: Tensor) -> None:
    greedy = scan(model, windows, row="ladder-2", points=1, greedy=True)
    assert [len(damage.layers) for damage in greedy.grown] == [1, 2, 3, 4]
    cost = {
        some: naive(model, windows, some, "ladder-2")[0]
        for size in range(1, 5)
        for some in combinations(range(LAYERS), size)
    }
    chosen: tuple[int, ...] = ()
    for damage in greedy.grown:
        trials = [tuple(sorted((*chosen, layer))) for layer in range(LAYERS) if layer not in chosen]
        chosen = min(trials, key=cost.__getitem__)
        assert damage.layers == chosen and damage.kl == pytest.approx(cost[chosen], rel=1e-9)


def test_as_ladder_eval_measures_it(windows: Tensor) -> None:
    """The same text in the same windows, and all layers are `ladder`."""
    tokens, model, wired = windows.flatten()[:31].tolist(), host("llama"), rewire(host("llama"), "ladder")
    for begin in (None, 1):
        found = scan(model, scan_sequences(tokens, 10, 35, begin), points=1)
        expected = distance(wired, model, tokens, window=10, begin=begin)
        for damage in (found.grown[-1], found.last[-1]):
            assert damage.layers == (0, 1, 2, 3) and damage.wiring == "ladder"
            assert damage.kl == pytest.approx(expected.kl.value, rel=1e-6)
            assert damage.kl_stderr == pytest.approx(expected.kl.stderr, rel=1e-6)
            assert damage.perplexity == pytest.approx(expected.perplexity.value, rel=1e-6)
            assert damage.perplexity_stderr == pytest.approx(expected.perplexity.stderr, rel=1e-6)
            assert damage.agreement == expected.agreement.value
        assert found.original.perplexity == pytest.approx(
            perplexity(model, tokens, window=10, begin=begin).value, rel=1e-6
        )
        assert (found.original.kl, found.original.agreement, found.tokens) == (0, 1, 30)


def test_what_a_fit_leaves(model: Any, windows: Tensor) -> None:
    """Each set on a copy of its own, fitted as `ladder fit` does it; the model stays what it was."""
    rows = torch.randint(2, 97, (60, 12), generator=torch.Generator().manual_seed(4))
    before, bare = looks(model), scan(model, windows, points=0, batch=30)
    told: list[tuple[int, int, str]] = []
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    found = scan(model, windows, points=1, batch=30, fit=rows, progress=lambda *news: told.append(news))
    found = extend(model, windows, found, 3, 30, None, rows)
    assert [len(damage.layers) for damage in found.grown] == [1, 2, 3, 4]
    assert looks(model) == before and all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert (found.fitted, bare.fitted, found.original) == (720, 0, bare.original)
    with torch.no_grad():
        source = model(windows[:, :-1]).logits.log_softmax(-1)
        for damage in (*found.alone, *found.grown, *found.last):
            fitted = solve(copy.deepcopy(model), damage.wiring, rows, batch=30)(windows[:, :-1]).logits.log_softmax(-1)
            assert damage.kl == pytest.approx(float((source.exp() * (source - fitted)).sum(-1).mean()), rel=1e-9)
            assert damage.agreement == pytest.approx(float((source.argmax(-1) == fitted.argmax(-1)).double().mean()))
    assert all(after.kl < 0.9 * merely.kl for after, merely in zip(found.last, bare.last, strict=True))
    assert told[1] == (3, 15, "fitting layer 1 of 4") and (15, 15, "layers alone") in told
    with pytest.raises(LadderError, match="only a model that was trained as standard can be fitted"):
        scan(rewire(host("llama"), "standard:3 ladder:1"), windows, fit=rows)


def test_rows_to_fit_on() -> None:
    text = list(range(100))
    windows = scan_sequences(text, 5, 12)
    assert fit_sequences(text, windows, 25, 2).tolist() == [list(range(at, at + 5)) for at in (11, 16, 21, 26)]
    assert fit_sequences(text, windows, 10**6, 2)[:, 0].tolist() == list(range(11, 91, 5))
    assert fit_sequences(text, windows, 10, 2, begin=1).tolist() == [[1, 12, 13, 14, 15], [1, 17, 18, 19, 20]]
    for most, words in ((9, text), (50, text[:20])):
        with pytest.raises(LadderError, match="a fit takes 10 tokens at least, a batch of sequences, behind the 11"):
            fit_sequences(words, windows, most, 2)


def looks(model: Any) -> list[Any]:
    """All that a scan may not leave changed, but for the tensors' values."""
    modules = [(type(module), module.training, {**vars(module)}) for module in model.modules()]
    return [
        modules,
        model.config,
        dict(vars(model.config)),
        model.name_or_path,
        list(model.base_model._forward_hooks.values()),
    ]


@pytest.mark.parametrize("name", ["llama", "falcon-sequential"])
@pytest.mark.parametrize("wiring", [None, "standard:2 ladder-2:2"])
def test_the_model_is_left_as_it_was(name: str, wiring: str | None, windows: Tensor) -> None:
    model = host(name).train()
    model.base_model.train(False)
    if wiring is not None:
        rewire(model, wiring)
    before, weights = looks(model), {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        said = model(windows).logits

    def interrupt(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    scan(model, windows, points=1)
    assert looks(model) == before
    with pytest.raises(KeyboardInterrupt):
        scan(model, windows, points=1, progress=interrupt)
    assert looks(model) == before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(windows).logits, said)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_original_that_is_wired_already(model: Any, windows: Tensor) -> None:
    """Its layers that have the row are not tried, and the damage counts from what it is."""
    wired = rewire(host("llama").double(), "standard:1 ladder:1 standard:2")
    found = scan(wired, windows, points=0)
    assert [damage.layers for damage in found.alone] == [(0,), (2,), (3,)]
    assert [damage.layers for damage in found.last] == [(3,), (2, 3), (0, 2, 3)]
    assert found.original.wiring == "standard:1 ladder:1 standard:2" and found.grown[-1].wiring == "ladder"
    other = rewire(host("llama").double(), "ladder")
    line = windows[:1]
    expected = distance(other, wired, line[0], window=12).kl.value
    assert scan(wired, line, points=1).grown[-1].kl == pytest.approx(expected, rel=1e-6)


def test_progress_counts_windows_and_each_round_computes_the_original_once(model: Any, windows: Tensor) -> None:
    told: list[tuple[int, int, str]] = []
    passes: list[int] = []
    hook = model.register_forward_pre_hook(lambda *_: passes.append(1))
    scan(model, windows, points=1, batch=2, progress=lambda *news: told.append(news))
    hook.remove()
    # 4 layers alone and the original; then 2 and 4 layers and the last 2 (1 is known already), and the original again
    assert len(passes) == 2 * (5 + 4)
    assert [news for news in told if news[0] == news[1]] == [(15, 15, "layers alone"), (9, 9, "growing sets")]


def test_sizes_and_windows() -> None:
    assert sizes(32, 8) == [1, 4, 8, 12, 16, 20, 24, 28, 32]
    assert sizes(7, 3) == [1, 3, 4, 5, 7] and sizes(4, 8) == [1, 2, 3, 4] and sizes(1, 8) == [1]
    assert sizes(5, 0) == [1, 2, 3, 4, 5] and sizes(9, 1) == [1, 5, 9]
    text = list(range(50, 61))
    assert scan_sequences(text, 5, 100).tolist() == [text[0:6], text[5:11]]
    assert scan_sequences(text, 5, 9).tolist() == [text[0:6]]
    assert scan_sequences(text, 5, 10, begin=1).tolist() == [[1, *text[1:6]], [1, *text[6:11]]]
    for most, words, sentence in ((4, text, "4 tokens are less than a sequence of 5"), (9, text[:5], "has 5 tokens")):
        with pytest.raises(LadderError, match=sentence):
            scan_sequences(words, 5, most)


def test_one_more_size(model: Any, windows: Tensor, found: Scan) -> None:
    few = scan(model, windows, points=1)
    assert [len(damage.layers) for damage in few.grown] == [1, 2, 4]
    more = extend(model, windows, few, 3)
    assert (more.grown, more.last) == (found.grown, found.last)
    assert extend(None, windows, more, 3) is more


def test_refused_scans(model: Any, windows: Tensor) -> None:
    cases: list[tuple[str, Any, Tensor, dict[str, Any]]] = [
        ("unknown wiring 'stairs'", model, windows, {"row": "stairs"}),
        ("damage of desync-2x depends on the number of ranks", model, windows, {"row": "desync-2x"}),
        ("damage of none depends", model, windows, {"row": "none"}),
        ("under standard already", model, windows, {"row": "ladder-0"}),
        ("points is -1", model, windows, {"points": -1}),
        ("batch is 0", model, windows, {"batch": 0}),
        ("sequences must be [n, length]", model, windows[0], {}),
        ("sequences must be [n, length]", model, windows[:, :1], {}),
        ("tokens go up to 108", model, windows * 0 + 108, {}),
        ("window is 80 tokens", model, windows[:, :1].repeat(1, 81), {}),
        ("a transformers model is needed", torch.nn.Linear(1, 1), windows, {}),
        ("its staleness is 0.5", rewire(host("llama"), "ladder", staleness=0.5), windows, {"row": "standard"}),
    ]
    for sentence, given, rows, options in cases:
        with pytest.raises(LadderError, match=re.escape(sentence)):
            scan(given, rows, **options)
    broken = host("llama")
    with torch.no_grad():
        broken.model.norm.weight.fill_(math.nan)
    with pytest.raises(LadderError, match="output is not finite"):
        scan(broken, windows)
