"""Trains an adapter (LoRA) beside the weights of a wired, quantized checkpoint, and loads both again.

ladder quantize DIRECTORY QUANTIZED --format int4
python examples/lora_quantized.py QUANTIZED OUT
"""

import sys
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

import ladder.hf  # noqa: F401  without it, QUANTIZED cannot be loaded

TEXT = "never wait for the network, and not for each other"


def main(quantized: Path, out: Path, steps: int = 8) -> list[float]:
    """The losses, one a step, and that of what was loaded again; OUT is the adapter, which names QUANTIZED."""
    how = CompressedTensorsConfig(dequantize=True)  # in memory, at once: PEFT finds no weights in it otherwise
    tokens = torch.tensor([AutoTokenizer.from_pretrained(quantized)(TEXT).input_ids])
    base = AutoModelForCausalLM.from_pretrained(quantized, quantization_config=how)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.save_pretrained(out)
    again = AutoPeftModelForCausalLM.from_pretrained(out, quantization_config=how)
    with torch.inference_mode():
        losses.append(float(again(input_ids=tokens, labels=tokens).loss))
    print(f"loss {losses[0]:.3f} before, {losses[-1]:.3f} after; wiring {again.config.wiring}")
    return losses


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
