"""`ladder eval --engine vllm`: lm-eval's own model class for vLLM, with a wired model behind it."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from ladder.config.fields import read_config
from ladder.devices import cpu_multiplies_bfloat16
from ladder.errors import LadderError
from ladder.hf.evaluate import Arm
from ladder.hf.harness import without_bars
from ladder.vllm.serve import check_installed, overrides_of


def on_vllm(tp: int, dtype: str) -> Callable[[Arm, Any], AbstractContextManager[Any]]:
    """What makes of an arm and its tokenizer a model for lm-eval's tasks, on `tp` ranks."""
    check_installed("evaluating")
    try:
        served = without_bars(importlib.import_module("lm_eval.models.vllm_causallms").VLLM)
    except (ImportError, PackageNotFoundError) as error:
        raise LadderError(f"tasks on vLLM need lm-eval beside a package named vllm ({error})") from None

    @contextmanager
    def open_arm(arm: Arm, tokenizer: Any) -> Iterator[Any]:
        if not Path(arm.model).is_dir():
            raise LadderError(f"{arm.model} is no directory: models of the hub must be downloaded before --engine vllm")
        overrides = overrides_of(read_config(Path(arm.model)), arm.wiring, tp)
        options: dict[str, Any] = {"hf_overrides": overrides} if overrides else {}
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            options["prefix_token_id"] = 0
        model = served(pretrained=arm.model, dtype=_dtype(dtype), tensor_parallel_size=tp, **options)
        try:
            yield model
        finally:
            model.model.llm_engine.engine_core.shutdown()

    return open_arm


def _dtype(name: str) -> str:
    """The dtype for vLLM: on a CPU without bf16 products it would choose what that does not have."""
    import torch

    return "float32" if name == "auto" and not torch.cuda.is_available() and not cpu_multiplies_bfloat16() else name
