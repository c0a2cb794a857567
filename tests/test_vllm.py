"""The parts of the vLLM host that need no vLLM: settings, borders of stages, all-reduces on streams, `ladder serve`.

With vLLM itself: tests/vllm, `make test-vllm`.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial as partial_function
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.cli import app
from ladder.comm.base import Comm
from ladder.comm.emulated import World
from ladder.comm.group import Group
from ladder.config import ModelConfig
from ladder.engine.options import EngineOptions
from ladder.errors import LadderError
from ladder.residual import ResidualStream
from ladder.server.options import ServerOptions
from ladder.vllm import serve, stages
from ladder.vllm.families import VLLM_FAMILIES
from ladder.vllm.serve import handover
from ladder.vllm.settings import Settings, Wired
from ladder.vllm.stages import Border
from ladder.wiring import EXAMPLES, Out, SubBlock, Wiring
from tests.checkpoints import tiny

LAYERS, HIDDEN = 6, 4
PATTERNS = (*EXAMPLES, "ladder-3", "desync-3x-1", "desync-5x-2", "standard:2 ladder-2:4", "desync-5x:3 parallel-1:3")


# --- settings and what a config says --------------------------------------------------------------------------------


@pytest.mark.parametrize("given, expected", [
    (None, Settings()), ({}, Settings()), ({"other": 1}, Settings()), (object(), Settings()),
    ({"ladder": {"reference": True}}, Settings(reference=True)), ({"ladder": {"lanes": 2}}, Settings(lanes=2)),
])  # fmt: skip
def test_settings(given: Any, expected: Settings) -> None:
    assert Settings.read(given) == expected


@pytest.mark.parametrize("given, why", [
    ({"lane": 2}, "unknown setting ladder.lane"), ({"lanes": 3}, "must be 1 or 2"), (2, "must be an object"),
    ({"lanes": "2"}, "lanes must be int or None"), ({"reference": 1}, "reference must be bool"),
])  # fmt: skip
def test_settings_are_refused(given: Any, why: str) -> None:
    with pytest.raises(LadderError, match=why):
        Settings.read({"ladder": given})


@pytest.mark.parametrize("settings, known, lanes", [
    (Settings(), True, 2), (Settings(), False, 1), (Settings(reference=True), True, 1),
    (Settings(lanes=1), True, 1), (Settings(lanes=2), False, 2),
])  # fmt: skip
def test_lanes(settings: Settings, known: bool, lanes: int) -> None:
    assert settings.lanes_where(known) == lanes


def test_a_vocabulary_that_is_shared_in_another_way() -> None:
    """300 tokens of two ranks: 150 each, and 160 and 140 in vLLM."""
    keys = {"wiring": "none", "vocab_size": 300}
    with pytest.raises(LadderError, match="ends without an all-reduce"):
        Wired.of(keys, LAYERS, 2)
    Wired.of(keys, LAYERS, 1)
    Wired.of({**keys, "vocab_size": 320}, LAYERS, 2)
    Wired.of({**keys, "wiring": "desync-3x"}, LAYERS, 2)


def test_every_family_is_the_native_engine_s() -> None:
    for name, family in VLLM_FAMILIES.items():
        config = ModelConfig(hidden=8, layers=2, heads=2, kv_heads=2, ffn=8, vocab=8, family=name)
        assert family.architecture == config.family_row.architecture
        assert bool(family.parts.attention_post_norm) == (config.names.attention_post_norm is not None)


# --- borders of pipeline stages -------------------------------------------------------------------------------------


def partial(comm: Comm, x: Tensor, number: int) -> Tensor:
    """A sub-block of numbers that depend on what it reads, on its place and on the rank."""
    return torch.sin(x * (number + 1)) * (comm.rank + 1) / comm.size


def through(comm: Comm, stream: ResidualStream, blocks: list[SubBlock], first: int) -> None:
    for number, block in enumerate(blocks, first):
        stream.write(partial(comm, stream.read(block.lag), number), block.out)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("ranks", (1, 2))
def test_a_border_changes_nothing(pattern: str, ranks: int) -> None:
    """Wherever it is; what crosses is what was laid out for it, and the same on all ranks."""
    blocks = [block for pair in Wiring.parse(pattern, LAYERS).sub_blocks() for block in pair]
    start = torch.linspace(-1, 1, 3 * HIDDEN, dtype=torch.float64).view(3, HIDDEN)

    def whole(comm: Comm) -> Tensor:
        stream = ResidualStream(comm, start.clone())
        through(comm, stream, blocks, 0)
        return stream.read(0)

    def in_two(comm: Comm, at: int) -> tuple[Tensor, dict[str, Tensor], dict[str, int]]:
        stream = ResidualStream(comm, start.clone())
        through(comm, stream, blocks[:at], 0)
        border, sent = Border.after(blocks[:at], comm.size), stages.send(stream)
        stream = stages.receive(comm, {name: x.clone() for name, x in sent.items()}, border)
        through(comm, stream, blocks[at:], at)
        return stream.read(0), sent, border.widths(HIDDEN, comm.size)

    with World(ranks) as world:
        expected = world.run(whole)
        for at in range(2, 2 * LAYERS, 2):
            found = world.run(partial_function(in_two, at=at))
            for (stream, sent, widths), one in zip(found, expected, strict=True):
                assert torch.equal(stream, one)
                assert {name: x.shape[-1] for name, x in sent.items()} == widths
                assert all(torch.equal(x, found[0][1][name]) for name, x in sent.items())


def test_the_border_of_another_wiring_would_be_noticed() -> None:
    block = SubBlock(2, Out.REDUCE)
    assert Border.after([block] * 4, 2).widths(HIDDEN, 2) == {"agreed": 4, "sum0": 4, "sum1": 4, "sum2": 4}
    assert Border.after([SubBlock(0, Out.LOCAL)], 2).widths(HIDDEN, 2) == {"agreed": 4, "drift0": 8}
    assert Border.after([SubBlock(0, Out.LOCAL)], 1).widths(HIDDEN, 1) == {"agreed": 4}


# --- all-reduces on streams -----------------------------------------------------------------------------------------


@dataclass
class Recorded:
    """Streams that compute nothing: what each has waited for, as sets of operations."""

    done: dict[str, set[str]] = field(default_factory=dict)
    here: str = "main"
    count: int = 0

    def current(self) -> str:
        return self.here

    def new(self) -> str:
        self.count += 1
        return f"side{self.count}"

    @contextmanager
    def entered(self, stream: str) -> Iterator[None]:
        before, self.here = self.here, stream
        try:
            yield
        finally:
            self.here = before

    def record(self, stream: str) -> frozenset[str]:
        return frozenset(self.done.setdefault(stream, set()))

    def wait(self, stream: str, event: frozenset[str]) -> None:
        self.done.setdefault(stream, set()).update(event)

    def launch(self, what: str) -> None:
        self.done.setdefault(self.here, set()).add(what)


@dataclass
class Coordinated:
    """vLLM's group, of two ranks that have the same numbers; `x` is on no CPU."""

    streams: Recorded
    world_size: int = 2
    rank_in_group: int = 0
    device_group: Any = None
    begun: int = 0

    def all_reduce(self, input_: Any) -> Any:
        self.begun += 1
        self.streams.launch(f"all-reduce {self.begun}")
        return input_

    def all_gather(self, input_: Any, dim: int = -1) -> Any:
        self.streams.launch("all-gather")
        return input_


def on_streams(**more: Any) -> tuple[Group, Recorded, Any]:
    streams = Recorded()
    return Group(Coordinated(streams), streams=streams, **more), streams, torch.empty(2, 3, device="meta")


def test_an_all_reduce_waits_for_what_makes_it_and_is_waited_for() -> None:
    group, streams, x = on_streams()
    streams.launch("product")
    pending = group.all_reduce(x)
    assert "all-reduce 1" not in streams.done["main"]
    assert streams.done["side1"] == {"product", "all-reduce 1"}
    assert pending.wait() is x
    assert "all-reduce 1" in streams.done["main"]


def test_all_reduces_of_two_lanes_come_one_after_the_other() -> None:
    """Each on a communication stream of its own: what it wrote is given again behind its own lane."""
    group, streams, x = on_streams()
    group.all_reduce(x)
    with streams.entered("lane"):
        streams.launch("attention")
        group.all_reduce(x)
    assert streams.done["side2"] == {"attention", "all-reduce 1", "all-reduce 2"}
    group.all_reduce(x)
    assert streams.done["side1"] >= {"all-reduce 1", "all-reduce 2", "all-reduce 3"}


def test_what_was_joined_is_not_waited_for_again() -> None:
    """An event of a CUDA graph that has ended must not be waited for in the next one."""
    group, streams, x = on_streams()
    pending = group.all_reduce(x)
    group.join()
    assert "all-reduce 1" in streams.done["main"]
    with streams.entered("another"):
        pending.wait()
        group.all_reduce(x)
    assert "all-reduce 1" not in streams.done.get("another", set()) | streams.done["side2"]


def test_the_reference_waits_where_an_all_reduce_begins() -> None:
    group, streams, x = on_streams(overlap=False)
    assert group.all_reduce(x).wait() is x
    assert streams.done == {"main": {"all-reduce 1"}}


# --- ladder serve --engine vllm -------------------------------------------------------------------------------------


def handed(directory: Path, *arguments: str) -> serve.Handover:
    """What the command line hands over, by the command itself."""
    found: list[serve.Handover] = []

    class Handed(Exception):
        pass

    def become(handover: serve.Handover) -> None:
        found.append(handover)
        raise Handed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Handed):
        patch.setattr(serve, "become", become)
        app(["serve", str(directory), "--engine", "vllm", *arguments], standalone_mode=False)
    return found[0]


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("wired") / "mine", "ladder", tokenizer=False)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("plain") / "mine", tokenizer=False)


def test_options_are_handed_over(wired: Path) -> None:
    """Ours under vLLM's names, and vLLM's own as they are, in their order."""
    flags = ["--max-model-len", "4096", "-cc.mode=0", "--enable-lora", "--lora-modules", "a=b", "-dcp", "1"]
    found = handed(wired, "--tp", "2", "--port", "8001", "--max-num-seqs", "64", "--expert-parallel", *flags)
    assert found.environment == {}
    assert found.arguments == (
        *(str(wired), "--tensor-parallel-size", "2", "--max-num-seqs", "64", "--enable-expert-parallel"),
        *("--port", "8001", "--host", "127.0.0.1", "--served-model-name", "mine", *flags),
    )


def test_a_key_is_not_among_the_arguments(wired: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    found = handed(wired, "--api-key-file", str(tmp_path / "key"))
    assert found.environment == {"VLLM_API_KEY": "secret"} and "secret" not in found.arguments


def overrides(found: serve.Handover) -> Any:
    text = serve.value_of(found.arguments, "--hf-overrides")
    return None if text is None else json.loads(text)


def test_a_wiring_is_handed_over(wired: Path, plain: Path, tmp_path: Path) -> None:
    """As the checkpoint says: nothing needs to be said. A plain file that names one would be served as standard."""
    assert overrides(handed(wired)) is None and overrides(handed(plain)) is None
    rewired = {"wiring": "parallel-1", "wiring_ranks": 1, "ladder_layers": None}
    assert overrides(handed(wired, "--wiring", "parallel-1")) == rewired
    ours = {"architectures": ["LadderLlamaForCausalLM"]}
    assert overrides(handed(plain, "--wiring", "parallel-1")) == rewired | ours
    raw = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "ladder_layers": 2}))
    assert overrides(handed(tmp_path)) == ours
    other = '{"wiring": "ladder-2"}'  # of a file whose model_type vLLM reads by our class
    assert overrides(handed(wired, "--hf-overrides", other)) == {"wiring": "ladder-2"}


def refused(directory: Path, *arguments: str) -> str:
    with pytest.raises(LadderError) as caught:
        app(["serve", str(directory), "--engine", "vllm", *arguments], standalone_mode=False)
    return str(caught.value)


def test_what_is_refused(wired: Path, plain: Path) -> None:
    assert "--emulate-link is an option of the native engine" in refused(wired, "--emulate-link", "nvlink_oneshot")
    assert "--device is an option of the native engine" in refused(wired, "--device", "cuda")
    assert "are the same option" in refused(wired, "--tp", "2", "--tensor-parallel-size", "2")
    assert "--hf-overrides cannot be given" in refused(wired, "--wiring", "ladder", "--hf-overrides", "{}")
    for name in ("--hf-overrides.rope_theta", "--hf_overrides", "--hf-over"):
        assert "--hf-overrides cannot be given" in refused(plain, "--wiring", "ladder", name, "5")
    for named in (["--hf-overrides", '{"wiring": "ladder"}'], ["--hf-overrides.ladder_layers=2"]):
        assert "which vLLM would not look at: give --wiring" in refused(plain, *named)
    assert "unknown wiring 'laddr'" in refused(plain, "--wiring", "laddr")
    assert "a whole number from 1, not 'two'" in refused(wired, "-tp", "two")
    assert "0 is not one" in refused(wired, "--port", "0")
    assert "name the model before" in refused(Path("--max-model-len"), "9")


def test_models_that_vllm_is_not_taught(tmp_path: Path) -> None:
    raw = {"model_type": "ladder", "base_model_type": "phi3", "wiring": "ladder", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert "wired phi3 models are not served on vLLM" in refused(tmp_path)
    ranks = {**raw, "base_model_type": "llama", "wiring": "desync-2x", "wiring_ranks": 4, "ladder_vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(ranks))
    assert "give --tensor-parallel-size 4" in refused(tmp_path, "--tp", "2")
    assert handed(tmp_path, "--tp", "4").arguments[1:3] == ("--tensor-parallel-size", "4")


def test_vllm_s_options_are_unknown_to_the_native_engine(wired: Path) -> None:
    with pytest.raises(Exception, match="No such option: --max-model-len"):
        app(["serve", str(wired), "--max-model-len", "9"], standalone_mode=False)


def test_what_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    with pytest.raises(LadderError, match="serving on vLLM needs vllm"):
        serve.check_installed()
    monkeypatch.setattr(serve, "find_spec", lambda name: name)
    monkeypatch.setattr(serve, "entry_points", lambda group: [])
    with pytest.raises(LadderError, match="does not find the plugin"):
        serve.check_installed()
    monkeypatch.undo()
    monkeypatch.setattr(serve, "find_spec", lambda name: name)
    monkeypatch.setattr(serve, "entry_points", lambda group: [Entry()])
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(LadderError, match="which leaves out the plugin: add 'ladder'"):
        serve.check_installed()
    monkeypatch.setenv("VLLM_PLUGINS", "other,ladder")
    serve.check_installed()


@dataclass(frozen=True)
class Entry:
    name: str = "ladder"
    value: str = serve.PLUGIN


def test_ranks_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert serve.check_machine(["-tp", "2"]) == []
    with pytest.raises(LadderError, match="4 ranks need 4 GPUs, this machine has 2"):
        serve.check_machine(["--tensor-parallel-size=2", "--pipeline-parallel-size", "2"])
    with pytest.raises(LadderError, match="4 ranks need 4 GPUs"):
        serve.check_machine(["-tp", "4", "--distributed-executor-backend", "mp"])
    assert serve.check_machine(["-tp", "8", "--nnodes", "4"]) == []
    assert serve.check_machine(["-tp", "8", "--distributed-executor-backend=ray"]) == []


def test_options_default_to_the_engine_s_own() -> None:
    """What is not given is vLLM's to decide."""
    found = handover(EngineOptions(), ServerOptions(engine="vllm"), frozenset({"engine"}), ())
    assert found.arguments[1:] == ("--host", "127.0.0.1", "--served-model-name", EngineOptions().model.name)
