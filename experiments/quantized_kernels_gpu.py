"""One row, a few and many rows times a weight, in every format, on one GPU.

python -m experiments.quantized_kernels_gpu [SHAPE ...] > results/quantized_kernels_h200.jsonl
python -m experiments.quantized_kernels_gpu prefill [SHAPE ...]    # many rows alone

A JSON line for every shape, format and number of rows: how far the result is from float64 (relative, in norm, the
output full of NaN before), and microseconds of a launch among many that follow each other in a CUDA graph, over copies
of a weight that no cache holds. One row is normalized by the same kernel, a few have no norm. `fixed` is one row times
a weight of 256 rows: what a kernel costs beside its streaming. A short table ends it. Everything is compiled first, by
many processes.

Lines of the measure `prefill` are of many rows times the weights of 8B: milliseconds, in the same way, of the library's
product in bf16, of one that dequantizes first, and of fp8 times fp8 with the rows' own rounding (`rows_ms` of that);
`error` is of the last rows, also against the product of the rows as they are.
"""

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ladder.bench.machine import machine, milliseconds
from ladder.config import ModelConfig
from ladder.kernels.activation import activate_rows
from ladder.kernels.gemv import gemv
from ladder.kernels.quantized.dequantize import dequantize
from ladder.kernels.quantized.fp8 import GROUP, fp8_product, quantize_rows
from ladder.kernels.small_gemm import small_gemm
from ladder.kernels.stream import Source
from ladder.kernels.table import Gemv, Shape, SmallGemm, Table
from ladder.layers.activation import activate
from ladder.layers.norm import Norm
from ladder.layers.weight import Packed

ROOM = 320 << 20  # bytes of the copies
FEW = 256  # rows of the weight that shows what is fixed
SHAPES = {  # outputs, inputs, gate and up, behind a norm
    "8b-qkv": (6144, 4096, False, True),
    "8b-o": (4096, 4096, False, False),
    "8b-gate_up": (14336, 4096, True, True),
    "8b-down": (4096, 14336, False, False),
    "70b-qkv": (1280, 8192, False, True),
    "70b-o": (8192, 1024, False, False),
    "70b-gate_up": (3584, 8192, True, True),
    "70b-down": (8192, 3584, False, False),
}
ROWS = (1, 4, 16, 64)
PROMPTS = (512, 2048, 8192)  # rows
PROMPT_SHAPES = {name: (n * (1 + pair), k) for name, (n, k, pair, _) in SHAPES.items() if name.startswith("8b")}
COPIES = 4  # of a prompt's weight: together more than any cache holds
COMPARED = 128  # rows that are compared with float64


@dataclass(frozen=True)
class Case:
    name: str
    kind: str  # bf16, fp8 or int4
    rows: int  # of activations

    def table_config(self) -> Gemv | SmallGemm | None:
        outputs, inputs, pair, normed = SHAPES[self.name]
        bits, group = {"bf16": (0, 0), "fp8": (8, 0), "int4": (4, 128)}[self.kind]
        kernel = ("gate_up" if pair else "qkv") if normed else "row"
        shape = Shape(kernel, self.rows, outputs, inputs, pair, bits=bits, group=group)
        config = Table.of(torch.cuda.get_device_name())[shape]
        assert config is None or isinstance(config, Gemv | SmallGemm)
        return config


class Run:
    """A case with its tensors: so many copies of the weight."""

    def __init__(self, case: Case, rows: int | None = None, copies: int | None = None) -> None:
        outputs, inputs, self.pair, normed = SHAPES[case.name]
        self.case, self.outputs = case, rows or outputs
        torch.manual_seed(0)
        all_rows = self.outputs * (1 + self.pair)
        size = all_rows * inputs * {"bf16": 16, "fp8": 8, "int4": 4}[case.kind] // 8
        self.size = size
        self.weights: list[Tensor | Packed] = []
        for _ in range(copies or max(2, -(-ROOM // size))):
            self._add(all_rows, inputs)
        count, self.config = case.rows, case.table_config()
        self.x = torch.randn(count, inputs, dtype=torch.bfloat16, device="cuda")
        self.norm = None
        if normed and count == 1:
            config = ModelConfig(16, 1, 2, 2, 16, 16)
            self.norm = Norm("norm", inputs, config, torch.bfloat16).cuda()
            self.norm.weight.data = torch.rand(inputs, device="cuda").to(torch.bfloat16) + 0.5
        self.plus = None if normed else torch.randn(count, self.outputs, dtype=torch.bfloat16, device="cuda")
        splits = self.config.splits if isinstance(self.config, SmallGemm) else 1
        kind = torch.float32 if splits > 1 else torch.bfloat16
        self.out = torch.full((splits, count, self.outputs), float("nan"), dtype=kind, device="cuda")

    def _add(self, rows: int, inputs: int) -> None:
        width = inputs**0.5
        if self.case.kind == "int4":
            codes = torch.randint(0, 256, (rows, inputs // 2), dtype=torch.uint8, device="cuda")
            scales = ((torch.rand(rows, inputs // 128, device="cuda") + 0.5) / 4.6 / width).to(torch.bfloat16)
            self.weights.append(Packed(codes, scales, None, 4, 128))
            return
        dense = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
        if self.case.kind == "bf16":
            self.weights.append(dense / width)
        else:
            scales = (torch.rand(rows, 1, device="cuda") + 0.5) / 100 / width
            codes = (dense * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
            self.weights.append(Packed(codes, scales, None, 8, inputs))

    def launch(self, turn: int) -> None:
        at = turn % len(self.weights)
        weight, activation = self.weights[at], "silu" if self.pair else None
        end = (activation, self.pair, self.plus, 4, 1.0)
        if self.config is None:
            assert isinstance(weight, Tensor)
            y = F.linear(self.x, weight)
            y = y if activation is None else activate_rows(y, activation, True)
            self.out[0] = y if self.plus is None else y + self.plus / 4
        elif isinstance(self.config, SmallGemm):
            small_gemm(self.x, weight, None, *end, self.out, self.config, True)
        else:
            gemv(Source(self.x), self.norm, weight, None, *end, self.out[0], self.config, True)

    def expected(self) -> Tensor:
        weight = self.weights[0]
        if isinstance(weight, Tensor):
            dense = weight.double()
        elif weight.bits == 8:
            dense = weight.codes.double() * weight.scales.double()
        else:
            pairs = weight.codes.unflatten(1, (-1, 16))
            codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1).double() - 8
            dense = codes * weight.scales.double().repeat_interleave(128, dim=1)
        x = self.x.double()
        if self.norm is not None:
            x = x * torch.rsqrt(x.square().mean() + self.norm.eps) * self.norm.weight.double()
        y = x @ dense.t()
        y = activate(y, "silu", True) if self.pair else y
        return y if self.plus is None else y + self.plus.double() / 4

    def error(self) -> float:
        worst = 0.0
        for _ in range(2):
            self.out.fill_(float("nan"))
            self.launch(0)
            expected = self.expected()
            worst = max(worst, float((self.out.double().sum(0) - expected).norm() / expected.norm()))
            if worst != worst:
                return float("nan")
        return worst

    def microseconds(self) -> float:
        return launch_ms(self.launch, max(32, len(self.weights))) * 1e3


def launch_ms(launch: Callable[[int], object], count: int) -> float:
    """Of one of `count` launches that follow each other in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for turn in range(count):
                launch(turn)
        return statistics.median(milliseconds(graph.replay, 15, 3)) / count


class Prompt:
    """Copies of a weight, dense or in fp8 with scales of outputs or of blocks, and rows to multiply by it."""

    def __init__(self, outputs: int, inputs: int, kind: str, device: str = "cuda") -> None:
        torch.manual_seed(0)
        self.kind, self.outputs, self.inputs, self.device = kind, outputs, inputs, device
        self.weights: list[Tensor | Packed] = []
        for _ in range(COPIES):
            dense = torch.randn(outputs, inputs, device=device) / inputs**0.5
            if kind == "bf16":
                self.weights.append(dense.to(torch.bfloat16))
                continue
            rows, group = (GROUP, GROUP) if "block" in kind else (1, inputs)
            scales = torch.rand(-(-outputs // rows), -(-inputs // group), device=device) + 0.5
            scales = (scales / 100 / inputs**0.5).repeat_interleave(rows, dim=0)[:outputs].contiguous()
            codes = dense / scales.repeat_interleave(group, dim=1)[:, :inputs]
            codes = codes.clamp_(-448, 448).to(torch.float8_e4m3fn)
            self.weights.append(Packed(codes, scales, None, 8, group, True, rows))

    def rows(self, count: int) -> None:
        self.x = torch.randn(count, self.inputs, device=self.device).to(torch.bfloat16)
        self.out = torch.full((count, self.outputs), float("nan"), dtype=torch.bfloat16, device=self.device)

    def launch(self, turn: int) -> Tensor:
        weight = self.weights[turn % len(self.weights)]
        if isinstance(weight, Tensor):
            return F.linear(self.x, weight)
        if self.kind.startswith("dequantized"):
            return F.linear(self.x, dequantize(weight, torch.bfloat16))
        return fp8_product(self.x, weight, self.out)

    def quantize(self, turn: int) -> object:
        return quantize_rows(self.x, GROUP if "block" in self.kind else 0)

    def error(self) -> float:
        """Of the last rows, relative, in norm."""
        weight = self.weights[0]
        dense = weight.double() if isinstance(weight, Tensor) else dequantize(weight, torch.float64)
        expected = self.x[-COMPARED:].double() @ dense.t()
        found = self.launch(0)
        if not bool(found.isfinite().all()):
            return float("nan")
        return float((found[-COMPARED:].double() - expected).norm() / expected.norm())


def prefill(only: list[str]) -> None:
    """A line for every shape, way and number of rows, and a table of them."""
    begun, table, stamp = time.monotonic(), list[str](), machine(torch.device("cuda", 0))
    for name in only:
        for kind in ("bf16", "dequantized", "dequantized-block", "fp8", "fp8-block"):
            run = Prompt(*PROMPT_SHAPES[name], kind)
            for rows in PROMPTS:
                line: dict[str, Any] = {"shape": name, "way": kind, "rows": rows}
                try:
                    run.rows(rows)
                    error, ms = run.error(), launch_ms(run.launch, COPIES)
                except Exception as failed:  # of any kind: the other cases go on
                    line["wrong"] = f"{type(failed).__name__}: {failed}"[:300]
                else:
                    line |= {"error": float(f"{error:.1e}"), "ms": round(ms, 4)}
                    line["tflop_s"] = round(2 * rows * run.outputs * run.inputs / ms / 1e9, 1)
                    if kind.startswith("fp8"):
                        line["rows_ms"] = round(launch_ms(run.quantize, COPIES), 4)
                print(json.dumps({"measure": "prefill", **line, **stamp}), flush=True)
                keys = ("shape", "way", "rows", "ms", "tflop_s", "rows_ms", "error", "wrong")
                table.append("  ".join(f"{line.get(key, '')!s:>17}" for key in keys))
    print(f"many rows: {time.monotonic() - begun:.0f} s", *table, sep="\n", file=sys.stderr)


def cases(only: list[str]) -> list[Case]:
    found = []
    for name in only or SHAPES:
        found += [Case(name, kind, rows) for rows in ROWS for kind in ("bf16", "fp8", "int4")]
    return found


def compile_one(case: Case) -> str:
    """What went wrong, if anything."""
    try:
        with torch.inference_mode():
            Run(case, copies=1).launch(0)
            if case.rows == 1:
                Run(case, FEW, 1).launch(0)
            torch.cuda.synchronize()
    except Exception as error:  # of any kind: the other cases go on
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def few_rows(only: list[str]) -> None:
    begun, every = time.monotonic(), cases(only)
    with ProcessPoolExecutor(14, multiprocessing.get_context("spawn")) as pool:
        wrong = dict(zip(every, pool.map(compile_one, every), strict=True))
    compiled = time.monotonic() - begun
    table, stamp = list[str](), machine(torch.device("cuda", 0))
    for case in every:
        line: dict[str, Any] = {"shape": case.name, "weights": case.kind, "rows": case.rows}
        if wrong[case]:
            line["wrong"] = wrong[case]
        else:
            run = Run(case)
            us = run.microseconds()
            line |= {"error": float(f"{run.error():.1e}"), "us": round(us, 2)}
            line |= {"tb_s": round(run.size / us / 1e6, 2), "at_4.6": round(run.size / 4.6e6, 2)}
            if case.rows == 1:
                line["fixed_us"] = round(Run(case, FEW, 64).microseconds(), 2)
        print(json.dumps({"measure": "gemv" if case.rows == 1 else "small_gemm", **line, **stamp}), flush=True)
        keys = ("shape", "weights", "rows", "us", "at_4.6", "tb_s", "fixed_us", "error", "wrong")
        table.append("  ".join(f"{line.get(key, '')!s:>12}" for key in keys))
    print(f"compiled in {compiled:.0f} s, all in {time.monotonic() - begun:.0f} s", *table, sep="\n", file=sys.stderr)


def main(given: list[str]) -> None:
    names = [name for name in given if name != "prefill"]
    with torch.inference_mode():
        if "prefill" not in given:
            few_rows(names)
        prefill([name for name in names or SHAPES if name in PROMPT_SHAPES])


if __name__ == "__main__":
    main(sys.argv[1:])
