"""What a model writes when it is given no task: text of the distribution that it knows, to adapt it on.

python -m experiments.own_text MODEL DATA OUT.jsonl [--tokens N] [--rows N] [--seed N] [--begin TEXT]

Half of the texts begin with tokens from anywhere in DATA (a folder of `ladder data`), half with --begin: where a user's
turn opens, so that question and answer are the model's own. All are sampled to the same length, whatever ends in them.
`ladder data` tokenizes OUT.jsonl, special tokens too.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ladder.bench.machine import machine
from ladder.data.shards import Shards

GIVEN, LENGTH = 12, 256  # tokens that a text of DATA gives, and that a text has in all
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # SmolLM2's own
BEGIN = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--rows", type=int, default=1024, help="texts at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--begin", default=BEGIN)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(given.seed)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # a CPU is slow in the other
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype).to(device).eval()
    model.generation_config.eos_token_id = None
    tokenizer, shards = AutoTokenizer.from_pretrained(given.model), Shards.open(given.data)
    opened = torch.tensor(tokenizer(given.begin, add_special_tokens=False)["input_ids"]).expand(given.rows, -1)
    begin, written = time.time(), 0
    with given.out.open("w", encoding="utf-8") as file:
        while written < given.tokens:
            at = torch.randint(0, shards.tokens - GIVEN, (given.rows,))
            beginnings = torch.stack([shards.read(int(place), GIVEN).long() for place in at])
            for prompts in (beginnings, opened):
                found = model.generate(
                    prompts.to(device), attention_mask=torch.ones_like(prompts, device=device), do_sample=True, top_k=0,
                    top_p=1.0, temperature=given.temperature, max_new_tokens=LENGTH - prompts.shape[1],
                )  # fmt: skip
                file.writelines(json.dumps({"text": text}) + "\n" for text in tokenizer.batch_decode(found))
                written += found.numel()
    seconds = time.time() - begin
    line = {"tokens": written, "seconds": round(seconds, 1), "tokens_per_s": round(written / seconds)}
    line |= {"temperature": given.temperature, "begin": given.begin, "seed": given.seed}
    print(json.dumps({**line, **machine(torch.device(device))}))


if __name__ == "__main__":
    main()
