"""Adapters are vLLM's: a wired model with one of them computes what it computes with the adapter in its weights."""

import json
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from tests.vllm.engines import engine
from tests.vllm.references import CLOSE, apart, checkpoint, native, prompts

RANK, ALPHA = 8, 16
TARGETS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")


def adapter(plain: Path, out: Path, merged: Path) -> None:
    """An adapter as peft stores it, and the checkpoint with it in its weights."""
    weights = load_file(plain / "model.safetensors")
    generator, found = torch.Generator().manual_seed(1), {}
    for name in list(weights):
        if name.removesuffix(".weight").endswith(TARGETS):
            rows, columns = weights[name].shape
            a = torch.randn(RANK, columns, generator=generator) / 16
            b = torch.randn(rows, RANK, generator=generator) / 16
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            found |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
            weights[name] = weights[name] + (ALPHA / RANK) * b @ a
    out.mkdir()
    save_file(found, out / "adapter_model.safetensors")
    modules = [target.split(".")[-1] for target in TARGETS]
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules, "bias": "none"}
    (out / "adapter_config.json").write_text(json.dumps(said))
    merged.mkdir()
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    (merged / "config.json").write_text((plain / "config.json").read_text())


def test_an_adapter(tmp_path: Path) -> None:
    plain = checkpoint(tmp_path / "plain", "llama", "ladder")
    adapter(plain, tmp_path / "adapter", tmp_path / "merged")
    request = LoRARequest("mine", 1, str(tmp_path / "adapter"))
    with engine(plain, 2, enable_lora=True, max_lora_rank=RANK, max_loras=1) as found:
        without = found.generate(prompts())
        answers = found.generate(prompts(), lora=request)
    assert apart(without, prompts(), partial(native, plain, "ladder", 2)) < CLOSE
    assert apart(answers, prompts(), partial(native, tmp_path / "merged", "ladder", 2)) < CLOSE
