"""Whatever happens to a rank: one clear error that names it, nobody left behind, no port open, and the next run works.

Every test that starts ranks sees them answer rightly first, so each is the next run of the one before.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from multiprocessing import active_children
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from ladder import LLM, SamplingParams
from ladder.checkpoint import SINGLE, Directory, load
from ladder.engine.executors.heartbeat import Heartbeat
from ladder.engine.executors.multi_process import MultiProcessExecutor
from ladder.engine.executors.worker import run_rank
from ladder.engine.model_runner import ModelRunner
from ladder.engine.options import EngineOptions
from ladder.engine.setup import Setup
from ladder.errors import LadderError, RankError
from ladder.model import Decoder
from tests.checkpoints import tiny
from tests.processes import listening

SOON = 10.0  # seconds in which every rank must be gone
LIMIT = 120.0  # seconds for commands that would otherwise hang; they need about twenty
PROMPT = [5, 17, 9]
SHORT = SamplingParams(3)
MANY, LONG = [PROMPT] * 64, SamplingParams(480)  # minutes of work, never finished here


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def answer(model: Path) -> list[int]:
    """What one process says."""
    with LLM(model) as llm:
        return llm.generate([PROMPT], SHORT)[0].token_ids


def state(pid: int) -> tuple[str, int, int]:
    """A process's state, parent and session; "X" where there is none."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0, 0
    return found[0], int(found[1]), int(found[3])


def wait_until_gone(pids: list[int], since: float, limit: float = SOON) -> None:
    """A zombie has ended, it waits only to be counted."""
    while left := [pid for pid in pids if state(pid)[0] not in "ZX"]:
        assert time.monotonic() - since < limit, f"still there after {limit} s: {left}"
        time.sleep(0.02)


def assert_free(port: int) -> None:
    """Nobody answers there, and the next server may have it."""
    with socket.socket() as asking, pytest.raises(ConnectionRefusedError):
        asking.connect(("127.0.0.1", port))
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()


def rank_pids() -> list[int]:
    """The processes of the ranks that this process has started, in rank order."""
    ranks = [child for child in active_children() if child.name.startswith("ladder-rank-")]
    return [child.pid or 0 for child in sorted(ranks, key=lambda child: child.name)]


@contextmanager
def ranks(
    model: Path, answer: list[int], target: Callable[..., None] = run_rank, **options: Any
) -> Iterator[tuple[LLM, list[int]]]:
    """An LLM that has answered rightly, and its ranks' processes; afterwards they are gone and their ports are free."""
    setup = Setup(EngineOptions(model, **{"tp": 2, "max_num_seqs": 4, **options}))
    processes = MultiProcessExecutor(setup, target=target)
    pids = processes.pids
    with LLM.over(setup, processes) as llm:
        assert llm.generate([PROMPT], SHORT)[0].token_ids == answer
        assert pids == rank_pids() and not any(state(pid)[0] in "ZX" for pid in pids)
        ports = listening(pids)
        assert {address for address, _ in ports} == {"127.0.0.1"} and not listening([os.getpid()])
        yield llm, pids
        begin = time.monotonic()
    wait_until_gone(pids, begin)
    for _, port in ports:
        assert_free(port)


def in_step(harm: Callable[[], object], number: int) -> None:
    """Come to harm in the step of this number."""
    original, steps = ModelRunner.step, count(1)
    patch.object(ModelRunner, "step", lambda runner: harm() if next(steps) == number else original(runner)).start()


def in_load(harm: Callable[[], Any]) -> None:
    """Come to harm when a first weight has been read."""
    broken = lambda model, source, check, _: load(model, source, check, lambda _: harm())  # noqa: E731
    patch("ladder.engine.executors.worker.load", broken).start()


def self_signal(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def fail() -> NoReturn:
    raise ZeroDivisionError("a bug\nin a rank")


def harmed(victim: int, prepare: Callable[[], None], rank: int, *arguments: Any) -> None:
    """`run_rank`, one of the ranks prepared for its end."""
    if rank == victim:
        prepare()
    run_rank(rank, *arguments)


def assert_over(llm: LLM, message: str) -> None:
    """Every further call says the same."""
    for _ in range(2):
        with pytest.raises(RankError) as again:
            llm.generate([PROMPT], SHORT)
        assert str(again.value) == message


@pytest.mark.parametrize("tp, rank", [(2, 0), (2, 1), (4, 3)])
def test_killed_while_it_works(model: Path, answer: list[int], tp: int, rank: int) -> None:
    with ranks(model, answer, tp=tp) as (llm, pids):
        stream = llm.stream(MANY, LONG)
        for _, _ in zip(range(30), stream, strict=False):
            pass
        os.kill(pids[rank], signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(RankError) as error:
            for _ in stream:
                pass
        wait_until_gone(pids, begin)
        assert str(error.value) == f"rank {rank} was killed by SIGKILL; all ranks were stopped"
        assert_over(llm, str(error.value))


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_while_there_is_nothing_to_do(model: Path, answer: list[int], rank: int) -> None:
    """The others end although nobody asks; who asks later is told."""
    with ranks(model, answer) as (llm, pids):
        time.sleep(1.5)
        os.kill(pids[rank], signal.SIGKILL)
        wait_until_gone(pids, time.monotonic())
        assert_over(llm, f"rank {rank} was killed by SIGKILL; all ranks were stopped")


@pytest.mark.parametrize("rank", [0, 1])
def test_stops_answering(model: Path, answer: list[int], rank: int) -> None:
    with ranks(model, answer, timeout=3.0) as (llm, pids):
        stream = llm.stream(MANY, LONG)
        next(stream)
        os.kill(pids[rank], signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(RankError) as error:
            for _ in stream:
                pass
        assert time.monotonic() - begin > 2.5  # not given up too early
        wait_until_gone(pids, begin, 3.0 + SOON)
        assert str(error.value) == f"rank {rank} has not answered for 3 s; all ranks were stopped"


@pytest.mark.parametrize("rank", [0, 1])
def test_is_stuck(model: Path, answer: list[int], rank: int) -> None:
    """It lives, but its step does not end: the one who waits for it is not the one to blame."""
    with ranks(model, answer, partial(harmed, rank, partial(in_step, partial(time.sleep, 300), 20)), timeout=3.0) as (
        llm,
        pids,
    ):
        begin = time.monotonic()
        with pytest.raises(RankError, match=f"^rank {rank} has not answered for 3 s; all ranks were stopped$"):
            llm.generate(MANY, LONG)
        wait_until_gone(pids, begin, 3.0 + SOON)


def test_nobody_listens_any_more(model: Path, answer: list[int]) -> None:
    """A caller that closes while its words fill the pipe of a stopped rank does not wait for that rank."""
    with ranks(model, answer) as (llm, pids):
        os.kill(pids[0], signal.SIGSTOP)

        def talk() -> None:
            with contextlib.suppress(LadderError, RankError):
                while True:
                    llm.submit([1] * 400, SHORT)

        thread = threading.Thread(target=talk)
        thread.start()
        time.sleep(1.5)
        begin = time.monotonic()
        llm.close()
        thread.join(SOON)
        assert not thread.is_alive() and time.monotonic() - begin < SOON


@pytest.mark.parametrize("tp", [1, 2])
def test_closed(model: Path, tp: int) -> None:
    with LLM(model, tp=tp) as llm:
        stream = llm.stream([PROMPT], SHORT)
        next(stream)
    for use in (lambda: llm.generate([PROMPT], SHORT), lambda: list(stream), lambda: llm.submit(PROMPT, SHORT)):
        with pytest.raises(LadderError, match="closed"):
            use()
    llm.cancel(0)
    llm.close()


@pytest.mark.parametrize("rank, harm, message", [
    (0, fail, "failed: ZeroDivisionError: a bug in a rank"),
    (1, fail, "failed: ZeroDivisionError: a bug in a rank"),
    (1, partial(os._exit, 0), "ended unexpectedly.*"),
])  # fmt: skip
def test_fails_while_it_works(
    model: Path, answer: list[int], rank: int, harm: Callable[[], object], message: str
) -> None:
    with ranks(model, answer, partial(harmed, rank, partial(in_step, harm, 20))) as (llm, pids):
        with pytest.raises(RankError) as error:
            llm.generate(MANY, LONG)
        wait_until_gone(pids, time.monotonic())
        assert re.fullmatch(f"rank {rank} {message}; all ranks were stopped", str(error.value)), str(error.value)


@pytest.mark.parametrize("harm, message", [
    (partial(self_signal, signal.SIGKILL), "was killed by SIGKILL"),
    (partial(self_signal, signal.SIGSTOP), "has not answered for 3 s"),
    (fail, "failed: ZeroDivisionError: a bug in a rank"),
], ids=["killed", "stopped", "raises"])  # fmt: skip
def test_while_it_loads(model: Path, harm: Callable[[], object], message: str) -> None:
    setup = Setup(EngineOptions(model, tp=2, timeout=3.0))
    with pytest.raises(RankError) as error:
        MultiProcessExecutor(setup, target=partial(harmed, 1, partial(in_load, harm)))
    assert str(error.value) == f"rank 1 {message}; all ranks were stopped"
    assert rank_pids() == []


def load_slowly(rank: int, *arguments: Any) -> None:
    """`run_rank`, which hears of the other ranks and then takes more than three times the time-out for its weights:
    each read takes a while, and the first as long as the time-out.
    """
    read, reads = Directory.read, count()

    def slow_read(self: Directory, *which: Any) -> torch.Tensor:
        time.sleep(0.15 if next(reads) else 2.5)
        return read(self, *which)

    def load_after_talk(model: Decoder, *more: Any) -> Decoder:
        model.comm.all_gather(torch.zeros(1))
        return load(model, *more)

    patch.object(Directory, "read", slow_read).start()
    patch("ladder.engine.executors.worker.load", load_after_talk).start()
    run_rank(rank, *arguments)


def test_takes_long_to_load(model: Path, answer: list[int]) -> None:
    begin = time.monotonic()
    with ranks(model, answer, load_slowly, timeout=2.0):
        assert time.monotonic() - begin > 3 * 2.0


def count_threads(out: Path, rank: int, *arguments: Any) -> None:
    """`run_rank`, which leaves a note of how many threads a step has."""
    original = ModelRunner.step
    patch.object(
        ModelRunner, "step", lambda runner: (out.write_text(str(torch.get_num_threads())), original(runner))[1]
    ).start()
    run_rank(rank, *arguments)


def test_ranks_do_not_fight_for_cores(model: Path, answer: list[int], tmp_path: Path) -> None:
    with ranks(model, answer, partial(count_threads, tmp_path / "threads")):
        assert int((tmp_path / "threads").read_text()) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_a_caller_whose_progress_raises(model: Path) -> None:
    """It is the watch that tells the progress: it must not end without a word."""

    def progress(count: int) -> None:
        raise ZeroDivisionError("the caller's own")

    with pytest.raises(ZeroDivisionError, match="the caller's own"):
        MultiProcessExecutor(Setup(EngineOptions(model, tp=2)), progress)
    assert rank_pids() == []


def test_a_script_without_a_guard_is_told(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"from ladder import LLM\nwith LLM({str(model)!r}, tp=2) as llm:\n    pass\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1 and "under if __name__ == '__main__'" in done.stderr.splitlines()[-1], done.stderr


def test_bad_weights_are_the_users_business(tmp_path: Path) -> None:
    """They are found by the rank whose shard has them, and the answer is the same as in one process."""
    tiny(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.layers.2.mlp.up_proj.weight"][-1, -1] = torch.nan  # the last rank's
    save_file(tensors, tmp_path / SINGLE)
    messages = []
    for tp in (1, 2):
        with pytest.raises(LadderError, match=r"'model\.layers\.2\.mlp\.up_proj\.weight' holds values") as error:
            LLM(tmp_path, tp=tp, check=True)
        messages.append(str(error.value))
    assert messages[0] == messages[1] and rank_pids() == []


@contextmanager
def command(model: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """`ladder generate --tp 2` with minutes of work, in a session of its own."""
    flags = ["--model", str(model), "--tp", "2", "--max-num-seqs", "4", "--max-new-tokens", "480", *more]
    flags += ["--token-ids=5,17,9"] * len(MANY)
    begin = [sys.executable, "-m", "ladder", "generate", *flags]
    as_from_a_terminal = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen(begin, **pipes, start_new_session=True, preexec_fn=as_from_a_terminal) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            for pid in session(process.pid):
                os.kill(pid, signal.SIGKILL)


def session(leader: int) -> list[int]:
    """The living processes of a session."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in sorted(pids) if (found := state(pid))[2] == leader and found[0] not in "ZX"]


def workers(leader: int) -> list[int]:
    """Of these, the ranks, in the order of their start: they have no children, and watch over nothing."""
    family = session(leader)
    parents = {state(pid)[1] for pid in family}
    leaves = [pid for pid in family if pid not in parents]
    return [pid for pid in leaves if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def first_words(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None and len(process.stdout.read(1)) == 1


def test_the_command_tells_who_was_killed(model: Path) -> None:
    with command(model) as process:
        first_words(process)
        ranks = workers(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        begin = time.monotonic()
        _, err = process.communicate(timeout=LIMIT)
        assert (process.returncode, err) == (1, b"ladder: rank 1 was killed by SIGKILL; all ranks were stopped\n")
        wait_until_gone(session(process.pid), begin)


def test_a_pause_is_no_failure_and_ctrl_c_is_the_end(model: Path) -> None:
    """Ctrl-Z for longer than the time-out, then fg. Ctrl-C goes to the whole group, as from a terminal; no rank
    complains.
    """
    with command(model, "--timeout", "5") as process:  # longer than a busy machine lets a process wait
        first_words(process)
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(7)
        os.killpg(process.pid, signal.SIGCONT)
        for _ in range(3):
            first_words(process)
        time.sleep(6)
        assert process.poll() is None
        interrupt(process)


def test_a_pause_at_any_line_of_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats are old after a pause, wherever it began. Ranks that stay silent afterwards are named all the same."""
    now = 100.0
    monkeypatch.setattr("ladder.engine.executors.multi_process.time.monotonic", lambda: now)
    executor = MultiProcessExecutor.__new__(MultiProcessExecutor)
    shared = [100.0, 0.0, 99.5, 99.9]  # of each rank: its last heartbeat, and since when it computes
    executor._heartbeats = [Heartbeat(shared, rank) for rank in range(2)]
    executor._start, executor._timeout, executor._looked, executor._resumed = 0.0, 2.0, 100.0, 0.0
    assert executor._unresponsive() is None
    now = 110.0  # nobody could beat meanwhile
    assert executor._unresponsive() is None
    now = 111.9
    shared[0] = now
    assert executor._unresponsive() is None
    now = 112.1
    assert "rank 1 has not answered for 2 s" in str(executor._unresponsive())


def test_ctrl_c_while_it_starts(model: Path) -> None:
    """The ranks are there and load."""
    with command(model) as process:
        while len(workers(process.pid)) < 2:
            time.sleep(0.02)
            assert process.poll() is None
        interrupt(process)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGINT)
    begin = time.monotonic()
    _, err = process.communicate(timeout=LIMIT)
    wait_until_gone(session(process.pid), begin)
    assert process.returncode == 130, err
    assert b"Traceback" not in err and err.count(b"\n") <= 1, err


def test_the_caller_is_killed(model: Path) -> None:
    with command(model) as process:
        first_words(process)
        pids = session(process.pid)
        assert len(pids) >= 3
        process.kill()
        wait_until_gone(pids, time.monotonic())
        assert session(process.pid) == []


def test_after_all_this(model: Path, answer: list[int]) -> None:
    with ranks(model, answer):
        pass
