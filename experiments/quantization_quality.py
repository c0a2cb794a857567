"""What rounding costs a model: KL to the original and perplexity, round-to-nearest beside calibrated weights.

python -m experiments.quantization_quality MODEL DATA VALID [--fitted DIR] >> results/quality/quantization.jsonl

DATA and VALID are folders of `ladder data --tokenizer MODEL`: to calibrate on, and to measure on. `--fitted`: a
checkpoint that `ladder fit` made of MODEL, which is quantized instead. `--wiring`: MODEL gets this wiring, fitted and
rounded in one go. A JSON line for each format and way. The matrices are rounded in memory, with the functions of
`ladder quantize`; so a last group may be smaller than the others, which the files have no form for.
"""

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ladder.bench.machine import machine
from ladder.config.quantization import DENSE, Storage
from ladder.data.shards import Shards
from ladder.hf import rewire
from ladder.hf.load import pretrained, quiet
from ladder.hf.measures import Distance, distance
from ladder.hf.wire import layers_of
from ladder.quantize.calibrate import calibrated
from ladder.quantize.rounding import dequantized, round_to_nearest
from ladder.scan.fit import data_sequences
from ladder.wiring import Wiring

FORMATS = {
    "fp8": Storage("fp8", "compressed"),
    "fp8-block": Storage("fp8", "compressed", 128, 128),
    "int8": Storage("int8", "compressed"),
    "int4-128": Storage("int4", "compressed", 128),
    "int4-64": Storage("int4", "compressed", 64),
    "int4-32": Storage("int4", "compressed", 32),
    "int4-128-zero": Storage("int4", "compressed", 128, zero=True),
}


class Cached:
    """A model's logits, computed once for each batch."""

    def __init__(self, model: Any) -> None:
        self.model, self.config, self.device, self.training = model, model.config, model.device, False
        self.known: dict[bytes, Any] = {}

    def __call__(self, input_ids: Tensor, **named: Any) -> Any:
        key = input_ids.numpy().tobytes()
        if key not in self.known:
            self.known[key] = self.model(input_ids=input_ids, **named)
        return self.known[key]

    def train(self, mode: bool = True) -> None:
        assert not mode

    def eval(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("valid", type=Path)
    parser.add_argument("--fitted", type=Path)
    parser.add_argument("--wiring")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--ways", nargs="+", default=["nearest", "calibrated"], choices=["nearest", "calibrated"])
    parser.add_argument("--tokens", type=int, default=1 << 15)
    parser.add_argument("--ridge", type=float, default=0.01)
    parser.add_argument("--measured", type=int, default=1 << 13)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    given = parser.parse_args()
    with quiet():
        original = pretrained(AutoModelForCausalLM, str(given.model), dtype=torch.float32)
        base = original
        if given.fitted is not None:
            base = pretrained(AutoModelForCausalLM, str(given.fitted), dtype=torch.float32)
    text = Shards.open(given.valid).read(0, given.measured + 1)
    sequences, _ = data_sequences(given.data, given.seq_len, given.batch, given.tokens)
    sources = {"original": Cached(original)} | ({"dense": Cached(base)} if base is not original else {})
    wiring = given.wiring and Wiring.parse(given.wiring, base.config.num_hidden_layers)
    about = {"model": given.model.name, "wiring": str(wiring or getattr(base.config, "wiring", "standard"))}
    about |= {"one_go": wiring is not None, "ridge": given.ridge, "seq_len": given.seq_len}

    def report(model: Any, name: str, way: str, tokens: int, begin: float) -> None:
        line: dict[str, Any] = {**about, "format": name, "way": way, "tokens": tokens}
        line["seconds"] = round(time.time() - begin, 1)
        for source, cached in sources.items():
            found: Distance = distance(model, cached, text, window=given.seq_len, batch=given.batch)
            line |= {"perplexity": found.perplexity.value, f"kl_to_{source}": found.kl.value}
            line |= {f"kl_to_{source}_stderr": found.kl.stderr, f"agreement_with_{source}": found.agreement.value}
        print(json.dumps({**line, "measured_on": found.kl.n, **machine(torch.device("cpu"))}), flush=True)

    dense = sources["dense" if base is not original else "original"]
    report(dense if wiring is None else rewire(copy.deepcopy(base), wiring), "dense", "none", 0, time.time())
    for name in given.formats:
        for way in given.ways:
            model, begin = copy.deepcopy(base), time.time()
            linear = {f"{layer}." for layer in _names(model)}
            storage = FORMATS[name]

            def storage_of(module: str, storage: Storage = storage, inside: set[str] = linear) -> Storage:
                return storage if any(module.startswith(layer) for layer in inside) else DENSE

            if way == "calibrated":
                options = {"dtype": torch.bfloat16, "ridge": given.ridge, "batch": given.batch}
                for _ in calibrated(model, storage_of, sequences, wiring, **options):
                    pass
            else:
                nearest(rewire(model, wiring), storage_of)
            report(model, name, way, sequences.numel() if way == "calibrated" else 0, begin)


def _names(model: Any) -> list[str]:
    layers = set(layers_of(model))
    return [name for name, module in model.named_modules() if module in layers]


@torch.no_grad()
def nearest(model: Any, storage_of: Any) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and (storage := storage_of(name)) != DENSE:
            rounded = round_to_nearest(module.weight.to(torch.bfloat16), storage)
            module.weight.copy_(dequantized(rounded, storage, torch.bfloat16))


if __name__ == "__main__":
    main()
