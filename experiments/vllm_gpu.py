"""Wired models inside vLLM on one GPU, beside our engine.

python -m experiments.vllm_gpu tokens                       # the embedded model: vLLM's tokens are the native engine's
python -m experiments.vllm_gpu speed [SIZE [BATCH ...]]     # milliseconds per token: both engines, standard and ladder
python -m experiments.vllm_gpu quantized                    # fp8 and int4 by vLLM's kernels and by ours: agreement

JSON lines. Each engine runs in a process of its own, one after the other, with all of vLLM in it (no engine core beside
it); the plugin is registered by hand, so this package need not be installed. Weights of `speed` are random.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

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
SWITCHES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
SWITCHES |= {"VLLM_HOST_IP": "127.0.0.1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}  # which would be compiled first
SIZES: dict[str, Any] = {"hidden": 1024, "layers": 8, "heads": 8, "kv_heads": 2, "ffn": 2816, "vocab": 32000}
TOKENS = 64  # that are compared
Ids = list[list[int]]


def vllm(directory: Path, **more: Any) -> Any:
    """vLLM on a directory, with the plugin. What is not said is vLLM's own choice."""
    from vllm import LLM as Vllm

    from ladder.vllm.plugin import register

    register()
    given = {"model": str(directory), "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0}
    given |= {"enable_prefix_caching": False, "max_model_len": 1024, "gpu_memory_utilization": 0.6}
    given |= {"enable_flashinfer_autotune": False, "attention_config": {"backend": "FLASH_ATTN"}}
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
    model = load(Decoder(source.config, device="cuda", dtype=torch.float32), source)
    same, worst = 0, 0.0
    with torch.inference_mode():
        for prompt, ids in zip(prompts, answers, strict=True):
            table = model(torch.tensor([[*prompt, *ids]], device="cuda"))[0, len(prompt) - 1 : -1].float()
            best, chosen = table.max(-1), table.gather(-1, torch.tensor(ids, device="cuda")[:, None])[:, 0]
            same += sum(one == other for one, other in zip(best.indices.tolist(), ids, strict=True))
            worst = max(worst, float((best.values - chosen).max()))
    return {"agreement": round(same / sum(map(len, answers)), 4), "worst_gap_nats": round(worst, 4)}


def child_tokens(directory: str, dtype: str) -> dict[str, Any]:
    backend = {"attention_config": {"backend": "TRITON_ATTN"}} if dtype == "float32" else {}
    llm = vllm(Path(directory), dtype=dtype, max_num_seqs=32, **backend)
    answers = continued(llm, prompts_of(ModelConfig.from_directory(Path(directory)).vocab), TOKENS)
    return {"answers": answers, **graphs(llm)}


def tokens() -> None:
    config = ModelConfig.from_directory(EMBEDDED)
    prompts = prompts_of(config.vocab)
    for dtype in ("float32", "bfloat16"):
        found = child("tokens", str(EMBEDDED), dtype)
        with LLM(EMBEDDED, dtype=dtype, device="cuda:0", max_num_seqs=32, memory=4.0) as llm:
            params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
            ours = [list(result.token_ids) for result in llm.generate(prompts, params)]
        equal = sum(one == other for one, other in zip(found["answers"], ours, strict=True))
        line = {"measure": "vllm_tokens", "model": "embedded", "wiring": str(config.wiring), "dtype": dtype}
        line |= {"prompts": len(prompts), "equal": equal, "cudagraph_mode": found["cudagraph_mode"]}
        say({**line, **agreement(EMBEDDED, prompts, found["answers"])})


# --- speed ----------------------------------------------------------------------------------------------------------

ARMS: dict[str, dict[str, Any]] = {
    "vllm standard": {},  # vLLM's own model and choices: torch.compile, full and piecewise graphs
    "vllm standard, no compiler": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "vllm ladder": {"wiring": "ladder"},
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
            with LLM(directory, wiring=native, device="cuda:0", max_num_seqs=max(batches), memory=40.0) as llm:
                fill(llm._executor._runner._passes._model)  # type: ignore[attr-defined]
                return {"ms": {batch: ms_per_token(llm, batch, "greedy") for batch in batches}}
        directory.mkdir()
        config = ModelConfig.named(size).rewired(options.pop("wiring", "standard"))
        (directory / "config.json").write_text(json.dumps(replace(config, dtype="bfloat16").to_hf()))
        llm = vllm(directory, load_format="dummy", max_num_seqs=max(batches), **options)
        return {"ms": {batch: vllm_ms_per_token(llm, batch) for batch in batches}, **graphs(llm)}


def speed(size: str, batches: Sequence[int]) -> None:
    for arm in ARMS:
        found = child("speed", arm, size, *map(str, batches))
        for batch, ms in found.pop("ms").items():
            line = {"measure": "vllm_speed", "size": size, "tp": 1, "arm": arm, "batch": int(batch), "prompt": PROMPT}
            say({**line, "repeats": REPEATS, "ms_per_token": round(ms, 4), **found})


# --- quantized ------------------------------------------------------------------------------------------------------


def quantized() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain"
        config = ModelConfig(**SIZES, dtype="bfloat16").rewired("ladder")
        save(load(Decoder(config), Random(seed=5, deviation=0.05)), plain)
        prompts = prompts_of(config.vocab)
        for name in ("fp8", "int4"):
            directory = Path(folder) / name
            quantize(QuantizeOptions(model=plain, out=directory, format=name), lambda *_: None)
            found = child("tokens", str(directory), "bfloat16")
            line = {"measure": "vllm_quantized", "weights": name, "wiring": "ladder", "prompts": len(prompts)}
            say({**line, **agreement(directory, prompts, found["answers"])})


# --- processes ------------------------------------------------------------------------------------------------------


def child(*arguments: str, module: str = "experiments.vllm_gpu") -> dict[str, Any]:
    """One engine in a process of its own: what it reports last."""
    command = [sys.executable, "-m", module, "--child", *arguments]
    done = subprocess.run(command, env={**os.environ, **SWITCHES}, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise SystemExit(f"{' '.join(arguments)} failed: status {done.returncode}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def report(found: dict[str, Any]) -> NoReturn:
    """The end of a child: an engine inside a process may take long to be taken apart."""
    print(json.dumps(found), flush=True)
    os._exit(0)


def say(line: dict[str, Any]) -> None:
    print(json.dumps({**line, **machine(torch.device("cuda", 0))}), flush=True)


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
