"""The transformers host on a GPU: every family against float64 on the CPU, split over devices, compiled, in bfloat16.

python -m experiments.hf_gpu > results/hf_gpu.jsonl        (from the repository's root: the models are the tests')

One JSON line per check; the exit status is 1 if any failed.
"""

import json
import platform
import sys
from typing import Any

import torch
from accelerate import dispatch_model

from ladder.hf import rewire
from tests.hosts import CONFIGS, host

WIRINGS = ("standard", "ladder", "parallel", "ladder-2", "standard:2 ladder:2")
TOKENS = torch.randint(2, 97, (3, 40), generator=torch.Generator().manual_seed(1))


def report(**line: Any) -> bool:
    print(json.dumps(line), flush=True)
    return bool(line["ok"])


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest deviation, relative to the largest logit."""
    return float((found.double().cpu() - truth).abs().max() / truth.abs().max())


def numbers(name: str) -> bool:
    """Models of experts in float32 only: those have no float64, and bfloat16 sends tokens to other experts."""
    good, experts = True, "moe" in name or name == "mixtral"
    precise = torch.float32 if experts else torch.float64
    for wiring in WIRINGS:
        truth = rewire(host(name).to(precise), wiring)(TOKENS).logits.detach().double()
        for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
            if experts and dtype is torch.bfloat16:
                continue
            model = rewire(host(name).to("cuda", dtype), wiring)
            with torch.inference_mode():
                deviation = error(model(TOKENS.cuda()).logits, truth)
            line = {"family": name, "wiring": wiring, "dtype": str(dtype), "error": deviation}
            good &= report(check=f"logits against {precise} on the CPU", **line, ok=deviation <= limit)
    return good


def split(name: str) -> bool:
    """The first layers on the GPU, the others on the CPU: the all-reduces in flight change devices with the stream."""
    model = rewire(host(name), "ladder-2")
    expected = model(TOKENS).logits.detach().double()
    prefix, layers = model.base_model_prefix, "h" if hasattr(model.base_model, "h") else "layers"
    places = {child: 0 for child, _ in model.named_children() if child != prefix}
    places |= {f"{prefix}.{child}": 0 for child, _ in model.base_model.named_children() if child != layers}
    places |= {f"{prefix}.{layers}.{index}": "cpu" if index >= 2 else 0 for index in range(4)}
    dispatch_model(model, device_map=places, main_device=0)
    with torch.inference_mode():
        deviation = error(model(TOKENS.cuda()).logits, expected)
    return report(check="split over GPU and CPU", family=name, error=deviation, ok=deviation <= 1e-4)


def compiled(name: str) -> bool:
    """One graph, made into code by inductor: the loss and all gradients."""
    torch.compiler.reset()
    model = rewire(host(name, use_cache=False).cuda().train(), "standard:1 ladder:2 ladder-2:1")
    found = []
    for run in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        logits = run(input_ids=TOKENS.cuda()).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS.cuda()[:, 1:].flatten())
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    deviation = max(float((a - b).abs().max() / (1e-6 + b.abs().max())) for a, b in zip(*found, strict=True))
    return report(check="compiled, loss and gradients", family=name, error=deviation, ok=deviation <= 1e-3)


def static_cache(name: str) -> bool:
    model = rewire(host(name).cuda(), "ladder")
    inputs = {"input_ids": TOKENS.cuda(), "attention_mask": torch.ones_like(TOKENS).cuda(), "pad_token_id": 0}
    ways: list[dict[str, Any]] = [{"use_cache": False}, {}, {"cache_implementation": "static"}]
    first, *others = (model.generate(**inputs, max_new_tokens=24, do_sample=False, **way) for way in ways)
    return report(check="caches", family=name, ok=all(torch.equal(first, other) for other in others))


def main() -> None:
    torch.set_num_threads(1)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
    good = report(check="machine", **about, ok=True)
    for name in CONFIGS:
        good &= numbers(name)
        good &= split(name)
    for name in ("llama", "gemma2", "qwen3", "granite", "gpt_neox", "falcon"):
        good &= compiled(name)
    for name in ("llama", "qwen2", "smollm3"):
        good &= static_cache(name)
    sys.exit(not good)


if __name__ == "__main__":
    main()
