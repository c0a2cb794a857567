"""What a model writes when it is given no task: text of the distribution that it knows, to adapt it on.

python -m experiments.own_text MODEL DATA OUT.jsonl [--tokens N] [--sequences N] [--seed N] [--begin TEXT]

Half of the texts begin with tokens from anywhere in DATA (a folder of `ladder data`), half with --begin: where a user's
turn opens, so that question and answer are the model's own. All are sampled to the same length by our own engine,
whatever ends in them. `ladder data` tokenizes OUT.jsonl, special tokens too.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from ladder import LLM, SamplingParams
from ladder.bench.machine import machine
from ladder.data.shards import Shards

GIVEN, LENGTH = 12, 256  # tokens that a text of DATA gives, and that a text has in all
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # SmolLM2's own
BEGIN = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--sequences", type=int, default=1024, help="at a time; half of them begin with --begin")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--begin", default=BEGIN)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(given.seed)
    tokenizer, shards = AutoTokenizer.from_pretrained(given.model), Shards.open(given.data)
    opened = tokenizer(given.begin, add_special_tokens=False)["input_ids"]
    written = 0
    with (
        LLM(given.model, device=device, max_num_seqs=given.sequences) as llm,
        given.out.open("w", encoding="utf-8") as file,
    ):
        begin = time.time()
        while written < given.tokens:
            at = torch.randint(0, shards.tokens - GIVEN, (given.sequences // 2,), generator=generator)
            prompts = [shards.read(int(place), GIVEN).tolist() for place in at] + [opened] * (given.sequences // 2)
            seeds = torch.randint(0, 2**62, (len(prompts),), generator=generator).tolist()
            params = [
                SamplingParams(
                    max_new_tokens=LENGTH - len(prompt), temperature=given.temperature, seed=seed, ignore_eos=True
                )
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]
            texts = [
                prompt + result.token_ids for prompt, result in zip(prompts, llm.generate(prompts, params), strict=True)
            ]
            file.writelines(json.dumps({"text": text}) + "\n" for text in tokenizer.batch_decode(texts))
            written += sum(len(text) for text in texts)
        seconds = time.time() - begin
    line = {"tokens": written, "seconds": round(seconds, 1), "tokens_per_s": round(written / seconds)}
    line |= {"temperature": given.temperature, "begin": given.begin, "seed": given.seed}
    print(json.dumps({**line, **machine(torch.device(device))}))


if __name__ == "__main__":
    main()
