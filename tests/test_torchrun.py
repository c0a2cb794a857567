"""Ranks that torchrun started, on one node and on two: the command joins their world."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import typer
from torch.distributed.run import get_args_parser

from ladder import LLM, SamplingParams
from ladder.cli import app, main
from tests.checkpoints import tiny
from tests.processes import free_port, world

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


@pytest.mark.parametrize("ranks, more, message", [
    (2, ["--wiring", "rope"], "unknown wiring 'rope'"),
    (2, ["--tp", "4"], "tp is 4, but torchrun started 2 ranks: leave out --tp"),
    (3, [], "3 ranks cannot share 8 heads"),
])  # fmt: skip
def test_refused_before_the_ranks_meet(
    ranks: int,
    more: list[str],
    message: str,
    model: Path,
    run: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of them is here, and nobody else: it does not wait for them."""
    for name, value in world(ranks)[1].items():
        monkeypatch.setenv(name, value)
    status, out, err = run("generate", "--model", model, "--token-ids=1", *more)
    assert status == 2 and out == "" and err.startswith(f"ladder: {message}") and err.count("\n") == 1


def test_a_rank_is_killed(model: Path) -> None:
    """torchrun ends the other rank, which has one sentence to say at most."""
    with torchrun(model, *ONE_NODE, prompts=[[1]] * 400, more="--max-num-seqs 1") as run:
        assert run.first_line()
        os.kill(run.rank(0), signal.SIGKILL)
        begin = time.monotonic()
        status, _, err = run.end()
        assert time.monotonic() - begin < 20
    assert status != 0 and "Signal 9 (SIGKILL)" in err
    assert "ladder/cli" not in err, err  # no traceback of ours before torchrun's own


def as_rank(told: dict[str, str], out: Path, arguments: list[str]) -> None:
    """`ladder ARGUMENTS` as a rank of that world; what it says goes to files."""
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{out}.{kind}", os.O_WRONLY | os.O_CREAT), number)
    torch.set_num_threads(1)
    os.environ.update(told)
    sys.argv = ["ladder", *arguments]
    main()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed_and_nobody_ends_the_other(model: Path, rank: int, tmp_path: Path) -> None:
    """It ends by itself, with one sentence."""
    arguments = ["generate", "--model", str(model), "--wiring", "ladder", "--json", "--max-num-seqs", "1"]
    arguments += ["--max-new-tokens", str(NEW), *["--token-ids=1"] * 400]
    context = get_context("forkserver")
    told = [(each, tmp_path / str(number), arguments) for number, each in enumerate(world(2))]
    ranks = [context.Process(target=as_rank, args=each, daemon=True) for each in told]
    for process in ranks:
        process.start()
    try:
        deadline = time.monotonic() + LIMIT
        while not (tmp_path / "0.out").exists() or not (tmp_path / "0.out").read_text():
            assert time.monotonic() < deadline and all(process.is_alive() for process in ranks)
            time.sleep(0.02)
        ranks[rank].kill()
        for process in ranks:
            process.join(20)
        assert [process.exitcode for process in ranks] == ([-9, 1] if rank == 0 else [1, -9])
    finally:
        for process in ranks:
            process.kill()
    said = (tmp_path / f"{1 - rank}.err").read_text().splitlines()
    said = [line for line in said if not line.startswith("ladder: warning: the weights of")]  # run as another wiring
    assert len(said) == 1 and said[0].startswith(f"ladder: rank {1 - rank} lost the others: "), said


def test_a_second_world_at_the_same_port(model: Path, answers: list[dict[str, object]]) -> None:
    """It ends by itself, and the first goes on."""
    port = free_port()
    flags = ["--nnodes", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    prompts = [*PROMPTS, *[[1]] * 40]  # so that the ranks are there for a while
    with torchrun(model, *flags, prompts=prompts, more="--max-num-seqs 2 --prefill-chunk 8") as first:
        begun = first.first_line()
        ranks = [first.rank(local) for local in (0, 1)]
        for pid in ranks:  # they wait, so that the other finds them there
            os.kill(pid, signal.SIGSTOP)
        with torchrun(model, *flags) as second:
            status, out, _ = second.end()
        assert status != 0 and out == ""
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
        status, out, err = first.end()
    found = lines(begun + out)
    assert (status, found[: len(PROMPTS)], len(found)) == (0, answers, len(prompts)) and "Traceback" not in err, err


def test_torchrun_leaves_every_option_to_its_verb() -> None:
    """argparse knows its own options by their beginnings, behind the program's name too, and refuses ambiguous ones."""
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {"adapt", "train", "generate"} <= set(verbs)
    for verb, command in verbs.items():
        for flag in (flag for parameter in command.params for flag in parameter.opts if flag.startswith("-")):
            line = ["ladder", verb, flag, "value"]
            asked = get_args_parser().parse_args(["--nproc-per-node", "2", "-m", *line])
            assert [asked.training_script, *asked.training_script_args] == line
