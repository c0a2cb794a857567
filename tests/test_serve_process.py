"""`ladder serve` as a process: it listens on loopback, outlives its ranks, ends when asked to, and leaves nothing."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ladder import LLM, SamplingParams
from ladder.engine.frontend.supervisor import Restarts
from ladder.errors import install
from tests.checkpoints import tiny
from tests.processes import free_port
from tests.processes import listening as addresses
from tests.serving import listening, setup_of, wait_for
from tests.test_faults import assert_free, rank_pids, session, wait_until_gone

ASK: dict[str, Any] = {"prompt": "abc", "max_tokens": 400, "temperature": 0}
LIMIT = 120.0  # seconds for what would otherwise hang


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"), eos=(), layers=2)


def test_ranks_are_killed_under_requests(model: Path) -> None:
    """Streams go on where they were, whole answers come later, and /health says so meanwhile."""
    prompts = ["abc", "x", "Never wait", "for", "the network"]
    with LLM(model) as llm:
        expected = [result.text for result in llm.generate(prompts, SamplingParams(300))]
    setup, found = setup_of(model, tp=2, max_num_seqs=3), [""] * 5
    with listening(setup, restarts=Restarts(3, 0.3)) as server:
        client = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)

        def ask(number: int) -> None:
            given: dict[str, Any] = {"model": "tiny", "prompt": prompts[number], "max_tokens": 300, "temperature": 0}
            if number % 2:
                found[number] = client.completions.create(**given).choices[0].text
            else:
                for part in client.completions.create(**given, stream=True):
                    found[number] += part.choices[0].text

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        wait_for(lambda: bool(found[0]))
        os.kill(rank_pids()[1], signal.SIGKILL)
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        health = httpx.get(f"{server.url}/health").json()
        assert health["status"] == "restarting" and "rank 1 was killed by SIGKILL" in health["reason"]
        for thread in threads:
            thread.join(LIMIT)
        assert found == expected and server.llm.failures == 1
        assert httpx.get(f"{server.url}/health").json() == {"status": "ready"}
        client.close()
    assert rank_pids() == []


@contextmanager
def command(model: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`ladder serve`, and its address."""
    begin = [sys.executable, "-m", "ladder", "serve", str(model), "--port", "0", *more]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(begin, **pipes, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(f"serving {model.name} at http://127.0.0.1:"), line
            yield process, line.split()[-1]
        finally:
            for pid in session(process.pid):
                os.kill(pid, signal.SIGKILL)


def test_it_ends_when_it_is_asked_to(model: Path) -> None:
    """The request that runs is answered, nothing else is, and nothing is left."""
    answers: list[httpx.Response] = []
    with command(model, "--tp", "2") as (process, url):
        port = int(url.split(":")[-1].split("/")[0])
        assert ("127.0.0.1", port) in addresses(session(process.pid))
        assert {address for address, _ in addresses(session(process.pid))} == {"127.0.0.1"}  # and no other
        assert httpx.get(f"{url}/models").json()["data"][0]["id"] == model.name
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/completions", json=ASK, timeout=LIMIT))
        )
        thread.start()
        metrics = url.removesuffix("/v1") + "/metrics"
        wait_for(lambda: "ladder_sequences_running 1.0" in httpx.get(metrics).text)
        pids = session(process.pid)
        process.send_signal(signal.SIGTERM)
        thread.join(LIMIT)
        _, err = process.communicate(timeout=LIMIT)
        assert process.returncode == 0 and "Traceback" not in err, err
        assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 400
        wait_until_gone(pids, time.monotonic())
        assert_free(port)


def test_it_gives_up(model: Path) -> None:
    """Without restarts, the death of a rank is the end: its name, and exit status 1."""
    with command(model, "--restarts", "0") as (process, _):
        rank = next(pid for pid in reversed(session(process.pid)) if pid != process.pid and not _parents(pid))
        os.kill(rank, signal.SIGKILL)
        _, err = process.communicate(timeout=LIMIT)
        last = err.splitlines()[-1]
        assert process.returncode == 1 and last.startswith("ladder: given up after 1 failures: rank 0 was killed"), err
        wait_until_gone(session(process.pid), time.monotonic())


def _parents(pid: int) -> bool:
    """Whether it is no rank: the resource tracker, or the server that ranks are forked from."""
    line = Path(f"/proc/{pid}/cmdline").read_bytes()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return b"resource_tracker" in line or bool(children)


@pytest.mark.parametrize("flags, message", [
    (["--engine", "vllm"], "serving on vLLM needs vllm: pip install"),
    (["--engine", "tgi"], "unknown engine 'tgi'"),
    (["--port", "70000"], "port must be from 0 to 65535"),
    (["--max-body", "0"], "max-body must be at least 1"),
    (["--request-timeout", "0"], "request-timeout must be above 0"),
    (["--api-key", "a", "--api-key-file", "b"], "both --api-key and --api-key-file"),
    (["--api-key", ""], "the key in --api-key must be printable"),
    (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
    (["no-such-directory"], "no-such-directory"),
    (["one", "--model", "two"], "two models were given"),
])  # fmt: skip
def test_refused(run: Callable[..., tuple[int, str, str]], flags: list[str], message: str) -> None:
    status, out, err = run("serve", *flags)
    assert (status, out) == (2, "") and message in err.splitlines()[-1], err


def test_a_port_that_is_taken(run: Callable[..., tuple[int, str, str]]) -> None:
    port = free_port()
    with subprocess.Popen([sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"],
                          stderr=subprocess.DEVNULL) as other:  # fmt: skip
        try:
            wait_for(lambda: ("127.0.0.1", port) in addresses([other.pid]))
            status, _, err = run("serve", "--port", port)
        finally:
            other.kill()
    assert status == 2 and f"cannot listen on 127.0.0.1 port {port}: Address already in use" in err


def test_without_the_packages(run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("ladder.server.") and not name.endswith("options")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("ladder.server.run", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    status, _, err = run("serve")
    assert status == 2 and f"serving needs uvicorn: {install('serve')}" in err
