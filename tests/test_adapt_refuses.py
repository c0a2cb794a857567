"""ladder adapt: what is refused, before anything is started."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig

from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.train import distill as module
from ladder.train.distill import adapt
from ladder.train.options import AdaptOptions
from tests import training as tiny
from tests.checkpoints import byte_tokenizer
from tests.training import adapting, silent


@pytest.mark.parametrize("what, message", [
    ("wired", "wired is wired already: name its original"),
    ("small", "tokens has a vocabulary of 300, .*small one of 200: run ladder data OUT FILE... --tokenizer .*small"),
    ("tokenizer", "tokens was tokenized with another tokenizer than .*tokenizer's: run ladder data OUT FILE..."),
    ("no tokenizer", "bare cannot be loaded"),
    ("no model", "no model '.*nothing': there is no such directory"),
    ("no weights", "empty cannot be loaded"),
    ("long", "--seq-len 65 is more than the model's context of 64"),
    ("wiring", "covers more than the model's 3 layers"),
    ("fsdp", "--fsdp is for --method full and layers, lora trains little: leave one out"),
    ("narrow", "a reduction of 1000 leaves nothing of a width of 32"),
    ("recompute", "--recompute has nothing to do for --method side"),
    ("top", "--teacher-top 300 is no part of a vocabulary of 300"),
    ("valid", "other was tokenized with another tokenizer than .*model"),
    ("closed", "out cannot be written: nothing can be made in"),
    ("peft", "--method lora needs peft: pip install"),
    ("local", "'desync-2x' keeps partial sums local, which is another model at every TP degree: give --ranks"),
    ("stale", "there is nothing between the standard model and 'desync-2x': give --staleness 0"),
    ("ranks", "3 ranks cannot share 4 heads"),
    ("emulated", "--ranks is for --method full and layers, not for lora: leave one out"),
    ("layers", "--method layers trains rewired layers, and 'standard' has none"),
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
            "long": ({}, {"seq_len": 65}), "wiring": ({"wiring": "ladder:5"}, {}), "peft": ({"method": "lora"}, {}),
            "fsdp": ({"method": "lora"}, {"fsdp": True}), "recompute": ({"method": "side"}, {"recompute": True}),
            "top": ({"teacher_top": 300}, {}), "valid": ({}, {"valid": tmp_path / "other"}),
            "local": ({"wiring": "desync-2x"}, {}), "stale": ({"wiring": "desync-2x", "ranks": 2}, {}),
            "ranks": ({"ranks": 3}, {}), "emulated": ({"ranks": 2, "method": "lora"}, {}), "closed": ({}, {}),
            "layers": ({"method": "layers", "wiring": "standard"}, {}),
            "narrow": ({"method": "side", "reduction": 1000}, {}),
        }[what]  # fmt: skip
        if what == "closed":
            monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
        if what == "valid":
            tiny.tokens(tmp_path / "other", seed=2, vocab=280)
    with pytest.raises(LadderError, match=message) as refused:
        adapt(AdaptOptions(str(path), tmp_path / "out", **own), adapting(data, **more), silent)
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes, message", [
    ({"method": "magic"}, "unknown method 'magic': known are full, layers, lora, side"),
    ({"kl_weight": 0.0, "lm_weight": 0.0}, "--kl-weight and --lm-weight are both 0: nothing would be learned"),
    ({"kl_weight": -1.0}, "kl-weight must be from 0 to 1000, not -1.0"),
    ({"hidden_weight": 1.0, "teacher_top": 4}, "--hidden-weight needs the original in memory"),
    ({"hidden_weight": 1.0, "method": "side"}, "--hidden-weight trains the model's layers"),
    ({"kl_weight": 0.0, "lm_weight": 1.0, "teacher_top": 4}, "--teacher-top needs a --kl-weight above 0"),
    ({"staleness": 1.5}, "staleness must be from 0 to 1, not 1.5"),
    ({"staleness_way": "slowly"}, "unknown staleness-way .slowly.: known are together, first, last, chance"),
    ({"staleness_way": "last", "init_from": Path("fitted")}, "--staleness-way last needs a staleness that rises"),
    ({"staleness_way": "chance", "staleness": 0.0}, "--staleness-way chance needs a staleness that rises"),
    ({"staleness_way": "first", "method": "side"}, "--staleness-way first needs a staleness that"),
    ({"method": "side", "staleness": 0.5}, "--staleness changes layers that are trained"),
    ({"teacher": Path("shared")}, "--teacher is the folder of the cache of --teacher-top: give both"),
    ({"teacher_top": -1}, "teacher-top must be 0 or more, not -1"),
    ({"lora_rank": 0}, "lora-rank must be at least 1, not 0"),
    ({"ranks": 0}, "ranks must be at least 1, not 0"),
])  # fmt: skip
def test_refused_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LadderError, match=message):
        AdaptOptions("model", Path("out"), **changes)


def test_a_family_that_the_engine_does_not_have_is_told_of(
    model: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the training; a side network is for transformers alone in any case."""
    sentence = "what is trained will run in transformers alone, not in ladder generate and serve: unknown model family"
    sizes = {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    bloom = tmp_path / "bloom"
    AutoModelForCausalLM.from_config(BloomConfig(**sizes)).save_pretrained(bloom)
    AutoTokenizer.from_pretrained(data / "tokenizer").save_pretrained(bloom)
    for path, method, told in ((bloom, "full", True), (model, "full", False), (bloom, "side", False)):
        caplog.clear()
        module._remark_on_family(AdaptOptions(str(path), tmp_path / "out", method=method))
        assert any(sentence in record.getMessage() for record in caplog.records) == told
