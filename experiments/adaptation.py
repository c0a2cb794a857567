"""A pretrained model under other wirings: as it was, merely rewired, and adapted in several ways on equal tokens.

python -m experiments.adaptation MODEL DATA VALID TASKS WORK [--tokens N] [ARM ...] > results/adaptation_h200.jsonl

DATA and VALID are folders of `ladder data --tokenizer MODEL`; TASKS has the .jsonl tasks and wikitext2_test.txt. A JSON
line for the original, for each wiring without training, and for each arm: perplexity, KL, agreement, tasks. An arm that
is in WORK already is only measured.
"""

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.choices import scores
from ladder.adapt.distill import adapt
from ladder.adapt.options import AdaptOptions, TrainingOptions
from ladder.adapt.shards import Shards
from ladder.hf import rewire
from ladder.hf.measures import distance, perplexity

HALF, ALL = "standard:15 ladder:15", "ladder"
TASKS = ("hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande", "lambada")


@dataclass(frozen=True)
class Arm:
    """A way of adapting."""

    wiring: str
    options: dict[str, Any] = field(default_factory=dict)
    lr: float = 1e-3


ARMS: dict[str, Arm] = {
    "half-finetune": Arm(HALF, {"kl_weight": 0.0, "lm_weight": 1.0, "staleness": 0.0}, 3e-4),
    "half-distill": Arm(HALF, {"staleness": 0.0}),
    "half-schedule": Arm(HALF, {"staleness": 0.5}),
    "half-streams": Arm(HALF, {"staleness": 0.5, "hidden_weight": 1.0}),
    "all-finetune": Arm(ALL, {"kl_weight": 0.0, "lm_weight": 1.0, "staleness": 0.0}, 3e-4),
    "all-distill": Arm(ALL, {"staleness": 0.0}),
    "all-schedule": Arm(ALL, {"staleness": 0.5}),
    "all-streams": Arm(ALL, {"staleness": 0.5, "hidden_weight": 1.0}),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "valid", "tasks", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("arm", nargs="*", default=list(ARMS))
    given = parser.parse_args()
    device = torch.device("cuda")
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    original = load(given.model, None, device)

    def tell(**line: Any) -> None:
        print(json.dumps({**line, "model": given.model.name, "chip": torch.cuda.get_device_name()}), flush=True)

    tell(arm="original", wiring="standard", **measured(original, original, tokenizer, given))
    for wiring in dict.fromkeys(ARMS[arm].wiring for arm in given.arm):
        tell(arm="rewired", wiring=wiring, **measured(load(given.model, wiring, device), original, tokenizer, given))
    for name in given.arm:
        arm, out = ARMS[name], given.work / name
        begin = time.time()
        if not (out / "config.json").exists():
            run = TrainingOptions(
                data=given.data, valid=given.valid, tokens=given.tokens, batch=given.batch, lr=arm.lr, warmup=0.05,
                eval_every=10**9, save_every=10**9, weight_decay=0.01,
            )  # fmt: skip
            adapt(AdaptOptions(str(given.model), out, arm.wiring, **arm.options), run, lambda *_: None)
        seconds = time.time() - begin
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        speed = sorted(line["tokens_per_s"] for line in lines if "tokens_per_s" in line)
        facts = {
            "tokens": given.tokens,
            "batch": given.batch,
            "lr": arm.lr,
            **arm.options,
            "seconds": round(seconds, 1),
        }
        facts |= {
            "seconds": round(seconds, 1),
            "tokens_per_s": speed[len(speed) // 2],
            "mfu": max(line.get("mfu", 0) for line in lines),
        }
        tell(arm=name, wiring=arm.wiring, **facts, **measured(load(out, None, device), original, tokenizer, given))


def load(model: Path, wiring: str | None, device: torch.device) -> Any:
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device).eval()
    return found if wiring is None else rewire(found, wiring)


def measured(model: Any, original: Any, tokenizer: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Perplexity of two texts, KL and agreement on one of them, accuracy of the tasks and their mean."""
    text = tokenizer((given.tasks / "wikitext2_test.txt").read_text(encoding="utf-8"))["input_ids"]
    found: dict[str, Any] = {"wikitext2_perplexity": perplexity(model, text, window=1024).value}
    far = distance(model, original, Shards.open(given.valid).read(0, 1 << 18), window=1024)
    found |= {"valid_perplexity": far.perplexity.value, "kl": far.kl.value, "agreement": far.agreement.value}
    main = []
    for task in TASKS:
        for name, value in scores(model, tokenizer, given.tasks / f"{task}.jsonl").items():
            found[f"{task}/{name}"] = round(value, 5)
        main.append(found.get(f"{task}/acc_norm", found[f"{task}/acc"]))
    return {**found, "tasks": round(sum(main) / len(main), 5)}


if __name__ == "__main__":
    main()
