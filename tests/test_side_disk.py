"""The side network on disk, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ladder.adapt.side import SideConfig, SideModel
from ladder.errors import LadderError
from ladder.hf import rewire
from tests.hosts import host
from tests.test_hf import close, tokens
from tests.test_side import beside, same


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
    assert close(half(tokens()).logits.float(), expected, 0.1)


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
