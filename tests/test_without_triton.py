"""Everything but the kernels works where Triton is not installed."""

import subprocess
import sys

PROGRAM = """
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] == "triton" else real(name, *rest)
import torch
from ladder.jit import PRESENT
from ladder.checkpoint import Random, load
from ladder.config import ModelConfig
from ladder.engine.forward import Forward
from ladder.kernels.launch import References
from ladder.model import Decoder
import ladder.comm.symmetric, ladder.engine.llm, ladder.bench.one_rank, ladder.bench.tune, ladder.cli
assert not PRESENT
model = load(Decoder(ModelConfig.named("tiny")), Random())
forward = Forward(model, model.new_cache(1, 8), References())
logits = forward.decode(*torch.tensor([[5], [0], [0]]))
assert torch.allclose(logits, model(torch.tensor([[5]]))[0], atol=1e-5)
import sys
assert "triton" not in sys.modules
"""


def test_without_triton() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
