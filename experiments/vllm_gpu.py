"""Wired models inside vLLM on one GPU, beside our engine.

python -m experiments.vllm_gpu tokens                       # the embedded model: vLLM's tokens are the native engine's
python -m experiments.vllm_gpu speed [SIZE [BATCH ...]]     # milliseconds per token: both engines, standard and ladder
python -m experiments.vllm_gpu quantized                    # fp8 and int4 by vLLM's kernels and by ours: agreement

JSON lines. Each engine runs in a process of its own, with all of vLLM in it (no engine core beside it), and is measured
alone; the plugin is registered by hand, so this package need not be installed. Weights of `speed` are random. Without a
GPU `tokens` and `quantized` run on vLLM for CPUs.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.children import measured, ready, report
from experiments.generate_gpu import fill, ms_per_token, sparse_checkpoint
from ladder import LLM, SamplingParams
from ladder.bench.machine import machine
from ladder.checkpoint import Directory, Random, load, save
from ladder.config import ModelConfig
from ladder.engine.options import EMBEDDED
from ladder.model import Decoder
from ladder.quantize.options import QuantizeOptions
from ladder.quantize.write import quantize

PROMPT, SHORT, LONG, REPEATS = 512, 16, 144, 3
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
AT_ONCE, LARGE_AT_ONCE = (5, 3) if DEVICE != "cpu" else (1, 1)  # engines that start together
CACHE = 8.0  # GB for keys and values: of every engine
SWITCHES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
SWITCHES |= {"VLLM_HOST_IP": "127.0.0.1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}  # which would be compiled first
SWITCHES |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
SIZES: dict[str, Any] = {"hidden": 1024, "layers": 8, "heads": 8, "kv_heads": 2, "ffn": 2816, "vocab": 32000}
SIZES |= {} if DEVICE != "cpu" else {"hidden": 256, "heads": 4, "ffn": 512, "vocab": 1000}
TOKENS = 64 if DEVICE != "cpu" else 16  # that are compared
MODULE = "experiments.vllm_gpu"
Ids = list[list[int]]


def vllm(directory: Path, **more: Any) -> Any:
    """vLLM on a directory, with the plugin. What is not said is vLLM's own choice."""
    from vllm import LLM as Vllm

    from ladder.vllm.plugin import register

    register()
    given = {"model": str(directory), "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0}
    given |= {"enable_prefix_caching": False, "max_model_len": 1024}
    if DEVICE != "cpu":
        given |= {"enable_flashinfer_autotune": False, "attention_config": {"backend": "FLASH_ATTN"}}
        given |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": int(CACHE * 1e9)}
    return Vllm(**{**given, **more})


def continued(llm: Any, prompts: Ids, tokens: int) -> Ids:
    """Greedy continuations."""
    from vllm import SamplingParams as Params

    params = Params(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def graphs(llm: Any) -> dict[str, str]:
    config = llm.llm_engine.vllm_config.compilation_config
    return {"cudagraph_mode": str(config.cudagraph_mode), "compile_mode": str(config.mode)}


def vllm_ms_per_token(llm: Any, batch: int) -> float:
    """As `experiments.generate_gpu` measures ours."""
    prompts = [[(7 * number + at) % 1000 + 1 for at in range(PROMPT)] for number in range(batch)]

    def seconds(tokens: int) -> float:
        begin = time.perf_counter()
        assert all(len(ids) == tokens for ids in continued(llm, prompts, tokens))
        return time.perf_counter() - begin

    seconds(LONG)
    found = [(seconds(LONG) - seconds(SHORT)) / (LONG - SHORT) * 1e3 for _ in range(REPEATS)]
    return statistics.median(found)


# --- tokens ---------------------------------------------------------------------------------------------------------


def prompts_of(vocab: int, count: int = 32) -> Ids:
    generator = torch.Generator().manual_seed(0)
    lengths = [5 + 9 * number for number in range(count)]
    return [torch.randint(1, vocab, (length,), generator=generator).tolist() for length in lengths]


def agreement(directory: Path, prompts: Ids, answers: Ids) -> dict[str, float]:
    """How often our decoder in float32 would say the same token behind the same text; and how far from the likeliest
    one, in nats, those are that it would not.
    """
    source = Directory(directory)
    model = load(Decoder(source.config, device=DEVICE, dtype=torch.float32), source)
    same, worst = 0, 0.0
    with torch.inference_mode():
        for prompt, ids in zip(prompts, answers, strict=True):
            table = model(torch.tensor([[*prompt, *ids]], device=DEVICE))[0, len(prompt) - 1 : -1].float()
            best, chosen = table.max(-1), table.gather(-1, torch.tensor(ids, device=DEVICE)[:, None])[:, 0]
            same += sum(one == other for one, other in zip(best.indices.tolist(), ids, strict=True))
            worst = max(worst, float((best.values - chosen).max()))
    return {"agreement": round(same / sum(map(len, answers)), 4), "worst_gap_nats": round(worst, 4)}


def child_tokens(directory: str, dtype: str, lanes: str) -> dict[str, Any]:
    attention = {"attention_config": {"backend": "TRITON_ATTN"}}  # FlashAttention has no float32
    own: dict[str, Any] = attention if DEVICE != "cpu" and dtype == "float32" else {}
    own["additional_config"] = {"ladder": {"lanes": int(lanes)}}
    llm = vllm(Path(directory), dtype=dtype, max_num_seqs=32, **own)
    ready()
    answers = continued(llm, prompts_of(ModelConfig.from_directory(Path(directory)).vocab), TOKENS)
    return {"answers": answers, **graphs(llm)}


def native(directory: Path, dtype: str, prompts: Ids) -> Ids:
    """Our engine's greedy continuations."""
    with LLM(directory, dtype=dtype, device=DEVICE, max_num_seqs=32, memory=4.0) as llm:
        results = llm.generate(prompts, SamplingParams(max_new_tokens=TOKENS, ignore_eos=True))
        return [list(result.token_ids) for result in results]


def compared(directory: Path, prompts: Ids, theirs: Ids, ours: Ids) -> dict[str, Any]:
    """Two engines' continuations: how many are equal; and both beside our decoder in float32."""
    found: dict[str, Any] = {"prompts": len(prompts), "tokens": TOKENS}
    found["equal"] = sum(one == other for one, other in zip(theirs, ours, strict=True))
    for name, answers in (("vllm", theirs), ("native", ours)):
        found |= {f"{name}_{key}": value for key, value in agreement(directory, prompts, answers).items()}
    return found


def random_model(directory: Path, wiring: str, dtype: str = "bfloat16") -> Path:
    config = ModelConfig(**SIZES, dtype=dtype).rewired(wiring)
    save(load(Decoder(config), Random(seed=5, deviation=0.05)), directory)
    return directory


def tokens() -> None:
    with tempfile.TemporaryDirectory() as folder:
        wirings = [
            "standard",
            "ladder",
            "ladder-1-2",
            "parallel-1",
            "standard:4 ladder:4",
        ]  # the first: vLLM's own model
        random = [random_model(Path(folder) / str(at), wiring) for at, wiring in enumerate(wirings)]
        arms = [(directory, "float32", 1) for directory in random]
        if DEVICE != "cpu":  # where vLLM has no kernel for heads of 40 numbers, nor a second lane
            arms += [(EMBEDDED, "float32", 1), (EMBEDDED, "bfloat16", 1), (EMBEDDED, "bfloat16", 2)]
            arms += [(random[1], "float32", 2), (random[1], "bfloat16", 1), (random[0], "bfloat16", 1)]
        given = [["tokens", str(directory), dtype, str(lanes)] for directory, dtype, lanes in arms]
        for (directory, dtype, lanes), found in zip(arms, measured(MODULE, given, AT_ONCE, SWITCHES), strict=True):
            config = ModelConfig.from_directory(directory)
            prompts = prompts_of(config.vocab)
            line = {"measure": "vllm_tokens", "model": "embedded" if directory == EMBEDDED else "random"}
            line |= {"wiring": str(config.wiring), "dtype": dtype, "lanes": lanes}
            line |= compared(directory, prompts, found.pop("answers"), native(directory, dtype, prompts))
            say({**line, **found})


# --- speed ----------------------------------------------------------------------------------------------------------

ARMS: dict[str, dict[str, Any]] = {
    "vllm standard": {},  # vLLM's own model and choices: torch.compile, full and piecewise graphs
    "vllm standard, no compiler": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "vllm ladder": {"wiring": "ladder", "additional_config": {"ladder": {"lanes": 1}}},
    "vllm ladder, two lanes": {"wiring": "ladder", "additional_config": {"ladder": {"lanes": 2}}},
    "native standard": {"native": "standard"},
    "native ladder": {"native": "ladder"},
}


def child_speed(arm: str, size: str, batches: Sequence[int]) -> dict[str, Any]:
    options = dict(ARMS[arm])
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        if (native := options.pop("native", None)) is not None:
            sparse_checkpoint(size, directory)
            with LLM(directory, wiring=native, device=DEVICE, max_num_seqs=max(batches), memory=CACHE) as llm:
                fill(llm._executor._runner._passes._model)  # type: ignore[attr-defined]
                ready()
                return {"ms": {batch: ms_per_token(llm, batch, "greedy") for batch in batches}}
        directory.mkdir()
        config = ModelConfig.named(size).rewired(options.pop("wiring", "standard"))
        (directory / "config.json").write_text(json.dumps(replace(config, dtype="bfloat16").to_hf()))
        llm = vllm(directory, load_format="dummy", max_num_seqs=max(batches), **options)
        ready()
        return {"ms": {batch: vllm_ms_per_token(llm, batch) for batch in batches}, **graphs(llm)}


def speed(size: str, batches: Sequence[int]) -> None:
    arms = [["speed", arm, size, *map(str, batches)] for arm in ARMS]
    for arm, found in zip(ARMS, measured(MODULE, arms, LARGE_AT_ONCE, SWITCHES), strict=True):
        for batch, ms in found.pop("ms").items():
            line = {"measure": "vllm_speed", "size": size, "tp": 1, "arm": arm, "batch": int(batch), "prompt": PROMPT}
            say({**line, "repeats": REPEATS, "ms_per_token": round(ms, 4), **found})


# --- quantized ------------------------------------------------------------------------------------------------------


def quantized() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain = random_model(Path(folder) / "plain", "ladder")
        prompts = prompts_of(SIZES["vocab"])
        made = {name: Path(folder) / name for name in ("fp8", "int4")}
        for name, directory in made.items():
            quantize(QuantizeOptions(model=plain, out=directory, format=name), lambda *_: None)
        arms = [["tokens", str(directory), "bfloat16", "1"] for directory in made.values()]
        for (name, directory), found in zip(made.items(), measured(MODULE, arms, AT_ONCE, SWITCHES), strict=True):
            line = {"measure": "vllm_quantized", "weights": name, "wiring": "ladder"}
            line |= compared(directory, prompts, found.pop("answers"), native(directory, "bfloat16", prompts))
            say({**line, **found})


# --- processes ------------------------------------------------------------------------------------------------------


def say(line: dict[str, Any]) -> None:
    print(json.dumps({**line, **machine(torch.device(DEVICE))}), flush=True)


def main(given: Sequence[str]) -> None:
    if given[:1] == ["--child"]:
        if given[1] == "tokens":
            report(child_tokens(*given[2:]))
        report(child_speed(given[2], given[3], [int(batch) for batch in given[4:]]))
    elif given[:1] == ["tokens"]:
        tokens()
    elif given[:1] == ["speed"]:
        speed(given[1] if given[1:] else "llama-3-8b", [int(batch) for batch in given[2:]] or [1, 16, 64])
    elif given[:1] == ["quantized"]:
        quantized()
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
