"""On a GPU: graphs, flags and one-rank mode. The kernels themselves are in test_kernels.py."""

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ladder import LLM, SamplingParams
from ladder.checkpoint import Random, load
from ladder.comm.base import Completed, Pending, Solo
from ladder.comm.link import Link
from ladder.comm.one_rank import OneRank
from ladder.comm.signalled import Flagged, Signalled
from ladder.config import ModelConfig
from ladder.engine.forward import Forward
from ladder.engine.graphs.prompts import PromptGraphs, rows_of
from ladder.engine.graphs.steps import Graphs
from ladder.kernels.launch import Kernels
from ladder.kernels.table import NEAREST
from ladder.model import Decoder
from ladder.quantize.options import QuantizeOptions
from ladder.quantize.write import quantize
from tests.checkpoints import tiny
from tests.families import FAMILIES, make
from tests.test_quantize import FORMATS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PROMPTS = [[1], list(range(2, 40)), [7] * 100, [5, 17, 9], list(range(300, 200, -1))]


@pytest.mark.parametrize("wiring", ("standard", "ladder", "parallel", "ladder-1-2", "none"))
@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_same_tokens_with_kernels(tmp_path: Path, wiring: str, temperature: float) -> None:
    """Graphs of every batch up to 5, prompts alone and in company, a cache that grows: float32."""
    directory = tiny(tmp_path / "model", wiring)
    params = SamplingParams(200, temperature, seed=3)
    found = []
    for kernels in (False, True):
        with LLM(directory, device="cuda", max_num_seqs=5, prefill_chunk=64, kernels=kernels) as llm:
            found.append([result.token_ids for result in llm.generate(PROMPTS, params)])
            passes = llm._executor._runner._passes  # type: ignore[attr-defined]
            assert (passes._graphs is not None) == kernels  # so that equal tokens mean something
    assert found[0] == found[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_of_every_family(tmp_path: Path, family: str) -> None:
    """Prompts from graphs and in pieces, decode steps of every batch up to 5: float32, 64 tokens."""
    make(family, tmp_path)
    prompts = [[token % 131 for token in prompt] for prompt in PROMPTS]
    found = []
    for kernels in (False, True):
        with LLM(tmp_path, device="cuda", max_num_seqs=5, prefill_chunk=64, kernels=kernels) as llm:
            found.append([result.token_ids for result in llm.generate(prompts, SamplingParams(64))])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("wiring", ("standard", "ladder"))
def test_same_tokens_of_every_format(tmp_path: Path, wiring: str, name: str) -> None:
    """As on a CPU, prompts longer than our kernels' most rows and decode steps of every batch up to 5: float32."""
    source = tiny(tmp_path / "model", wiring, hidden=256, ffn=512, heads=4, kv_heads=2, head_dim=64)
    quantize(QuantizeOptions(source, tmp_path / "quantized", **FORMATS[name]))
    found = []
    for device in ("cpu", "cuda"):
        with LLM(tmp_path / "quantized", device=device, dtype="float32", max_num_seqs=5, prefill_chunk=128) as llm:
            found.append([result.token_ids for result in llm.generate(PROMPTS, SamplingParams(64))])
    assert found[0] == found[1]


def logits(graphs: Graphs, tokens: list[int], slots: list[int], positions: list[int]) -> Tensor:
    """Of a decode step, once it is complete."""
    graphs._newest[slots] = torch.tensor(tokens, device=graphs._newest.device)
    step = graphs.step([object() for _ in slots], slots, positions)
    torch.cuda.synchronize()
    return step.logits.clone()


def test_a_sum_takes_the_link_s_time_and_sets_its_flag() -> None:
    comm = Signalled([OneRank(8, Link(2e-3, 1e12))], torch.device("cuda"), 4)
    x = torch.randn(8192, device="cuda")
    before = x.clone()
    for _ in range(2):  # the first compiles
        comm.flags.zero_()
        torch.cuda.synchronize()
        comm.begin()
        begin = time.monotonic()
        pending = comm.all_reduce(x)
        assert isinstance(pending, Flagged) and pending.flag is not None
        comm.end()
        torch.cuda.synchronize()
        seconds = time.monotonic() - begin
    assert 2e-3 <= seconds < 20e-3 and torch.equal(x, before)
    assert int(pending.flag) == pending.need
    comm.all_reduce(x).wait()
    assert comm.flags[1:].tolist() == [0] * 3  # after `end` none is set


@pytest.mark.parametrize(
    "wiring",
    ("standard", "ladder", "ladder-2", "ladder-1-2", "parallel", "parallel-1", "desync-2x", "desync-2x-1", "none"),
)
@pytest.mark.parametrize("batch", (1, 3))
def test_flags_change_no_number(wiring: str, batch: int) -> None:
    """A rank alone with timed sums and flags, from a graph and replayed, against the same without a link, eager."""
    config = ModelConfig(256, 6, 8, 2, 512, vocab=500).rewired(wiring)
    device = torch.device("cuda", 0)
    results = []
    for link in (None, Link(20e-6, 1e12)):
        comm = OneRank(4) if link is None else Signalled([OneRank(4, link)], device, 2 * config.layers + 1)
        model = load(Decoder(config, comm, device), Random(1, 0.05))
        forward = Forward(model, model.new_cache(batch + 1, 32), Kernels.on(device))
        lines = torch.tensor([list(range(batch)), list(range(batch)), [0] * batch])
        with torch.inference_mode():
            if link is None:
                results.append(forward.decode(*lines.to(device)))
            else:
                graphs = Graphs(forward, batch)
                results += [logits(graphs, *lines.tolist()) for _ in range(3)]
    for found in results[1:]:
        torch.testing.assert_close(found, results[0])


class Late:
    """Two ranks that say the same, on a slow wire: until its flag is set, a sum is no number."""

    capturable = True
    size, rank = 2, 0

    def all_reduce_and_signal(self, x: Tensor, flag: Tensor) -> tuple[Tensor, int]:
        self._sum(x)
        flag.fill_(1)
        return x, 1

    def all_reduce(self, x: Tensor) -> Pending:
        self._sum(x)
        return Completed(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, dim=-1)

    def _sum(self, x: Tensor) -> None:
        mine = x.clone()
        x.fill_(float("nan"))
        torch.cuda._sleep(100_000)  # cycles: some 60 us, several kernels of a step
        torch.mul(mine, self.size, out=x)


@pytest.mark.parametrize(
    "wiring", ("standard", "ladder", "ladder-2", "ladder-1-2", "parallel", "parallel-1", "desync-2x", "desync-2x-1")
)
@pytest.mark.parametrize("batch", (1, 3))
def test_a_kernel_waits_for_the_flag(wiring: str, batch: int) -> None:
    """Sums that are wrong until they have arrived: readers in a graph, which look at flags, against those of an eager
    step, which wait for events.
    """
    config = ModelConfig(256, 6, 8, 2, 512, vocab=500).rewired(wiring)
    device = torch.device("cuda", 0)
    comm = Signalled([Late()], device, 2 * config.layers + 1)
    model = load(Decoder(config, comm, device), Random(1, 0.05))
    forward = Forward(model, model.new_cache(batch + 1, 32), Kernels.on(device))
    lines = torch.tensor([list(range(batch)), list(range(batch)), [0] * batch])
    with torch.inference_mode():
        wanted = forward.decode(*lines.to(device)).clone()
        graphs = Graphs(forward, batch)
        for _ in range(5):
            found = logits(graphs, *lines.tolist())
            assert found.isfinite().all()
            torch.testing.assert_close(found, wanted)


def test_passes_with_prompts_from_a_graph() -> None:
    """Prompts alone and beside sequences that are decoded, by the kernels: the decoder's own logits."""
    config = ModelConfig(256, 4, 8, 2, 512, vocab=500)
    device = torch.device("cuda", 0)
    model = load(Decoder(config, Solo(), device), Random(1, 0.05))
    forward = Forward(model, model.new_cache(3, 64), Kernels.on(device))
    newest = torch.zeros(3, dtype=torch.long, device=device)
    graphs, passes = Graphs(forward, 2, last=newest), PromptGraphs(forward, 2, newest)

    def whole(tokens: list[int]) -> Tensor:
        return model(torch.tensor([tokens], device=device))[0, -1:]

    with torch.inference_mode():
        for tokens, slot in (([1, 2, 3], 0), (list(range(40)), 1), ([9] * 16, 0)):
            graph = passes.captured((rows_of(len(tokens)), 0, NEAREST))
            found = graph.replay([tokens], [slot], [0], 0, [len(tokens) - 1])
            torch.testing.assert_close(found, whole(tokens), rtol=1e-4, atol=1e-4)
            follow = logits(graphs, [7], [slot], [len(tokens)])
            torch.testing.assert_close(follow, whole([*tokens, 7]), rtol=1e-4, atol=1e-4)
        # slot 0 has 17 tokens, slot 1 has 41: the one is decoded, the other reads on
        newest[0] = 5
        found = passes.captured((32, 8, NEAREST)).replay([[], [8, 3, 3, 4]], [0, 1], [17, 41], 1, [0, 4])
        for logit, tokens in zip(found, ([9] * 16 + [7, 5], [*range(40), 7, 8, 3, 3, 4]), strict=True):
            torch.testing.assert_close(logit, whole(tokens)[0], rtol=1e-4, atol=1e-4)
