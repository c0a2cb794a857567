"""How many instructions a quantized weight costs in the compiled matrix kernel of a few rows; needs no GPU.

python -m experiments.instructions > results/instructions.jsonl

Compiled for an H200 (sm_90) as `ladder.kernels.table.rule` configures it for Llama-3-8B's down projection: the
instructions of the main loop, of a thread, over the weights that it multiplies there. A JSON line for each format and
number of rows.
"""

import json
import re
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from ladder.bench.machine import machine
from ladder.kernels.quantized.small_gemm import quantized_small_gemm
from ladder.kernels.small_gemm import fitting
from ladder.kernels.table import SHARED, Shape, SmallGemm, rule
from ladder.layers.weight import RUN

OUTPUTS, INPUTS = 4096, 14336
FORMATS = {"int4": (4, 128), "fp8": (8, 0)}  # bits and inputs that share a scale, 0: all


def block_of(bits: int, group: int, rows: int, config: SmallGemm) -> int:
    """Rows of activations that a program has; another one has the weight's numbers anew."""
    return fitting(config, bits, group, rows, 2, SHARED)[0]


def compiled(bits: int, group: int, rows: int, config: SmallGemm) -> str:
    """The machine code."""
    fixed: dict[str, Any] = {
        "K": INPUTS,
        "MB": block_of(bits, group, rows, config),
        "BN": config.rows,
        "BK": config.depth,
    }
    fixed |= {"SPLITS": config.splits, "PAIR": False, "ACT": 0, "BIAS": False, "PLUS": False, "ALPHA": False}
    fixed |= {"STAGES": config.stages, "IEEE": False, "PDL": True, "BITS": bits, "GROUP": group, "ZEROS": False}
    fixed |= {"FP8": bits == 8, "ASM": True, "SLICES": config.warps, "RUN": RUN}
    kinds = {"weight": "*u8" if bits == 4 else "*i8", "zeros": "*u8", "M": "i32", "N": "i32", "scale": "fp32"}
    kinds |= {"alpha": "fp32", "out": "*fp32" if config.splits > 1 else "*bf16"}
    kinds |= {"scales": "*fp32" if bits == 8 else "*bf16"}
    names = quantized_small_gemm.arg_names
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "*bf16") for name in names}
    values = {(names.index(name),): value for name, value in fixed.items()}
    whole = {name for name, kind in signature.items() if kind.startswith("*") or name in ("M", "N")}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if name in whole and name not in fixed}
    options = {"num_warps": config.warps, "launch_pdl": True}
    made = compile(ASTSource(quantized_small_gemm, signature, values, aligned), GPUTarget("cuda", 90, 32), options)
    return str(made.asm["sass"])


def for_a_weight(code: str, block: int, config: SmallGemm) -> float:
    """Instructions of the loop that multiplies a tile, over the weights of the tile that are a thread's."""
    lines, found = code.splitlines(), []
    for end, line in enumerate(lines):
        label = re.search(r"BRA (LBB\d+);", line)
        if label and (begin := lines.index(f"{label[1]}:")) < end:
            body = lines[begin + 1 : end + 1]
            if any("MMA." in each for each in body):
                found.append(body)
    (loop,) = found
    products = sum("HMMA" in each for each in loop)
    assert products == config.rows // 16 * config.depth // 16 * block // 8, "the compiler's loop is not of one tile"
    return len(loop) * 32 / (config.rows * config.depth)


def main() -> None:
    for weights, (bits, group) in FORMATS.items():
        for rows in (16, 64):
            config = rule(Shape("row", rows, OUTPUTS, INPUTS, False, bits=bits, group=group))
            assert isinstance(config, SmallGemm)
            block = block_of(bits, group, rows, config)
            found = -(-rows // block) * for_a_weight(compiled(bits, group, rows, config), block, config)
            line = {"kernel": "small_gemm", "weights": weights, "group": group, "rows": rows, "target": "sm_90"}
            line |= {"instructions_for_a_weight": round(found, 2)}
            print(json.dumps({**line, **machine(torch.device("cpu"))}), flush=True)


if __name__ == "__main__":
    main()
