"""What `ladder fit` gives back, by the tokens that it is given.

python -m experiments.fitting MODEL DATA WIRING ... [--tokens N ...] [--ridge X ...] > results/fitting_h200.jsonl

DATA is a folder of `ladder data --tokenizer MODEL`, whose end is what is measured on. A JSON line for each wiring,
number of tokens and ridge.
"""

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ladder.bench.machine import machine
from ladder.scan.fit import fit
from ladder.scan.options import FitOptions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("wiring", nargs="+")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 17])
    parser.add_argument("--ridge", type=float, nargs="+", default=[0.01])
    parser.add_argument("--seq-len", type=int, default=1024)
    given = parser.parse_args()
    for wiring, tokens, ridge in itertools.product(given.wiring, given.tokens, given.ridge):
        with tempfile.TemporaryDirectory() as folder:
            wish = FitOptions(
                str(given.model), Path(folder) / "out", wiring, given.data, tokens, given.seq_len, ridge=ridge,
                dtype="float32",
            )  # fmt: skip
            begin = time.time()
            found = fit(wish, lambda *_: None)
        line: dict[str, Any] = {"model": given.model.name, "wiring": wiring, "tokens": found.tokens, "ridge": ridge}
        line |= {"seq_len": given.seq_len, "seconds": round(time.time() - begin, 1)}
        line["original_perplexity"] = found.original
        for name, far in (("rewired", found.rewired), ("fitted", found.fitted)):
            line |= {f"{name}_perplexity": far.perplexity.value, f"{name}_kl": far.kl.value}
            line |= {f"{name}_kl_stderr": far.kl.stderr, f"{name}_agreement": far.agreement.value}
        line |= {"measured_on": found.fitted.kl.n, **machine(torch.device(wish.device_type))}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
