"""Commands of README.md and docs/ that take processes of their own: servers and their clients, ranks of torchrun; what
is handed over to vLLM; and programs that are no command of ours.
"""

import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from experiments.tables import pages
from ladder.vllm import serve
from ladder.vllm.settings import Settings
from tests.blocks import ROOT
from tests.commands import made, of_kind, small, stand_ins
from tests.processes import free_port
from tests.test_faults import session
from tests.test_torchrun import TORCHRUN
from tests.test_torchrun import Run as Agent
from tests.test_vllm import handed, overrides

Run = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.filterwarnings("ignore")
LIMIT = 300.0  # seconds for what would otherwise hang
SERVERS, CLIENTS, VLLM = of_kind("serve"), of_kind("client"), of_kind("vllm engine")
PROGRAMS = of_kind("program")
# what they run under torchrun, each once
RANKS = {shlex.join(words[words.index("ladder") :]): words for words in of_kind("torchrun").values()}
ON_A_GPU = ("ladder.bench.one_rank", "ladder.bench.trace.step_trace")
ELSEWHERE = {"ladder.bench.overlap": "tests/test_trace.py"}  # where it runs with fewer steps
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, with everything that commands read."""
    monkeypatch.chdir(stand_ins(tmp_path))
    return tmp_path


# --- servers and clients --------------------------------------------------------------------------------------------


@contextmanager
def started(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-m", *words], **PIPES, start_new_session=True) as process:
        try:
            yield process
        finally:
            for pid in session(process.pid):
                os.kill(pid, signal.SIGKILL)


def address(server: subprocess.Popen[str]) -> str:
    """Of a server that listens: for a client on this machine."""
    assert server.stdout is not None
    line = server.stdout.readline()
    found = re.fullmatch(r"serving \S+ at http://\S+:(\d+)/v1\n", line)
    assert found, line
    return f"http://127.0.0.1:{found[1]}"


def test_servers_and_their_clients(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every server that the pages start, side by side; what they send to one; then SIGTERM."""
    key, urls = {"Authorization": f"Bearer {(here / 'key').read_text()}"}, {}
    with ExitStack() as stack:
        servers = {line: stack.enter_context(started(small(words))) for line, words in SERVERS.items()}
        for line, words in SERVERS.items():
            urls[line] = url = address(servers[line])
            name = "mine" if "mine" in words else "DIR"
            assert httpx.get(f"{url}/v1/models", timeout=LIMIT).status_code == (
                401 if "--api-key-file" in words else 200
            )
            assert httpx.get(f"{url}/v1/models", headers=key, timeout=LIMIT).json()["data"][0]["id"] == name
            asked = {"model": name, "prompt": "Once", "max_tokens": 1}
            answer = httpx.post(f"{url}/v1/completions", json=asked, headers=key, timeout=LIMIT)
            assert answer.json()["usage"]["completion_tokens"] == 1
        unlocked = next(url for line, url in urls.items() if "--api-key-file" not in line)
        for words in CLIENTS.values():
            monkeypatch.setattr("sys.stdin", StringIO("Once upon a time\n"))
            status, out, err = run(*(unlocked if word.startswith("http:") else word for word in small(words)[1:]))
            assert status == 0 and out.strip(), err
            assert (file := made(words)) is None or file.exists()
        lines = [json.loads(line) for line in Path("load.jsonl").read_text().splitlines()]
        assert [line["completed"] for line in lines if "completed" in line] == [3] * 5  # of the runs of both lines
        for server in servers.values():
            server.send_signal(signal.SIGTERM)
        for server in servers.values():
            _, err = server.communicate(timeout=LIMIT)
            assert server.returncode == 0 and "Traceback" not in err, err


# --- torchrun -------------------------------------------------------------------------------------------------------


def on_this_machine(words: list[str]) -> list[str]:
    """Two ranks instead of several machines."""
    at = words.index("-m")
    port = str(free_port())
    values = {"--nnodes": "1", "--nproc-per-node": "2", "--rdzv-endpoint": f"127.0.0.1:{port}"}
    flags = [values.get(before, word) for before, word in pairwise(words[:at])]
    if "--rdzv-endpoint" not in words:
        flags += ["--master-port", port]
    return [TORCHRUN, *flags, "-m", *small(words[at + 1 :])]


def test_torchrun_keeps_its_options() -> None:
    words = shlex.split("torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 -m ladder generate --tp 16")
    flags = on_this_machine(words)[1:]
    assert flags[:4] == ["--nnodes", "1", "--nproc-per-node", "2"] and flags[4] == "--rdzv-endpoint"
    assert flags[6:9] == ["-m", "ladder", "generate"]


@pytest.mark.parametrize("command", RANKS)
def test_ranks_of_torchrun(here: Path, command: str) -> None:
    words = RANKS[command]
    own = words[words.index("ladder") :]
    if (out := made(own)) is not None:
        shutil.rmtree(out, ignore_errors=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(on_this_machine(words), env=environment, start_new_session=True, **PIPES) as process:
        agent = Agent(process)
        try:
            status, said, err = agent.end()
        finally:
            for pid in agent.family():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert status == 0 and said.strip() and "Traceback" not in err and "Warning" not in err, err
    if out is not None:
        assert (out / "config.json").exists()


# --- vLLM -----------------------------------------------------------------------------------------------------------


def handover(words: list[str]) -> serve.Handover:
    assert words[:2] == ["ladder", "serve"] and words[3:5] == ["--engine", "vllm"]
    return handed(Path(words[2]), *words[5:])


@pytest.fixture
def deep(here: Path) -> None:
    """A DIR of 32 layers: nothing but its config.json is read."""
    config = json.loads(Path("DIR/config.json").read_text())
    Path("DIR/config.json").write_text(json.dumps({**config, "num_hidden_layers": 32}))


@pytest.mark.usefixtures("deep")
def test_what_is_handed_over_to_vllm() -> None:
    """Our options by vLLM's names, and vLLM's own as they are."""
    lines = [words for words in VLLM.values() if words[1] == "serve"]
    assert len(lines) > 5
    for words in lines:
        arguments, rest = list(handover(words).arguments), words[5:]
        assert Path(arguments[0]) == Path(words[2])
        if "--tp" in rest:
            at = rest.index("--tp")
            assert arguments[arguments.index("--tensor-parallel-size") + 1] == rest[at + 1]
            rest = rest[:at] + rest[at + 2 :]
        if rest[:1] == ["--wiring"]:
            assert overrides(handover(words))["wiring"] == rest[1]
            rest = rest[2:]
        assert arguments[len(arguments) - len(rest) :] == rest


@pytest.mark.usefixtures("deep")
def test_vllm_s_own_commands() -> None:
    """They say what `ladder serve --engine vllm` hands over for the same model."""
    known = [handover(words) for words in VLLM.values() if words[1] == "serve"]
    lines = list(of_kind("vllm").values())
    assert len(lines) == 3
    for words in lines:
        assert words[:2] == ["vllm", "serve"] and len(words) == 5
        model, option, value = words[2:]
        ours = [each for each in known if Path(each.arguments[0]) == Path(model)]
        if option == "--additional-config":
            assert Settings.read(json.loads(value)) == Settings(reference=True)
        elif option == "--hf-overrides":
            given = json.loads(value)
            assert any(given.items() <= (overrides(each) or {}).items() for each in ours)
        else:
            assert any(serve.value_of(each.arguments, option) == value for each in ours), option


def test_evaluation_by_vllm(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, up to that sentence; with it: tests/vllm."""
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    lines = [words for words in VLLM.values() if words[1] == "eval"]
    assert len(lines) == 1
    status, _, err = run(*lines[0][1:])
    assert status == 2 and "evaluating on vLLM needs vllm: pip install 'vllm>=0.26'" in err


# --- other programs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", PROGRAMS)
def test_programs(
    here: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process; calibrations for a second instead of a minute."""
    words = [word if word != "60" else "1" for word in PROGRAMS[command][1:]]
    module = words[1] if words[0] == "-m" else None
    if module in ELSEWHERE:
        assert module in (ROOT / ELSEWHERE[module]).read_text()
        return
    if module in ON_A_GPU and torch.cuda.is_available():
        pytest.skip("there is a GPU, and it would measure for minutes")
    for folder in ("docs", "results/published"):
        shutil.copytree(ROOT / folder, here / folder)
    for file in ("README.md", "results/one_rank_h200.jsonl"):
        shutil.copy(ROOT / file, here / file)
    before = {path: path.read_bytes() for path in (here / "docs").rglob("*") if path.is_file()}
    monkeypatch.setattr(pages, "ROOT", here)
    monkeypatch.setattr("sys.argv", words[1:] if module else words)
    status: Any = 0
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            shutil.rmtree(words[1])
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    except SystemExit as left:
        status = left.code
    out, err = capsys.readouterr()
    if module in ON_A_GPU:
        assert status == 2 and re.search("GPU|CUDA", err.splitlines()[-1]), err
        return
    assert not status, err
    assert before == {path: path.read_bytes() for path in before}  # what they write is what is there
    assert module is None or module.startswith("experiments.") or out.strip()
    assert module is not None or (here / words[1] / "config.json").exists()
