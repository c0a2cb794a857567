"""vLLM's engine inside a test: the whole of it, started in seconds, since its workers are forked and import nothing."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor


@dataclass(frozen=True)
class Answer:
    """One prompt's greedy continuation, the log-probability of each of its tokens, and how much of the prompt was found
    in the cache.
    """

    tokens: list[int]
    logprobs: list[float]
    cached: int


class Extension:
    """What tests do inside a worker."""

    model_runner: Any

    def rewire(self, pattern: str) -> None:
        """What a pipeline stage receives is laid out anew."""
        runner = self.model_runner
        runner.model.rewire(pattern)
        if runner.intermediate_tensors is not None:
            like = runner.intermediate_tensors["agreed"]
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                len(like), like.dtype, like.device
            )

    def forget_waits(self) -> None:
        """A defect: what an all-reduce began with is taken for its result."""
        comm = self.model_runner.model._comm
        begin = comm.all_reduce

        def all_reduce(x: Any) -> Any:
            early = x.clone()
            pending = begin(x)
            return _NotWaited(early, pending)

        comm.all_reduce = all_reduce

    def remember_waits(self) -> None:
        del self.model_runner.model._comm.all_reduce

    def kind(self) -> str:
        return type(self.model_runner.model).__name__


class _NotWaited:
    def __init__(self, early: Any, pending: Any) -> None:
        self.early, self.pending = early, pending

    def wait(self) -> Any:
        self.pending.wait()
        return self.early


class Engine:
    """One engine, which may be rewired as often as a test likes."""

    def __init__(self, directory: Path, tp: int = 1, **more: Any) -> None:
        given = {
            "model": str(directory),
            "tensor_parallel_size": tp,
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_model_len": 400,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 128,  # so that long prompts are read in pieces, beside tokens that are decoded
            "seed": 0,
            "worker_extension_cls": "tests.vllm.engines.Extension",
            "disable_log_stats": True,
            "enable_prefix_caching": False,
            "distributed_executor_backend": "mp",  # also for one rank: this process stays as it was
        }
        config = EngineArgs(**{**given, **more}).create_engine_config()
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM has just set it to spawn
        self.engine = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
        self._count = 0
        self.steps = 0  # of the engine

    def generate(self, prompts: Sequence[list[int]], tokens: int = 16, lora: Any = None) -> list[Answer]:
        """All prompts at once, greedily."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
        first = self._count
        for prompt in prompts:
            self.engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params, lora_request=lora)
            self._count += 1
        done: dict[int, Answer] = {}
        while self.engine.has_unfinished_requests():
            self.steps += 1
            for output in self.engine.step():
                if output.finished:
                    found = output.outputs[0]
                    ids = list(found.token_ids)
                    each = [step[id].logprob for step, id in zip(found.logprobs, ids, strict=True)]
                    done[int(output.request_id.split("-")[0])] = Answer(ids, each, int(output.num_cached_tokens or 0))
        return [done[number] for number in range(first, self._count)]

    def call(self, method: str, *args: Any) -> list[Any]:
        """`Extension`'s method in every worker."""
        return self.engine.collective_rpc(method, args=args)

    def rewire(self, pattern: str) -> None:
        self.call("rewire", pattern)
        assert self.engine.reset_prefix_cache() is not False

    def close(self) -> None:
        self.engine.engine_core.engine_core.model_executor.shutdown()


@contextmanager
def engine(directory: Path, tp: int = 1, **more: Any) -> Iterator[Engine]:
    made = Engine(directory, tp, **more)
    try:
        yield made
    finally:
        made.close()
