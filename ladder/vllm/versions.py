"""What we need of vLLM beside its models: everything that is not public, or that differs between its versions.

Known to work: 0.26 and 0.32; 0.33 has the same. Other modules import public names of vLLM only.
"""

from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture, is_breakable_cudagraph_enabled
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.distributed import get_pp_group, get_tp_group
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors
from vllm.transformers_utils.config import _CONFIG_REGISTRY

__all__ = ["CompilationMode", "IntermediateTensors", "VerifyAndUpdateConfig", "VllmConfig", "get_pp_group"]
__all__ += ["breaks_at_attention", "captures_whole", "default_modes", "foreign_parts", "keep_partial"]
__all__ += ["register_architecture", "register_config", "suits_lanes", "tensor_parallel_group"]


def register_config(model_type: str, config: type[Any]) -> None:
    """Have vLLM read config.json files of this model_type by this class."""
    _CONFIG_REGISTRY[model_type] = config


def register_architecture(name: str, where: str, verify: type[VerifyAndUpdateConfig]) -> None:
    """A model of vLLM's by its name and "module:Class", imported when it is needed, and what checks its config."""
    MODELS_CONFIG_MAP[name] = verify
    if name not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(name, where)


def tensor_parallel_group() -> Any:
    """The ranks that share a layer."""
    return get_tp_group()


def keep_partial(block: nn.Module) -> int:
    """Have a sub-block return this rank's partial sum; how many all-reduces that leaves out.

    Projections have a flag for it, and so have experts, whose all-reduce comes behind their kernels.
    """
    found = 0
    each: Any
    for each in block.modules():
        if hasattr(each, "reduce_results"):
            found += bool(each.reduce_results)
            each.reduce_results = False
        moe: Any = getattr(each, "moe_config", None)
        if hasattr(moe, "skip_final_all_reduce"):
            found += not moe.skip_final_all_reduce
            moe.skip_final_all_reduce = True
    return found


def breaks_at_attention() -> bool:
    """Whether the CUDA graph that is being captured ends where attention begins: a "breakable" graph does, unless it is
    of a batch whose attention is captured as well.
    """
    if not BreakableCUDAGraphCapture.is_active():
        return False
    return not (is_forward_context_available() and get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.FULL)


def captures_whole() -> bool:
    """Whether a CUDA graph of the whole pass is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing() and not breaks_at_attention()


def default_modes(config: VllmConfig) -> None:
    """Where the user says nothing: no torch.compile, and decode steps as whole CUDA graphs; with breakable graphs,
    which vLLM has behind an environment variable of its own, prompts as well.

    On a CPU vLLM lays out what a pipeline stage receives in a run that it leaves out without the compiler; there is
    nothing in a wired model that the compiler would find. Of pooling models vLLM captures no whole graph, and 0.26 ends
    where it was asked for one without the compiler.
    """
    compilation = config.compilation_config
    staged = config.parallel_config.pipeline_parallel_size > 1 and current_platform.is_cpu()
    if compilation.mode is None and not staged:
        compilation.mode = CompilationMode.NONE
    unsaid = compilation.cudagraph_mode is None and config.model_config.pooler_config is None
    if unsaid and config.optimization_level > 0 and not is_breakable_cudagraph_enabled():
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY


def suits_lanes(config: VllmConfig) -> bool:
    """Whether sub-blocks may run at the same time unasked: on one rank, where nothing but the layers' plain products
    and attention runs. Kernels of experts, adapters and quantized layers may share memory that they work in; so may
    products that are not cuBLAS's. (On ROCm those for 10 to 128 tokens do so in 0.26.)
    """
    alone = config.parallel_config.tensor_parallel_size == config.parallel_config.pipeline_parallel_size == 1
    plain = config.quant_config is None and config.lora_config is None and not config.model_config.is_moe
    return alone and plain and current_platform.is_cuda() and config.kernel_config.linear_backend == "auto"


def needs_compiler(config: VllmConfig) -> bool:
    """Whether the CUDA graphs that were asked for are pieces that only vLLM's compiler makes."""
    mode = config.compilation_config.cudagraph_mode
    return mode is not None and mode.requires_piecewise_compilation() and not is_breakable_cudagraph_enabled()


def foreign_parts(config: VllmConfig) -> list[str]:
    """Options in use that compute a layer in ways a wired one does not have, by their names on the command line."""
    parallel, found = config.parallel_config, []
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            found.append(f"--{name.replace('_', '-')}")
    one_stream = "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC"  # (0.32) takes all-reduces of one stream only
    if parallel.tensor_parallel_size > 1 and getattr(envs, one_stream, False):
        found.append(one_stream)
    if getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False):
        found.append("--enable-dbo")
    offload = getattr(config, "offload_config", None)
    if offload is not None and offload.prefetch.offload_group_size > 0:
        found.append("--offload-group-size")
    if offload is not None and offload.uva.cpu_offload_gb > 0:
        found.append("--cpu-offload-gb")
    return found
