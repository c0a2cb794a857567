"""The checkpoints of the paper's authors, as they have published them: `llamaLadder` with `ladder_layers`.

Every host reads them as they are, and says what the oracle says.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ladder.checkpoint import Directory, load
from ladder.config import ModelConfig
from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.convert import convert
from ladder.hf.evaluate import Arm, evaluate
from ladder.hf.measures import perplexity
from ladder.model import Decoder
from ladder.quantize.options import QuantizeOptions
from ladder.quantize.write import quantize
from tests.checkpoints import byte_tokenizer
from tests.hosts import host, oracle
from tests.tolerance import forward

LAYERS = 32
LIST = [0, 3, 4, 17, 30, 31]
FORMS: dict[str, tuple[Any, list[int]]] = {
    "16": (16, list(range(16, 32))),
    "20": (20, list(range(12, 32))),
    "list": (LIST, LIST),
}
PROMPT = [5, 17, 9, 80, 3, 41, 7]
LIMIT = forward(LAYERS, 48, len(PROMPT))
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What they were made from."""
    path = tmp_path_factory.mktemp("plain")
    host("llama", num_hidden_layers=LAYERS, vocab_size=257).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> tuple[Any, list[int]]:
    """What `ladder_layers` holds, and which layers that means."""
    return FORMS[request.param]


@pytest.fixture
def theirs(plain: Path, form: tuple[Any, list[int]], tmp_path: Path) -> Path:
    return published(plain, tmp_path / "theirs", form[0])


def published(plain: Path, path: Path, ladder_layers: Any) -> Path:
    shutil.copytree(plain, path)
    raw = json.loads((path / "config.json").read_text())
    raw |= {"model_type": "llamaLadder", "architectures": ["LlamaLadderForCausalLM"], "ladder_layers": ladder_layers}
    (path / "config.json").write_text(json.dumps(raw))
    return path


def truth(plain: Path, layers: list[int], tokens: Tensor) -> Tensor:
    rows = ["ladder" if layer in layers else "standard" for layer in range(LAYERS)]
    model = LlamaForCausalLM.from_pretrained(plain)
    with torch.inference_mode():
        found = oracle(model, rows, input_ids=tokens)
        assert (found - model(tokens).logits).abs().max() > 100 * LIMIT  # the wiring matters
    return found


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= LIMIT * expected.abs().max())


def test_every_host_reads_them(
    plain: Path, theirs: Path, form: tuple[Any, list[int]], tmp_path: Path, run: Run
) -> None:
    tokens = torch.tensor([PROMPT])
    expected = truth(plain, form[1], tokens)
    wiring = str(ModelConfig.from_directory(theirs).wiring)
    convert(str(theirs), tmp_path / "ours")
    with torch.inference_mode():
        models = [kind.from_pretrained(theirs) for kind in (AutoModelForCausalLM, LlamaForCausalLM)]
        models += [kind.from_pretrained(tmp_path / "ours") for kind in (AutoModelForCausalLM, LlamaForCausalLM)]
        models.append(rewire(LlamaForCausalLM.from_pretrained(plain), wiring))
        found = [model(tokens).logits for model in models]
        assert all(torch.equal(logits, found[0]) for logits in found) and close(found[0], expected)
        for folder in (theirs, tmp_path / "ours"):
            directory = Directory(folder)
            assert close(load(Decoder(directory.config), directory)(tokens), expected)
    assert [type(model).__name__ for model in models] == ["LlamaForCausalLM"] * 5
    configs = [model.config for model in models]
    assert all((each.wiring, each.architectures) == (wiring, ["LlamaForCausalLM"]) for each in configs)
    greedy = models[0].generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, len(PROMPT) :]
    prompt = ",".join(map(str, PROMPT))
    arguments = ("--model", theirs, "--tp", 2, "--token-ids", prompt, "--max-new-tokens", 6, "--json", "--logprobs", 1)
    status, out, err = run("generate", *arguments)
    assert status == 0, err
    answer = json.loads(out)
    assert answer["token_ids"] == greedy.tolist()
    first = float(torch.log_softmax(expected[0, -1], 0).max())
    assert answer["logprobs"][0]["logprob"] == pytest.approx(first, abs=LIMIT * float(expected.abs().max()))


def test_convert_says_what_is_true(plain: Path, tmp_path: Path, run: Run) -> None:
    """Nothing was rewired where the wiring is the source's own."""
    theirs = published(plain, tmp_path / "theirs", 16)
    for name, arguments, said, written in (
        ("same", (), "the wiring it had", "nothing was rewired"),
        ("named", ("--wiring", "standard:16 ladder:16"), "the wiring it had", "nothing was rewired"),
        (
            "other",
            ("--wiring", "ladder"),
            "'standard:16 ladder:16': weights that were trained for that",
            "under another",
        ),
        ("back", ("--wiring", "standard"), "'standard:16 ladder:16': weights that were", "`standard:16 ladder:16`"),
    ):
        status, out, err = run("convert", theirs, tmp_path / name, *arguments)
        card = (tmp_path / name / "README.md").read_text()
        assert status == 0 and said in out and written in card, (err, out, card)
        assert ("under another wiring" in card) == (name == "other")
    _, out, _ = run("convert", plain, tmp_path / "first", "--wiring", "ladder")
    assert "trained under another wiring: adapt them" in out
    assert "trained under another wiring" in (tmp_path / "first/README.md").read_text()
    saved = json.loads((tmp_path / "same/config.json").read_text())
    assert (
        saved["model_type"] == "ladder" and saved["wiring"] == "standard:16 ladder:16" and "ladder_layers" not in saved
    )


def test_they_are_measured_and_quantized(plain: Path, tmp_path: Path) -> None:
    theirs = published(plain, tmp_path / "theirs", 16)
    text = tmp_path / "text"
    text.write_text("never wait for it")
    (row,) = evaluate([Arm(str(theirs))], text=text, window=16)
    wired = rewire(LlamaForCausalLM.from_pretrained(plain), "standard:16 ladder:16")
    expected = perplexity(wired, byte_tokenizer()("never wait for it").input_ids, window=16)
    assert row["wiring"] == "standard:16 ladder:16" and row["value"] == pytest.approx(expected.value, rel=1e-5)
    quantize(QuantizeOptions(theirs, tmp_path / "int8", format="int8"))
    raw = json.loads((tmp_path / "int8/config.json").read_text())
    assert raw["model_type"] == "ladder" and raw["wiring"] == "standard:16 ladder:16"  # locked from now on
    directory = Directory(tmp_path / "int8")
    tokens = torch.tensor([PROMPT])
    with torch.inference_mode():
        found = load(Decoder(directory.config), directory)(tokens)
        (right, wrong) = (model(tokens).logits for model in (wired, LlamaForCausalLM.from_pretrained(plain)))
    assert (found - right).abs().mean() < 0.5 * (wrong - right).abs().mean()


def test_configs_by_every_way(plain: Path, tmp_path: Path) -> None:
    """The config alone is wired, is written locked, and comes back; so does one that was made key by key."""
    theirs = published(plain, tmp_path / "theirs", LIST)
    tokens = torch.tensor([PROMPT])
    expected = AutoModel.from_pretrained(theirs)(tokens)[0]
    raw = json.loads((theirs / "config.json").read_text())
    by_key = LlamaConfig(**raw)
    ways = [AutoConfig.from_pretrained(theirs), LlamaConfig.from_pretrained(theirs), LlamaConfig.from_dict(raw), by_key]
    for config in ways:
        model = AutoModel.from_pretrained(theirs, config=config)
        assert torch.equal(model(tokens)[0], expected) and str(model.config.wiring).startswith("ladder:1 standard:2")
    for config in ways[:3]:
        config.save_pretrained(tmp_path / "config")
        saved = json.loads((tmp_path / "config/config.json").read_text())
        assert (saved["model_type"], saved["vocab_size"], saved["ladder_layers"]) == ("ladder", None, LIST)
        assert AutoConfig.from_pretrained(tmp_path / "config").ladder_layers == LIST


@pytest.mark.parametrize("value", [None, [], 0])
def test_without_ladder_layers_it_is_a_plain_llama(value: Any, plain: Path, tmp_path: Path) -> None:
    theirs = published(plain, tmp_path / "theirs", value)
    tokens = torch.tensor([PROMPT])
    expected = LlamaForCausalLM.from_pretrained(plain)(tokens).logits
    for kind in (AutoModelForCausalLM, LlamaForCausalLM):
        model = kind.from_pretrained(theirs)
        assert torch.equal(model(tokens).logits, expected) and type(model.config) is LlamaConfig
    assert ModelConfig.from_directory(theirs).wiring.is_standard
    AutoConfig.from_pretrained(theirs).save_pretrained(tmp_path / "again")
    assert ModelConfig.from_directory(tmp_path / "again").wiring.is_standard
    with pytest.raises(LadderError, match="no wiring: name one"):
        convert(str(theirs), tmp_path / "out")


@pytest.mark.parametrize("value, message", [
    (33, "ladder_layers is 33, the model has 32 layers"),
    ([31, 32], "names layer 32"),
    ("all", "must be a number or a list"),
])  # fmt: skip
def test_refused(value: Any, message: str, plain: Path, tmp_path: Path) -> None:
    theirs = published(plain, tmp_path / "theirs", value)
    for way in (
        lambda: AutoModelForCausalLM.from_pretrained(theirs),
        lambda: LlamaForCausalLM.from_pretrained(theirs),
        lambda: ModelConfig.from_directory(theirs),
        lambda: convert(str(theirs), tmp_path / "out"),
    ):
        with pytest.raises(LadderError, match=message):
            way()
