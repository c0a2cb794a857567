"""What models write: greedy continuations and samples against a loop without a cache, and their measures by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.continuations import Continuations, Written, distinct, greedy, prompts_of, sampled
from ladder.hf.evaluate import Arm, evaluate
from ladder.train.side import SideModel
from tests.checkpoints import END, byte_tokenizer, tiny
from tests.families import make
from tests.naive import NATS, WORDS, said
from tests.test_evaluate import error

COUNT, PROMPT, NEW = 7, 9, 12
TEXT = WORDS * 2
Choose = Callable[[Tensor, int], int]  # (log-probabilities, number of the new token) -> which it is


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("standard"), context=64)


@pytest.fixture(scope="module")
def source(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="module")
def student(checkpoint: Path) -> Any:
    """Near enough to its source to begin some continuations as that does."""
    return rewire(AutoModelForCausalLM.from_pretrained(checkpoint).eval(), "ladder", staleness=0.05)


@pytest.fixture(scope="module")
def prompts() -> Tensor:
    return prompts_of(list(byte_tokenizer()(TEXT)["input_ids"]), COUNT, PROMPT)


def alone(model: Any, prompt: list[int], choose: Choose, count: int = NEW) -> list[int]:
    """One prompt's continuation, each token from the whole line before it."""
    line = list(prompt)
    for step in range(count):
        line.append(choose(said(model, line)[-1], step))
    return line[len(prompt) :]


def likeliest(logs: Tensor, step: int) -> int:
    return int(logs.argmax())


def by(draws: list[float]) -> Choose:
    """The token in whose share of the line from 0 to 1 the step's number lies."""

    def choose(logs: Tensor, step: int) -> int:
        end = 0.0
        for token, share in enumerate(logs.exp().tolist()):
            end += share
            if draws[step] < end:
                return token
        raise AssertionError

    return choose


def by_hand(model: Any, source: Any, prompts: Tensor, seed: int) -> list[list[float]]:
    """Of each prompt: match, prefix, mean negative log-likelihood by the source, share of distinct runs."""
    numbers = torch.rand(COUNT, NEW, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tolist()
    found = []
    for prompt, draws in zip(prompts.tolist(), numbers, strict=True):
        own, theirs = alone(model, prompt, likeliest), alone(source, prompt, likeliest)
        prefix = next((at for at in range(NEW) if own[at] != theirs[at]), NEW)
        wrote = alone(model, prompt, by(draws))
        logs = said(source, [*prompt, *wrote])
        surprise = -sum(float(logs[PROMPT - 1 + at, token]) for at, token in enumerate(wrote)) / NEW
        runs = {tuple(wrote[at : at + 4]) for at in range(NEW - 3)}
        found.append([float(own == theirs), float(prefix), surprise, len(runs) / (NEW - 3)])
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_prompts_are_evenly_over_the_text() -> None:
    text = list(range(100, 123))
    found = prompts_of(text, 4, 3)
    assert found.tolist() == [[100, 101, 102], [105, 106, 107], [111, 112, 113], [117, 118, 119]]
    assert prompts_of(torch.tensor(text), 4, 3, begin=5).tolist() == [[5, *line[1:]] for line in found.tolist()]
    assert text[0] == 100 and prompts_of(text, 1, 23).tolist() == [text]
    assert prompts_of(text, 7, 3).flatten().unique().numel() == 21 and prompts_of(text, 7, 3).max() == 122 - 3 + 2
    for count, length, match in ((8, 3, "8 prompts of 3 tokens are more than the text's 23"), (0, 3, "at least 1")):
        with pytest.raises(LadderError, match=match):
            prompts_of(text, count, length)


def test_measures_against_naive(source: Any, student: Any, prompts: Tensor) -> None:
    seed = 5
    match, prefix, surprise, runs = (
        list(column) for column in zip(*by_hand(student, source, prompts, seed), strict=True)
    )
    assert 0 < mean(match) < 1 and {0, NEW} != set(prefix)  # it writes like its source here and there
    value = math.exp(mean(surprise))
    seen: list[tuple[int, int, str]] = []
    for batch in (1, 3, 100):
        found = Continuations(source, prompts, NEW, batch=batch, seed=seed).of(student, lambda *news: seen.append(news))
        for estimate, values in (
            (found.greedy_match, match),
            (found.greedy_prefix, prefix),
            (found.written_distinct, runs),
        ):
            assert estimate.value == pytest.approx(mean(values)) and estimate.n == COUNT
            assert estimate.stderr == pytest.approx(error(values))
        assert found.written_perplexity.value == pytest.approx(value, rel=NATS)
        assert found.written_perplexity.stderr == pytest.approx(value * error(surprise), rel=NATS)
        assert found.written_perplexity.n == COUNT * NEW
    assert seen[-4:] == [
        (3, 7, "continuations"),
        (6, 7, "continuations"),
        (7, 7, "continuations"),
        (7, 7, "continuations"),
    ]
    other = Continuations(source, prompts, NEW, seed=seed + 1).of(student)
    assert other.greedy_prefix.value == mean(prefix) and other.written_perplexity.value != pytest.approx(
        value, rel=NATS
    )


def test_a_source_writes_what_it_writes(source: Any, prompts: Tensor) -> None:
    source.train()
    theirs = Continuations(source, prompts, NEW, batch=2)
    found = theirs.of(source)
    assert source.training  # as it came
    source.eval()
    assert (found.greedy_match.value, found.greedy_match.stderr) == (1, 0)
    assert (found.greedy_prefix.value, found.greedy_prefix.stderr) == (NEW, 0)
    stranger = rewire(AutoModelForCausalLM.from_pretrained(source.name_or_path), "ladder")
    less = theirs.of(stranger)
    assert less.greedy_match.value < 0.5 and less.greedy_prefix.value < NEW / 2
    # the source is not surprised by its own samples, but for their entropy
    assert less.written_perplexity.value > 1.5 * found.written_perplexity.value


@pytest.mark.parametrize(
    ("family", "wiring", "ranks"),
    [
        ("mistral", "ladder", 1),  # a window shorter than prompt and continuation
        ("gemma3", "ladder", 1),  # two kinds of caches
        ("gpt-neox", "parallel", 1),
        ("gpt2", "ladder", 1),
        ("llama-3", "desync-2x", 2),
    ],
)
def test_caches(family: str, wiring: str, ranks: int) -> None:
    """What is written with a model's cache is what is written without one, as many as are written together."""
    model = rewire(make(family).eval(), wiring, ranks=ranks)
    prompts = prompts_of(torch.arange(3, 120), 4, 11)
    passes: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, named: passes.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    draws = torch.rand(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found, drawn = greedy(model, prompts, 8), sampled(model, prompts, draws)
    hook.remove()
    assert passes == [11, *[1] * 7] * 2
    for row, prompt in enumerate(prompts.tolist()):
        assert found[row].tolist() == alone(model, prompt, likeliest, 8)
        assert drawn[row].tolist() == alone(model, prompt, by(draws[row].tolist()), 8)


def test_a_side_network_has_no_cache(source: Any, prompts: Tensor) -> None:
    torch.manual_seed(0)
    model = SideModel(rewire(AutoModelForCausalLM.from_pretrained(source.name_or_path), "ladder"))
    for parameter in model.network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    found = Continuations(model.eval(), prompts, 5, batch=4)
    with torch.inference_mode():
        written, without = greedy(model, prompts, 5), greedy(model.backbone, prompts, 5)
    assert written.tolist() == [alone(model, prompt, likeliest, 5) for prompt in prompts.tolist()]
    assert not torch.equal(written, without) and found.of(model).greedy_match.value == 1


def test_no_end_of_text_ends_a_continuation(source: Any, prompts: Tensor) -> None:
    """All are of the same length, whatever a generation config says."""
    first = int(greedy(source, prompts, 1)[0])
    source.generation_config.eos_token_id = source.config.eos_token_id = first
    try:
        assert greedy(source, prompts, NEW)[0].tolist() == alone(source, prompts[0].tolist(), likeliest)
    finally:
        source.generation_config.eos_token_id = source.config.eos_token_id = END


def test_distinct_runs() -> None:
    assert distinct([1, 2, 3, 4, 5, 6]) == 1 and distinct([7] * 9) == 1 / 6 and distinct([1, 2] * 5) == 2 / 7
    assert distinct([4, 4]) == 1 and distinct([4]) == 1


def test_a_model_that_repeats_itself(source: Any, prompts: Tensor, checkpoint: Path) -> None:
    """The head finds the token that was read, as no layer adds to it."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(weight)
    model.lm_head.weight.data = 100 * model.model.embed_tokens.weight.data.clone()
    found = Continuations(source, prompts, NEW).of(model)
    assert (found.written_distinct.value, found.written_distinct.stderr) == (
        pytest.approx(1 / (NEW - 3)),
        pytest.approx(0, abs=1e-12),
    )


def test_logits_that_are_not_finite(source: Any, prompts: Tensor, checkpoint: Path) -> None:
    """They give a measure that is not finite, and no token that a vocabulary has not."""
    spoiled = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    torch.nn.init.constant_(spoiled.lm_head.weight, math.nan)
    assert math.isnan(Continuations(spoiled, prompts, 3).of(source).written_perplexity.value)
    assert math.isfinite(Continuations(source, prompts, 3).of(spoiled).written_perplexity.value)


def test_refused_models(source: Any, prompts: Tensor, tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(tiny(tmp_path, vocab=400))
    with pytest.raises(LadderError, match="the model has 400 tokens, its source 320: their vocabularies must be equal"):
        Continuations(source, prompts, 1).of(other)
    with pytest.raises(LadderError, match="0 new tokens, 8 prompts at a time"):
        Continuations(source, prompts, 0)


# --- ladder eval ----------------------------------------------------------------------------------------------------

ASKED = {"continuations": COUNT, "prompt_tokens": PROMPT, "new_tokens": NEW}


def test_evaluate_has_them_beside_the_others(
    checkpoint: Path, source: Any, prompts: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the source itself, and of another model with differences from prompt to prompt."""
    text = tmp_path / "text"
    text.write_text(TEXT)
    name, told = str(checkpoint), list[tuple[int, int, str]]()
    rows = evaluate(
        [Arm(name), Arm(name, "ladder")], text=text, source=name, **ASKED, progress=lambda *news: told.append(news)
    )
    measures = ["perplexity", "kl", "greedy_agreement", *Written._fields]
    assert [(row["wiring"], row["measure"]) for row in rows] == [
        (wiring, measure) for wiring in ("standard", "ladder") for measure in measures
    ]
    cells = {(row["wiring"], row["measure"]): row for row in rows}
    assert (cells["standard", "greedy_match"]["value"], cells["standard", "greedy_prefix"]["value"]) == (1, NEW)
    rewired = rewire(AutoModelForCausalLM.from_pretrained(checkpoint).eval(), "ladder")
    own, theirs = (by_hand(model, source, prompts, 0) for model in (rewired, source))
    for column, measure in enumerate(Written._fields):
        row = cells["ladder", measure]
        mine, first = ([line[column] for line in side] for side in (own, theirs))
        if measure == "written_perplexity":  # the delta method
            values = [math.exp(mean(each)) for each in (mine, first)]
            assert row["difference"] == pytest.approx(values[0] - values[1], rel=NATS * 10)
            mine, first = ([value * each for each in side] for value, side in zip(values, (mine, first), strict=True))
        else:
            assert row["difference"] == pytest.approx(mean(mine) - mean(first), abs=1e-12)
        changes = [a - b for a, b in zip(mine, first, strict=True)]
        assert row["difference_stderr"] == pytest.approx(error(changes), rel=NATS * 10) and row["paired"] is True
    labels = [f"{checkpoint.name} {wiring}: continuations" for wiring in ("standard", "standard", "ladder")]
    assert [what for done, total, what in told if what in labels and done == total == COUNT] == labels
    json.dumps(rows, allow_nan=False)


def test_evaluate_puts_the_beginning_before_each(tmp_path: Path) -> None:
    """As before every window: what the tokenizer begins texts with."""
    text = tmp_path / "text"
    text.write_text(TEXT)
    begun = tiny(tmp_path / "begun", context=64)
    tokenizer = byte_tokenizer(extra=1, begin=True)
    tokenizer.save_pretrained(begun)
    rows = evaluate([Arm(str(begun))], text=text, source=str(begun), **ASKED)
    model = AutoModelForCausalLM.from_pretrained(begun).eval()
    prompts = prompts_of(list(tokenizer(TEXT)["input_ids"]), COUNT, PROMPT, 257)
    expected = mean([line[2] for line in by_hand(model, model, prompts, 0)])
    assert {row["measure"]: row["value"] for row in rows}["written_perplexity"] == pytest.approx(
        math.exp(expected), rel=NATS
    )


def test_evaluate_refuses(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any model is loaded."""
    monkeypatch.setattr("ladder.hf.evaluate._load", None)
    text, name = tmp_path / "text", str(checkpoint)
    text.write_text(TEXT)
    whole = {"text": text, "source": name, "continuations": 2}
    where = "give --text and --source, and no other --engine"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"text": text, "continuations": 2}, where),
        ({"tasks": ["x"], "continuations": 2}, where),
        ({**whole, "engine": lambda *_: None}, where),
        ({**whole, "continuations": 0}, "continuations is 0: it must be at least 1"),
        ({**whole, "prompt_tokens": 0}, "prompt_tokens is 0"),
        ({**whole, "new_tokens": 0}, "new_tokens is 0"),
        ({**whole, "seed": -1}, "seed is -1: it must be at least 0"),
        (whole, "prompts of 64 tokens and 64 new ones are more than the model's context of 64"),
        ({**whole, "prompt_tokens": 9, "new_tokens": 9, "continuations": 50}, "50 prompts of 9 tokens are more than"),
    ]
    for options, sentence in cases:
        with pytest.raises(LadderError, match=sentence):
            evaluate([Arm(name)], **options)


def test_the_command(run: Callable[..., tuple[int, str, str]], model: Path, tmp_path: Path) -> None:
    """As JSON and as a table; whatever the batch, a seed gives the same samples."""
    text = tmp_path / "book.txt"
    text.write_text("Never wait for the network. " * 40)
    flags = ("eval", model, "--wiring", "standard", "--wiring", "ladder", "--source", model, "--text", text)
    flags += ("--continuations", 5, "--prompt-tokens", 8, "--new-tokens", 6)
    status, out, err = run(*flags, "--json")
    assert (status, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["measure"] for row in rows[:7]] == ["perplexity", "kl", "greedy_agreement", *Written._fields]
    assert rows[3]["value"] == 1 and rows[4]["value"] == 6 and rows[4]["n"] == 5 and rows[5]["n"] == 30
    assert rows[11]["value"] < 6 and rows[11]["paired"] is True

    def samples(*more: object) -> float:
        found = [json.loads(line) for line in run(*flags, "--json", *more)[1].splitlines()]
        return float(found[5]["value"])

    assert samples("--batch", 2) == pytest.approx(rows[5]["value"], rel=1e-4)
    assert samples("--seed", 2**70 + 1) != pytest.approx(rows[5]["value"], rel=1e-4)
    status, out, _ = run(*flags)
    assert status == 0 and all(measure in out for measure in Written._fields)
    for wrong, match in ((("--engine", "vllm"), "no other --engine"), (("--new-tokens", 5000), "context of")):
        status, out, err = run(*flags, *wrong)
        assert (status, out, err.count("\n")) == (2, "", 1) and match in err
