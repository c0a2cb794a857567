"""What a model writes when nobody asks it anything: text of the distribution that it knows best, to adapt it on.

python -m experiments.own_text MODEL DATA OUT.jsonl [--tokens N] [--rows N]

Half of the texts begin with --begin alone (what stands between the texts that the model was made of), half with tokens
from anywhere in DATA (a folder of `ladder data`); all are sampled at temperature 1. `ladder data` tokenizes OUT.jsonl.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ladder.adapt.shards import Shards
from ladder.bench.machine import machine

GIVEN, LENGTH = 12, 512  # tokens that a text begins with, and that it has in all


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--rows", type=int, default=2048, help="texts at a time")
    parser.add_argument("--begin", default="<|endoftext|>")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # a CPU is slow in the other
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype).to(device).eval()
    tokenizer, shards = AutoTokenizer.from_pretrained(given.model), Shards.open(given.data)
    first = tokenizer.get_vocab().get(given.begin)
    if first is None or given.rows < 2:
        raise SystemExit(f"the tokenizer has no token {given.begin!r}, or there are fewer than 2 --rows")
    begin, written = time.time(), 0
    with given.out.open("w", encoding="utf-8") as file:
        while written < given.tokens:
            alone = torch.full((given.rows // 2, 1), first)
            at = torch.randint(0, shards.tokens - GIVEN, (given.rows - len(alone),))
            beginnings = torch.stack([shards.read(int(place), GIVEN).long() for place in at])
            for prompts in (alone, beginnings):
                found = model.generate(
                    prompts.to(device), attention_mask=torch.ones_like(prompts, device=device), do_sample=True, top_k=0,
                    top_p=1.0, temperature=1.0, max_new_tokens=LENGTH - prompts.shape[1],
                    pad_token_id=tokenizer.eos_token_id,
                )  # fmt: skip
                for text in tokenizer.batch_decode(found, skip_special_tokens=True):
                    file.write(json.dumps({"text": text}) + "\n")
                written += int((found != tokenizer.eos_token_id).sum())
    seconds = time.time() - begin
    line = {"tokens": written, "seconds": round(seconds, 1), "tokens_per_s": round(written / seconds)}
    print(json.dumps({**line, **machine(torch.device(device))}))


if __name__ == "__main__":
    main()
