"""Whoever connects to the ports of a run makes no rank do anything: results stay the same, and nothing hangs."""

import os
import random
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist

from ladder import LLM, SamplingParams
from ladder.engine.executors import control
from ladder.engine.executors.multi_process import MultiProcessExecutor
from ladder.engine.executors.rendezvous import Rendezvous
from ladder.engine.executors.seal import greet
from ladder.engine.executors.worker import run_rank
from ladder.engine.options import EngineOptions
from ladder.engine.setup import Setup
from ladder.errors import LadderError, RankError
from tests.checkpoints import tiny
from tests.processes import listening, world
from tests.test_torchrun import as_rank

LIMIT = 120.0  # seconds for what would otherwise hang
PROMPTS, PARAMS = [[5, 17, 9], [1], [7] * 30], SamplingParams(40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def answers(model: Path) -> list[list[int]]:
    """What one process says."""
    with LLM(model) as llm:
        return [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]


def rank_pids() -> list[int]:
    return [child.pid or 0 for child in active_children() if child.name.startswith("ladder-rank-")]


class Stranger(threading.Thread):
    """Connects to every port at which the ranks listen, and sends bytes: noise, what a store understands, and the
    numbers with which gloo's ranks announce themselves. It keeps its connections open.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: set[tuple[str, int]] = set()
        self._draw = random.Random(0)
        self._ended = threading.Event()
        self._open: list[socket.socket] = []

    def run(self) -> None:
        while not self._ended.is_set():
            for pid in rank_pids():
                with suppress(psutil.Error):
                    for address in listening([pid]):
                        self.seen.add(address)
                        self._talk(address)
            time.sleep(0.01)

    def _talk(self, address: tuple[str, int]) -> None:
        words = [self._draw.randbytes(self._draw.randint(1, 200)), struct.pack("<Q", len(self._open) % 8), b""]
        words += [
            b"GET / HTTP/1.0\r\n\r\n",
            struct.pack("<BI", 0, 0x3C85F7CE),
            struct.pack("<BQ4sQ1s", 1, 4, b"rank", 1, b"9"),
        ]
        with suppress(OSError):
            connection = socket.create_connection(address, timeout=1.0)
            self._open.append(connection)
            if len(self._open) > 200:
                self._open.pop(0).close()
            connection.sendall(self._draw.choice(words))

    def __enter__(self) -> "Stranger":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()
        for connection in self._open:
            connection.close()


def test_strangers_at_ranks_that_work(model: Path, answers: list[list[int]]) -> None:
    """All ports are on loopback, and the process that started the ranks has none."""
    with LLM(model, tp=2) as llm, Stranger() as stranger:
        begin = time.monotonic()
        while len(stranger.seen) < 2 or time.monotonic() - begin < 3:
            found = [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]
            assert found == answers
            assert time.monotonic() - begin < LIMIT
        assert {address for address, _ in stranger.seen} == {"127.0.0.1"}
        assert not listening([os.getpid()])


def in_a_hurry(rank: int, *arguments: Any) -> None:
    """`run_rank`, which waits only seconds for another rank's token."""
    patch.object(control, "greet", partial(greet, timeout=5.0)).start()
    run_rank(rank, *arguments)


@pytest.mark.parametrize("attempt", range(3))
def test_strangers_at_ranks_that_start(model: Path, answers: list[list[int]], attempt: int) -> None:
    """One that gloo takes for a rank is found out: the run works, or ends with one sentence and can be repeated."""
    setup, begin = Setup(EngineOptions(model, tp=2)), time.monotonic()
    with Stranger():
        try:
            with LLM.over(setup, MultiProcessExecutor(setup, target=in_a_hurry)) as llm:
                assert [result.token_ids for result in llm.generate(PROMPTS, PARAMS)] == answers
        except (LadderError, RankError) as error:
            assert "\n" not in str(error)
    assert time.monotonic() - begin < LIMIT and rank_pids() == []


def test_the_rendezvous_has_no_port_and_no_name(tmp_path: Path) -> None:
    """Another process sees it only where it was handed over."""
    before, files = listening([os.getpid()]), set(Path("/tmp").iterdir())
    rendezvous = Rendezvous(1)
    store = rendezvous.store()
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert listening([os.getpid()]) == before and not {
        each for each in set(Path("/tmp").iterdir()) - files if "ladder" in each.name
    }
    assert rendezvous.token.hex() not in repr(rendezvous)
    assert Rendezvous(1).token != rendezvous.token
    del store
    rendezvous.close()
    rendezvous.close()


@contextmanager
def started(model: Path, out: Path, tokens: list[str | None]) -> Iterator[list[Any]]:
    """Ranks as torchrun starts them, each with its token file; what they print goes to files."""
    arguments = ["generate", "--model", str(model), "--json", "--token-ids=5,17,9", "--max-new-tokens", "5"]
    ranks = []
    for rank, (told, token) in enumerate(zip(world(len(tokens)), tokens, strict=True)):
        more = []
        if token is not None:
            (out / f"token{rank}").write_text(token)
            (out / f"token{rank}").chmod(0o600)
            more = ["--token-file", str(out / f"token{rank}")]
        how = (told, out / str(rank), [*arguments, *more])
        ranks.append(get_context("forkserver").Process(target=as_rank, args=how, daemon=True))
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(LIMIT)
        yield ranks
    finally:
        for process in ranks:
            process.kill()


A, B = "a" * 32, "b" * 32


@pytest.mark.parametrize("tokens", [(A, A), (A, B), (None, A)], ids=["same", "other", "none"])
def test_ranks_of_torchrun_need_the_same_token(model: Path, tokens: tuple[str | None, ...], tmp_path: Path) -> None:
    with started(model, tmp_path, list(tokens)) as ranks:
        said = [(tmp_path / f"{rank}.err").read_text() for rank in range(2)]
        if tokens == (A, A):
            assert [process.exitcode for process in ranks] == [0, 0], said
            return
        assert all(process.exitcode in (1, 2) for process in ranks)
        assert all(text.count("\n") == 1 and text.startswith("ladder: rank ") for text in said), said
        assert any("has another token, or is a stranger: give all ranks the same --token-file" in text for text in said)


def test_a_token_file_is_for_torchrun(model: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(A)
    for tp in (1, 2):
        with pytest.raises(LadderError, match="--token-file is for ranks that torchrun starts"):
            LLM(model, tp=tp, token_file=tmp_path / "token")
    assert rank_pids() == []


def test_torch_is_not_asked_to_unpickle() -> None:
    """What comes over the network is never handed to pickle: of ours nothing is, and torch's own collectives of
    objects are not used.
    """
    package = Path(sys.modules["ladder"].__file__ or "").parent
    for file in package.rglob("*.py"):
        text = file.read_text()
        found = re.search(r"import pickle|pickle\.loads|(gather|broadcast|scatter|send|recv)_object", text)
        assert found is None, f"{file.name}: {found and found[0]}"
    assert hasattr(dist, "all_gather_object") and torch.__version__  # the names are still torch's
