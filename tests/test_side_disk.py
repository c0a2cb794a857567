"""The side network on disk, and what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.measures import distance
from ladder.train.distill import adapt
from ladder.train.side import SideConfig, SideModel
from tests import training as tiny
from tests.hosts import LAYERS, host
from tests.test_hf import close, tokens
from tests.test_side import beside, same
from tests.tolerance import stored

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.usefixtures("without_onednn")
def test_saves_and_loads(tmp_path: Path) -> None:
    model = beside(config=SideConfig(4, 2, "standard:1 ladder:1"))
    expected = model(tokens()).logits
    model.save(tmp_path / "side")
    model.save(tmp_path / "side")  # over the old one
    assert sorted(file.name for file in (tmp_path / "side").iterdir()) == ["side.json", "side.safetensors"]
    found = SideModel.load(tmp_path / "side", rewire(host("llama"), "ladder"))
    assert found.side_config == model.side_config and same(found.state_dict(), model.state_dict())
    assert torch.equal(found(tokens()).logits, expected)
    # the backbone may have lain on disk meanwhile, and be loaded as something narrower
    model.backbone.save_pretrained(tmp_path / "wired")
    load = AutoModelForCausalLM.from_pretrained
    again = SideModel.load(tmp_path / "side", load(tmp_path / "wired", attn_implementation="eager"))
    assert torch.equal(again(tokens()).logits, expected)
    half = SideModel.load(tmp_path / "side", load(tmp_path / "wired", dtype=torch.bfloat16))
    assert close(half(tokens()).logits.float(), expected, stored(2 * LAYERS, torch.bfloat16))


def test_refuses_on_loading(tmp_path: Path) -> None:
    folder = tmp_path / "side"
    model = beside()
    model.save(folder)
    facts, weights = (folder / "side.json").read_text(), (folder / "side.safetensors").read_bytes()

    def refused(match: str, backbone: Any = None) -> None:
        with pytest.raises(LadderError, match=match) as found:
            SideModel.load(folder, model.backbone if backbone is None else backbone)
        assert "\n" not in str(found.value)

    refused("llama wired 'ladder'.*llama wired 'standard'.*its own backbone", host("llama"))
    refused("llama wired 'ladder-2'", rewire(host("llama"), "ladder-2"))
    refused("its own backbone", rewire(host("llama", rms_norm_eps=1e-3), "ladder"))
    refused("its own backbone", rewire(host("llama"), "ladder", 0.5))
    refused("qwen2 wired 'ladder'", rewire(host("qwen2"), "ladder"))
    refused("not Linear", torch.nn.Linear(2, 2))
    for place in (10, len(weights) // 2, len(weights) - 1):
        damaged = bytearray(weights)
        damaged[place] ^= 1
        (folder / "side.safetensors").write_bytes(damaged)
        refused("side.safetensors is damaged")
    (folder / "side.safetensors").write_bytes(weights[:100])
    refused("side.safetensors is damaged")
    (folder / "side.safetensors").unlink()
    refused("no such file: .*side.safetensors")
    (folder / "side.safetensors").write_bytes(weights)
    for changed, match in (
        ({"more": 1}, "unknown key 'more'"),
        ({"side": {"reduction": 4, "temperature": 1}}, "unknown key 'temperature'.*reduction, every, wiring"),
        ({"side": {"reduction": 2}}, "another side network"),
        ({"side": {"reduction": 4, "every": 2}}, "another side network"),
        ({"side": {"reduction": "4"}}, "reduction .*whole number from 1, not '4'"),
        ({"backbone": None}, "damaged: it has no 'backbone'"),
        ({"weights": None}, "damaged: it has no 'weights'"),
    ):
        (folder / "side.json").write_text(json.dumps({**json.loads(facts), **changed}))  # type: ignore[dict-item]
        refused(match)
    (folder / "side.json").write_text(facts[:50])
    refused("cannot be read as JSON")
    (folder / "side.json").unlink()
    refused("no such file: .*side.json")
    (folder / "side.json").write_text(facts)
    assert torch.equal(SideModel.load(folder, model.backbone)(tokens()).logits, model(tokens()).logits)


def test_eval_takes_it_for_a_model(
    run: Run, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `ladder adapt` made, beside what it was made for, wherever that lies now."""
    origin, out, moved = shutil.copytree(model, tmp_path / "model"), tmp_path / "out", tmp_path / "moved"
    adapt(tiny.distilling(origin, out, method="side", reduction=1), tiny.adapting(data, 8), tiny.silent)
    text = tmp_path / "some.txt"
    text.write_text(data.with_suffix(".txt").read_text()[:600])

    def told(*flags: object) -> dict[str, dict[str, float]]:
        status, lines, err = run("eval", *flags, "--text", text, "--window", tiny.SEQ_LEN, "--json")
        assert status == 0, err
        found: dict[str, dict[str, float]] = {}
        for line in map(json.loads, lines.splitlines()):
            assert line["wiring"] == "ladder"
            found.setdefault(line["model"], {})[line["measure"]] = line["value"]
        return found

    run("convert", origin, tmp_path / "rewired", "--wiring", "ladder")
    found = told(tmp_path / "rewired", out, "--source", origin)
    load = AutoModelForCausalLM.from_pretrained
    ids = AutoTokenizer.from_pretrained(origin)(text.read_text())["input_ids"]
    whole = SideModel.load(out, rewire(load(origin), "ladder"))
    expected = distance(whole, load(origin), ids, window=tiny.SEQ_LEN)
    assert found[str(out)]["kl"] == pytest.approx(expected.kl.value, abs=tiny.nats())
    assert found[str(out)]["perplexity"] == pytest.approx(expected.perplexity.value, rel=tiny.nats())
    assert found[str(out)]["kl"] < 0.95 * found[str(tmp_path / "rewired")]["kl"]
    origin.rename(moved)
    assert told(out, "--backbone", moved)[str(out)]["perplexity"] == found[str(out)]["perplexity"]
    facts = json.loads((out / "side.json").read_text())
    for flags, match in (
        ((out,), f"side network beside {origin}, which is no directory here: name it by --backbone"),
        ((out, "--wiring", "standard"), "under ladder: leave out --wiring"),
        ((moved, "--backbone", moved), "--backbone is for side networks"),
        ((out, "--backbone", tmp_path / "rewired", "--wiring", "ladder"), "leave out --wiring"),
    ):
        status, printed, err = run("eval", *flags, "--text", text)
        assert (status, printed, err.count("\n")) == (2, "", 1) and match in err
    # what does not belong together is refused before anything is measured
    monkeypatch.setattr("ladder.hf.evaluate._on_text", None)
    (tmp_path / "other").mkdir()
    other = tiny.model(tmp_path / "other", data, rms_norm_eps=1e-3)
    for flags, match in (
        ((moved, out, "--backbone", other), f"was trained beside '{origin}' (llama wired 'ladder'); the config of"),
        ((moved, "--source", out), "is a side network, which runs beside its model"),
    ):
        status, printed, err = run("eval", *flags, "--text", text)
        assert (status, printed) == (2, "") and match in err.splitlines()[-1]
    for verb in (
        ("generate", "--prompt", "a", "--model", out),
        ("convert", out, tmp_path / "new", "--wiring", "ladder"),
    ):
        status, printed, err = run(*verb)
        assert (status, printed, err.count("\n")) == (2, "", 1) and f"{out} is a side network" in err
    weights = (out / "side.safetensors").read_bytes()
    (out / "side.safetensors").write_bytes(weights[:100])
    assert "side.safetensors is damaged" in run("eval", moved, out, "--backbone", moved, "--text", text)[2]
    (out / "side.safetensors").write_bytes(weights)
    (out / "side.json").write_text(json.dumps({**facts, "backbone": {"name": 5}}))
    assert "is damaged: its backbone has no 'name'" in run("eval", out, "--text", text)[2]
    # a model of the hub is where it was
    hub = {**facts["backbone"], "name": "org/name", "hub": True}
    (out / "side.json").write_text(json.dumps({**facts, "backbone": hub}))
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name, **more: AutoConfig.for_model(f"asked for {name}"))
    assert "org/name cannot be loaded: " in run("eval", out, "--text", text)[2]


def test_refuses_on_making() -> None:
    backbone = rewire(host("llama"), "ladder")
    for changed, match in (
        ({"reduction": 0}, "reduction .*not 0"),
        ({"reduction": True}, "reduction .*not True"),
        ({"every": 1.5}, "every .*not 1.5"),
        ({"wiring": 3}, "wiring .*not 3"),
    ):
        with pytest.raises(LadderError, match=match):
            SideConfig(**changed)  # type: ignore[arg-type]
    for wrong, match in (("rope", "unknown wiring 'rope'"), ("ladder:3", "covers 3 layers")):
        with pytest.raises(LadderError, match=match):
            SideModel(backbone, SideConfig(wiring=wrong))
    with pytest.raises(LadderError, match=r"must be that or torch\.float32, not torch\.float16"):
        SideModel(backbone, dtype=torch.float16)
    for other in (backbone.model, torch.nn.Linear(2, 2)):
        with pytest.raises(LadderError, match=f"causal model of transformers, not {type(other).__name__}"):
            SideModel(other)
    assert all(parameter.requires_grad for parameter in backbone.parameters())  # refused before anything is changed
