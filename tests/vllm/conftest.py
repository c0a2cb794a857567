"""vLLM's tests, which have an environment of their own: `make test-vllm`."""

import os

import pytest
import torch

# vLLM's own switches, for one small machine; without dynamo, which it uses beside the model
SWITCHES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def pytest_configure(config: pytest.Config) -> None:
    """vLLM warns of much that is not ours. It reads its switches when it is imported."""
    config.addinivalue_line("filterwarnings", "ignore")
    os.environ.update(SWITCHES)
    torch.set_num_threads(1)
