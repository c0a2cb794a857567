"""Perplexity, KL and agreement against naive ones in float64."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ladder.hf import rewire
from ladder.hf.measures import Estimate, begin_of, distance, perplexity
from tests.checkpoints import END, byte_tokenizer, tiny
from tests.naive import NATS, WORDS, clustered, naive


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("standard"), context=64)


@pytest.fixture(scope="module")
def models(checkpoint: Path) -> dict[str, Any]:
    """The same weights under two wirings."""
    load = AutoModelForCausalLM.from_pretrained
    return {wiring: rewire(load(checkpoint).eval(), wiring) for wiring in ("standard", "ladder")}


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return list(byte_tokenizer()(WORDS)["input_ids"])


@pytest.mark.parametrize(("window", "begin"), [(1, None), (7, None), (16, END), (36, None), (64, None), (64, END)])
def test_measures_against_naive(models: dict[str, Any], tokens: list[int], window: int, begin: int | None) -> None:
    ours, source = models["ladder"], models["standard"]
    tokens = tokens[:60] if window == 64 else tokens  # shorter than the window
    windows = naive([ours, source], tokens, window, begin)
    surprise, kl, same = (clustered(windows, column) for column in range(3))
    value = math.exp(surprise[0])
    expected = [(value, None if surprise[1] is None else value * surprise[1]), kl, same]
    assert kl[0] > 0.1 and same[0] < 1  # the wirings differ
    for batch in (1, 2, 5, 100):
        found = distance(ours, source, tokens, window=window, batch=batch, begin=begin)
        alone = perplexity(ours, tokens, window=window, batch=batch, begin=begin)
        assert alone.value == pytest.approx(found.perplexity.value, rel=NATS)
        for estimate, (mean, error) in zip(found, expected, strict=True):
            assert estimate.n == len(tokens) - 1
            assert estimate.value == pytest.approx(mean, rel=NATS, abs=NATS)
            assert estimate.stderr == (None if error is None else pytest.approx(error, rel=NATS, abs=NATS))


def test_default_window_is_the_context(models: dict[str, Any], tokens: list[int]) -> None:
    assert perplexity(models["ladder"], tokens).value == perplexity(models["ladder"], tokens, window=64).value


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_no_distance_from_itself(checkpoint: Path, tokens: list[int], dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).train()
    found = distance(model, model, tokens, window=20)
    assert (found.kl.value, found.kl.stderr) == (0, 0)
    assert (found.agreement.value, found.agreement.stderr) == (1, 0)
    assert model.training  # as it came


def test_progress_and_logits_one_batch_at_a_time(models: dict[str, Any], tokens: list[int]) -> None:
    seen: list[tuple[int, int, str]] = []
    widths: list[tuple[int, ...]] = []
    hook = models["ladder"].register_forward_pre_hook(
        lambda _, __, named: widths.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    perplexity(models["ladder"], tokens, window=25, batch=2, progress=lambda *report: seen.append(report))
    hook.remove()
    assert widths == [(2, 25), (2, 25), (1, (len(tokens) - 1) % 25)]  # the short window unpadded
    assert seen == [(2, 5, "text"), (4, 5, "text"), (5, 5, "text")]


def test_begin_of_a_tokenizer() -> None:
    assert begin_of(byte_tokenizer()) is None
    assert begin_of(byte_tokenizer(extra=2, begin=True)) == 258


def test_estimates() -> None:
    items = [0.0, 1.0, 1.0, 0.0, 1.0]
    mean = Estimate.mean(items)
    assert (mean.value, mean.n) == (0.6, 5)
    assert mean.stderr == pytest.approx(math.sqrt(0.3 / 5))  # sample variance over n
    knife = Estimate.jackknife(items, lambda some: sum(some) / len(some))
    assert knife.value == mean.value and knife.stderr == pytest.approx(mean.stderr)
    other = Estimate.mean([1.0, 1.0, 1.0, 0.0, 0.0])
    difference, error, paired = mean.minus(other)
    assert (difference, paired) == (0, True) and error == pytest.approx(math.sqrt(0.5 / 5))
    loose = Estimate(0.5, 0.3, 9).minus(Estimate(0.1, 0.4, 9))
    assert loose == (0.4, 0.5, False)
    assert Estimate.mean([1.0]).stderr is None and Estimate.jackknife([1.0], max).stderr is None
