"""Throughput of an engine with many requests: ours, or vLLM where it is installed, on a GPU if there is one.

python -m experiments.throughput WIRING|vllm [SIZE [LOAD ...]] >> results/throughput_h200.jsonl

The same requests for every engine: 256 and 1,024 of them, prompts of 128 to 1,024 random tokens, outputs of 64 to 512
tokens, temperature 0.8 and top-p 0.95, all at once and at a Poisson rate; weights are random. With LONG in place of a
load: short requests, several at a time, alone for a while, and then for as long as another one with a prompt of
100,000 tokens is read (20,000 on a CPU). With GENERATE: milliseconds per token of equally long requests, as
experiments/generate_gpu.py measures those of `LLM.generate`. On a GPU our lines also say how long the passes took: to
be launched, and on the GPU.
"""

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from experiments.generate_gpu import LONG as LONG_ANSWER
from experiments.generate_gpu import PROMPT, REPEATS, fill, sparse_checkpoint
from experiments.generate_gpu import SHORT as SHORT_ANSWER
from experiments.passes_gpu import Timer
from ladder import SamplingParams
from ladder.bench.machine import machine
from ladder.engine.async_llm import AsyncLLM

LOADS = {"256": (256, None), "256@12": (256, 12.0), "1024": (1024, None), "1024@24": (1024, 24.0)}
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
LONG, SHORT = (100_000 if DEVICE != "cpu" else 20_000), 64  # tokens of the long prompt; of short outputs
SEQUENCES, AT_ONCE = (256, 32) if DEVICE != "cpu" else (16, 8)  # at most; short ones beside a long one
WARM_UP = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)  # requests at once, before anything is measured
MEMORY = 60.0 if DEVICE != "cpu" else 2.0  # GB of our KV cache
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True}


class Engine(Protocol):
    name: str

    def stream(self, number: int, prompt: list[int], tokens: int) -> AsyncIterator[int]:
        """How many tokens have come, whenever some have."""
        ...


class Ours:
    def __init__(self, llm: AsyncLLM, wiring: str) -> None:
        self._llm, self.name = llm, wiring

    async def stream(self, number: int, prompt: list[int], tokens: int) -> AsyncIterator[int]:
        async for chunk in self._llm.stream(prompt, SamplingParams(max_new_tokens=tokens, seed=number, **SAMPLED)):
            yield len(chunk.token_ids)


class Theirs:
    name = "vllm"

    def __init__(self, directory: Path, context: int) -> None:
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # torch may have started CUDA in this process
        from vllm import SamplingParams as Params  # type: ignore[import-not-found]
        from vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]
        from vllm.usage.usage_lib import UsageContext  # type: ignore[import-not-found]
        from vllm.v1.engine.async_llm import AsyncLLM as Async  # type: ignore[import-not-found]

        self._params = lambda tokens, how=SAMPLED, every=True: Params(
            max_tokens=tokens,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if every else RequestOutputKind.FINAL_ONLY,
            **how,
        )
        self._engine = Async.from_engine_args(
            AsyncEngineArgs(
                model=str(directory), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16",
                max_model_len=context, max_num_seqs=SEQUENCES, gpu_memory_utilization=0.6, seed=0,
                enable_prefix_caching=False, attention_config={"backend": "FLASH_ATTN"},
                enable_flashinfer_autotune=False,
            ),
            usage_context=UsageContext.OPENAI_API_SERVER,  # its defaults for serving
        )  # fmt: skip

    async def stream(self, number: int, prompt: list[int], tokens: int) -> AsyncIterator[int]:
        given = {"prompt_token_ids": prompt}
        async for output in self._engine.generate(given, self._params(tokens), str(time.perf_counter_ns())):
            yield len(output.outputs[0].token_ids)

    async def whole(self, prompt: list[int], tokens: int, how: dict[str, Any]) -> int:
        """The number of tokens of an answer that comes at once."""
        given, count = {"prompt_token_ids": prompt}, 0
        async for output in self._engine.generate(given, self._params(tokens, how, False), str(time.perf_counter_ns())):
            count = len(output.outputs[0].token_ids)
        return count


@dataclass
class Timed:
    """When a request came and when its tokens did."""

    came: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def first(self) -> float:
        return self.times[0] - self.came

    @property
    def per_token(self) -> float:
        return (self.times[-1] - self.times[0]) / (self.tokens - 1)


async def ask(engine: Engine, number: int, prompt: list[int], tokens: int) -> Timed:
    timed = Timed(time.perf_counter())
    async for count in engine.stream(number, prompt, tokens):
        timed.tokens += count
        timed.times.append(time.perf_counter())
    assert timed.tokens == tokens, (timed.tokens, tokens)
    return timed


def percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return {f"{name}_p{percent}_ms": round(cuts[percent - 1] * 1e3, 3) for percent in (50, 90, 99)}


def request(rng: random.Random) -> tuple[list[int], int]:
    return [rng.randrange(10, 300) for _ in range(rng.randint(128, 1024))], rng.randint(64, 512)


async def load(engine: Engine, count: int, rate: float | None) -> dict[str, Any]:
    rng = random.Random(1)
    requests = [request(rng) for _ in range(count)]
    begin = time.perf_counter()
    asked = []
    at = 0.0
    for number, (prompt, tokens) in enumerate(requests):
        if rate is not None:
            at += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        asked.append(asyncio.create_task(ask(engine, number, prompt, tokens)))
    timed = await asyncio.gather(*asked)
    seconds = time.perf_counter() - begin
    found: dict[str, Any] = {"requests": count, "rate": rate, "seconds": round(seconds, 2)}
    found["prompt_tokens"] = sum(len(prompt) for prompt, _ in requests)
    found["output_tokens"] = sum(each.tokens for each in timed)
    found["output_tokens_per_second"] = round(found["output_tokens"] / seconds, 1)
    found |= percentiles("ttft", [each.first for each in timed])
    found |= percentiles("tpot", [each.per_token for each in timed])
    gaps = [after - before for each in timed for before, after in zip(each.times, each.times[1:], strict=False)]
    return found | percentiles("itl", gaps)


async def beside_a_long_prompt(engine: Engine) -> dict[str, Any]:
    rng = random.Random(2)

    async def short(until: asyncio.Event, found: list[Timed]) -> None:
        while not until.is_set():
            prompt, _ = request(rng)
            found.append(await ask(engine, len(found), prompt[:128], SHORT))

    async def shorts(seconds: float | None) -> tuple[list[Timed], Timed | None]:
        until, found = asyncio.Event(), list[Timed]()
        tasks = [asyncio.create_task(short(until, found)) for _ in range(AT_ONCE)]
        await asyncio.sleep(seconds or 1.0)
        long = None
        if seconds is None:
            long = await ask(engine, 0, [rng.randrange(10, 300) for _ in range(LONG)], SHORT)
        until.set()
        await asyncio.gather(*tasks)
        return found, long

    alone, _ = await shorts(8.0)
    beside, long = await shorts(None)
    assert long is not None
    inside = [each for each in beside if long.came <= each.came and each.times[-1] <= long.times[0]]
    line: dict[str, Any] = {"long_prompt": LONG, "short_requests": len(inside), "at_once": AT_ONCE}
    line["long_ttft_s"] = round(long.first, 2)
    for name, these in (("alone", alone), ("beside", inside)):
        line |= percentiles(f"tpot_{name}", [each.per_token for each in these])
    medians = [statistics.median(each.per_token for each in these) for these in (inside, alone)]
    return line | {"tpot_ratio": round(medians[0] / medians[1], 4)}


def seconds_of_passes(timer: Timer) -> dict[str, float]:
    """Milliseconds of the passes since the last call: of decode steps, and of those with prompts."""
    found: dict[str, float] = {}
    passes = timer.take()
    for name, these in (
        ("decode", [p for p in passes if not p[0].tokens]),
        ("prompt", [p for p in passes if p[0].tokens]),
    ):
        found[f"{name}_passes"] = len(these)
        for kind, ms in (("launch", [p[1] for p in these]), ("gpu", [p[2] for p in these])):
            found[f"{name}_{kind}_p50_ms"] = round(statistics.median(ms), 3) if ms else 0.0
            found[f"{name}_{kind}_most_ms"] = round(max(ms, default=0.0), 3)
    return found


async def generate(engine: Theirs) -> AsyncIterator[dict[str, Any]]:
    """As `ms_per_token` of experiments/generate_gpu.py."""
    for batch in (1, 4, 16, 64, 128):
        prompts = [[(7 * number + at) % 1000 + 1 for at in range(PROMPT)] for number in range(batch)]
        line: dict[str, Any] = {"batch": batch, "prompt": PROMPT, "repeats": REPEATS}
        for kind, how in (("greedy", {"temperature": 0.0, "ignore_eos": True}), ("sampled", {**SAMPLED, "seed": 1})):

            async def seconds(tokens: int, how: dict[str, Any] = how, prompts: list[list[int]] = prompts) -> float:
                begin = time.perf_counter()
                counts = await asyncio.gather(*(engine.whole(prompt, tokens, how) for prompt in prompts))
                assert all(count == tokens for count in counts)
                return time.perf_counter() - begin

            await seconds(LONG_ANSWER)
            times = [await seconds(LONG_ANSWER) - await seconds(SHORT_ANSWER) for _ in range(REPEATS)]
            line[f"{kind}_ms_per_token"] = round(statistics.median(times) / (LONG_ANSWER - SHORT_ANSWER) * 1e3, 4)
        yield line


async def measure(engine: Engine, size: str, loads: list[str], timer: Timer | None = None) -> None:
    for count in WARM_UP[: WARM_UP.index(SEQUENCES) + 1]:
        await asyncio.gather(
            *(ask(engine, number, [number + 1] * (600 if DEVICE != "cpu" else 20), 24) for number in range(count))
        )
    common = {"engine": engine.name, "size": size, "max_num_seqs": SEQUENCES}
    stamp = machine(torch.device(DEVICE))
    for name in loads:
        if name == "GENERATE":
            assert isinstance(engine, Theirs)
            async for line in generate(engine):
                print(json.dumps({"measure": "generate", **common, **line, **stamp}), flush=True)
            continue
        if timer is not None:
            timer.take()
        found = await (beside_a_long_prompt(engine) if name == "LONG" else load(engine, *LOADS[name]))
        found |= {} if timer is None else seconds_of_passes(timer)
        print(json.dumps({"measure": "throughput", **common, **found, **stamp}), flush=True)


async def main(kind: str, size: str, loads: list[str]) -> None:
    context = LONG + 1024 if "LONG" in loads else 4096
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        sparse_checkpoint(size, directory)
        config = directory / "config.json"
        config.write_text(
            json.dumps({**json.loads(config.read_text(encoding="utf-8")), "max_position_embeddings": context}),
            encoding="utf-8",
        )
        if kind == "vllm":
            await measure(Theirs(directory, context), size, loads)
            return
        async with AsyncLLM(
            directory, wiring=kind, device=DEVICE, max_num_seqs=SEQUENCES, memory=MEMORY, warm_up=True
        ) as llm:  # warmed up, as `ladder serve` does it
            runner = llm._supervisor._executor._runner  # type: ignore[union-attr]
            fill(runner._passes._model)
            await measure(Ours(llm, kind), size, loads, Timer(runner) if DEVICE != "cpu" else None)


if __name__ == "__main__":
    kind, *given = sys.argv[1:] or ["ladder"]
    asyncio.run(main(kind, given[0] if given else "llama-3-8b", given[1:] or list(LOADS)))
    sys.stdout.flush()
    os._exit(0)  # vLLM's processes end with this one
