"""What all tests share: one thread per rank, one server for processes, one world of emulated ranks per degree."""

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ladder.cli import main
from ladder.comm.emulated import World
from ladder.engine.executors.rank_processes import fork_server

DEGREES = (1, 2, 4, 8)
HEAVY = ("ladder.train.distill", "ladder.train.scratch", "peft", "tests.training")  # seconds to import

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell that starts us with & has Ctrl-C ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported stays until the end: each full garbage collection would look through all of it in vain."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The models are so small that torch's own threads would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def server() -> None:
    """Whoever asks for ranks gets them from here: a process imports nothing then."""
    fork_server(*HEAVY)


@pytest.fixture
def without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of half precision as every CPU has them. oneDNN needs bf16 instructions: without them torch warns, once
    in a process, and the warning would be an error in whichever test came first.
    """
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.fixture(scope="session")
def worlds() -> Iterator[dict[int, World]]:
    """The emulated ranks, by degree."""
    worlds = {size: World(size) for size in DEGREES}
    yield worlds
    for world in worlds.values():
        world.close()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`ladder ARGUMENTS` in this process: exit status, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ladder", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr()
        return int(left.value.code or 0), printed.out, printed.err

    return run


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens to train on; like the model and the run below, not to be changed."""
    from tests import training as tiny  # here, because it takes seconds

    return tiny.tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="session")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in their tokens."""
    from tests import training as tiny

    return tiny.model(tmp_path_factory.mktemp("model"), data)


@pytest.fixture(scope="session")
def adapted(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It, after a run that nothing happened to: 24 steps, staleness 1 after 12."""
    from ladder.train.distill import adapt
    from tests import training as tiny

    out = tmp_path_factory.mktemp("adapted") / "out"
    adapt(tiny.distilling(model, out), tiny.adapting(data), tiny.silent)
    return out
