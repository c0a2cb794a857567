"""Ranks that torchrun started, on one node and on two: the command joins their world."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ladder import LLM, SamplingParams
from tests.checkpoints import tiny

LIMIT = 180.0  # seconds for what would otherwise hang; it needs about twenty
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
PROMPTS = [[5, 17, 9], [1], [7] * 30]
NEW = 12
ONE_NODE = ("--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def answers(model: Path) -> list[dict[str, object]]:
    """What one process prints."""
    with LLM(model, wiring="ladder") as llm:
        return [vars(result) for result in llm.generate(PROMPTS, SamplingParams(NEW))]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def living() -> dict[tuple[int, int], int]:
    """The processes that have not ended, by number and start, which no two share; of each its parent's number."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            if entry.name.isdigit():
                state = (entry / "stat").read_text().rpartition(")")[2].split()
                if state[0] not in "ZX":
                    found[int(entry.name), int(state[19])] = int(state[1])
    return found


class Run:
    """A torchrun under way, and its ranks, which have sessions of their own."""

    def __init__(self, agent: subprocess.Popen[str]) -> None:
        self.agent = agent
        self._seen: set[tuple[int, int]] = set()

    def family(self) -> list[int]:
        """Those of the agent and its descendants, as far as they have been seen, that live."""
        now = living()
        numbers = {self.agent.pid} | {pid for pid, _ in self._seen & now.keys()}
        while more := {own for own, parent in now.items() if parent in numbers} - self._seen:
            self._seen |= more
            numbers |= {pid for pid, _ in more}
        return sorted(pid for pid, _ in self._seen & now.keys())

    def rank(self, local: int) -> int:
        mark = f"LOCAL_RANK={local}".encode()
        found = [pid for pid in self.family() if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
        assert len(found) == 1
        return found[0]

    def end(self) -> tuple[int, str, str]:
        """Exit status, standard output, standard error; nobody is left."""
        deadline = time.monotonic() + LIMIT
        while True:
            self.family()
            try:
                out, err = self.agent.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                assert time.monotonic() < deadline, "torchrun does not end"
        deadline = time.monotonic() + 10
        while left := self.family():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        return self.agent.returncode, out, err

    def first_line(self) -> str:
        """Byte by byte: what a buffer would read ahead, `communicate` would never see."""
        assert self.agent.stdout is not None
        line = b""
        while not line.endswith(b"\n") and (byte := os.read(self.agent.stdout.fileno(), 1)):
            line += byte
        return line.decode()


@contextmanager
def torchrun(model: Path, *flags: str, prompts: list[list[int]] = PROMPTS, more: str = "") -> Iterator[Run]:
    """`torchrun FLAGS -m ladder generate ...`, ended with this block."""
    own = f"--model {model} --wiring ladder --json --max-new-tokens {NEW} {more}".split()
    own += [f"--token-ids={','.join(map(str, prompt))}" for prompt in prompts]
    command = [TORCHRUN, *flags, "-m", "ladder", "generate", *own]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as agent:  # type: ignore[call-overload]
        run = Run(agent)
        try:
            yield run
        finally:
            family = run.family()
            if agent.poll() is None:
                agent.kill()
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def lines(out: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.splitlines()]


def test_one_node(model: Path, answers: list[dict[str, object]]) -> None:
    with torchrun(model, *ONE_NODE, more="--batch 2 --chunk 8") as run:
        status, out, err = run.end()
    assert (status, lines(out)) == (0, answers), err
    assert "Traceback" not in err


def test_two_nodes(model: Path, answers: list[dict[str, object]]) -> None:
    """Only the first prints."""
    node = f"--nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port {free_port()} --node-rank".split()
    with torchrun(model, *node, "1", more="--tp 2") as second, torchrun(model, *node, "0", more="--tp 2") as first:
        begun = first.first_line()
        assert first.family() and second.family()
        status, out, err = first.end()
        assert (status, lines(begun + out)) == (0, answers), err
        status, out, err = second.end()
        assert (status, out) == (0, ""), err


@pytest.mark.parametrize("more, message", [
    ("--tp 4", "tp is 4, but torchrun started 2 ranks: leave out --tp"),
    ("--wiring rope", "unknown wiring 'rope'"),
])  # fmt: skip
def test_bad_input(model: Path, more: str, message: str) -> None:
    with torchrun(model, *ONE_NODE, more=more) as run:
        status, out, err = run.end()
    assert status != 0 and out == ""
    assert f"ladder: {message}" in err


def test_three_ranks_cannot_share_eight_heads(model: Path) -> None:
    with torchrun(model, "--standalone", "--nproc-per-node", "3") as run:
        status, out, err = run.end()
    assert status != 0 and out == "" and "ladder: 3 ranks cannot share 8 heads" in err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed(model: Path, rank: int) -> None:
    """torchrun ends the other rank, which has one sentence to say at most."""
    with torchrun(model, *ONE_NODE, prompts=[[1]] * 400, more="--batch 1") as run:
        assert run.first_line()
        os.kill(run.rank(rank), signal.SIGKILL)
        begin = time.monotonic()
        status, _, err = run.end()
        assert time.monotonic() - begin < 20
    assert status != 0 and "Signal 9 (SIGKILL)" in err
    assert "ladder/cli" not in err, err  # no traceback of ours before torchrun's own


def test_a_second_world_at_the_same_port(model: Path, answers: list[dict[str, object]]) -> None:
    """It ends by itself, and the first goes on."""
    port = free_port()
    flags = ["--nnodes", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    prompts = [*PROMPTS, *[[1]] * 100]
    with torchrun(model, *flags, prompts=prompts, more="--batch 1") as first:
        begun = first.first_line()
        with torchrun(model, *flags) as second:
            status, out, _ = second.end()
        assert status != 0 and out == ""
        assert first.agent.poll() is None, "the first was done before the second came: give it more to do"
        status, out, err = first.end()
    found = lines(begun + out)
    assert (status, found[: len(PROMPTS)], len(found)) == (0, answers, len(prompts)), err
