"""`ladder serve --engine vllm` at TP 2, with OpenAI's own client; and what happens when a worker is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import openai
import psutil
import pytest

from ladder.checkpoint import Random, load, save
from ladder.model import Decoder
from tests.checkpoints import byte_tokenizer
from tests.processes import free_port
from tests.vllm.conftest import SWITCHES
from tests.vllm.references import config

LIMIT = 600.0  # seconds; a start takes a minute of an idle machine
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "mine"
    save(load(Decoder(config("llama").rewired("ladder")), Random(seed=5, deviation=0.15)), directory)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@contextmanager
def serving(model: Path, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], openai.OpenAI]]:
    """The command, until it answers. Its processes are ended with it."""
    port = free_port()
    command = [sys.executable, "-m", "ladder", "serve", str(model), "--engine", "vllm", "--tp", "2"]
    command += ["--port", str(port), "--dtype", "float32", "--max-num-seqs", "64", "--max-model-len", "400"]
    told = {**os.environ, **SWITCHES, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as opened:
        process = subprocess.Popen(command, env=told, stdout=opened, stderr=opened)
    everyone: list[psutil.Process] = []
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=LIMIT, max_retries=0)
        deadline = time.monotonic() + LIMIT
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                time.sleep(1)
        everyone = psutil.Process(process.pid).children(recursive=True)
        yield process, client
    finally:
        for each in [psutil.Process(process.pid)] if process.poll() is None else []:
            everyone = [each, *each.children(recursive=True), *everyone]
        for each in everyone:
            if each.is_running():
                each.kill()


def test_clients_and_the_end(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "log") as (process, client):
        assert [each.id for each in client.models.list()] == ["mine"]
        given = {"model": "mine", "max_tokens": 12, "temperature": 0}
        whole = client.completions.create(prompt="Once upon", **given)
        parts = list(client.completions.create(prompt="Once upon", stream=True, **given))
        assert whole.usage is not None and whole.usage.completion_tokens == 12
        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
        chat = client.chat.completions.create(messages=[{"role": "user", "content": "Once upon"}], **given)
        assert chat.choices[0].message.content == whole.choices[0].text

        def ask(number: int) -> int:
            answer = client.completions.create(model="mine", prompt=f"{number} times", max_tokens=4, temperature=0)
            return 0 if answer.usage is None else answer.usage.completion_tokens

        with ThreadPoolExecutor(500) as pool:
            assert sum(count > 0 for count in pool.map(ask, range(500))) == 500

        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) in (0, -signal.SIGTERM)
        assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_killed_worker_is_the_end(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "log") as (process, client):
        workers = [
            each for each in psutil.Process(process.pid).children(recursive=True) if "Worker" in "".join(each.cmdline())
        ]
        assert len(workers) == 2
        workers[1].kill()
        with pytest.raises(openai.OpenAIError):
            for _ in range(100):
                client.completions.create(model="mine", prompt="Once", max_tokens=4, timeout=30)
                time.sleep(0.2)
        assert process.wait(LIMIT) != 0 or "EngineDeadError" in (tmp_path / "log").read_text()
