"""`ladder serve` under clients of all kinds, some of whom leave, while ranks are killed; and under mutated bodies.

python -m experiments.serve_soak [--requests 10000] [--fuzz 2000] [--kills 3] [--tp 2] >> results/serve_soak.jsonl

A tiny model on CPU processes, asked with OpenAI's own client: completions and chats, whole and streamed, greedy and
sampled, several results, stop texts, wrong fields. One client in twenty closes its connection. Every request must be
answered once or get an error; greedy answers must be the same every time, also after a restart. Then the mutated
bodies of `tests/bodies.py`. At the end: the server's memory, and whether a process, a port or a request is left. Two
JSON lines. The exit status is 1 where something was wrong.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import torch

from ladder.bench.machine import machine
from tests.bodies import mutated
from tests.checkpoints import byte_tokenizer, tiny
from tests.test_faults import session, workers

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
LEAVING = 0.05  # share of clients that close their connection
AT_ONCE = 32
WORDS = ["a", "Never wait", "for the network", "x" * 60, "yes"]


class Server:
    """`ladder serve` in a session of its own."""

    def __init__(self, model: Path, tp: int, log: Path) -> None:
        flags = ["--tp", str(tp), "--port", "0", "--served-model-name", "tiny", "--max-num-seqs", "24"]
        begin = [sys.executable, "-m", "ladder", "serve", str(model), *flags]
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                begin, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split(" at ")[-1].strip().removesuffix("/v1")
        assert self.url.startswith("http://127.0.0.1:"), log.read_text()
        self.port = int(self.url.rpartition(":")[2])

    def megabytes(self) -> float:
        """Of the server's own process, resident."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def kill_a_rank(self, chance: random.Random) -> None:
        if found := workers(self.process.pid):
            os.kill(chance.choice(found), signal.SIGKILL)

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return next(float(line.removeprefix(name)) for line in lines if line.startswith(f"{name} "))

    def end(self) -> dict[str, Any]:
        """Ask it to end; what is left of it."""
        left = self.metric("ladder_sequences_running") + self.metric("ladder_sequences_waiting")
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        deadline = time.monotonic() + 10
        while session(self.process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        processes = session(self.process.pid)
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        with socket.socket() as asking:
            port = asking.connect_ex(("127.0.0.1", self.port)) == 0
        tracebacks = self.log.read_text().count("Traceback")
        return {"exit": status, "requests": left, "processes": len(processes), "port": port, "tracebacks": tracebacks}


class Clients:
    """Draws requests and counts what came of them."""

    def __init__(self, server: Server, client: openai.AsyncOpenAI, chance: random.Random) -> None:
        self.client = client
        self.server = server
        self.chance = chance
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.known: dict[str, str] = {}  # what greedy requests get
        self.seconds: list[float] = []

    def draw(self) -> tuple[str, Callable[[], Awaitable[str]], bool]:
        """A name for what is asked, the asking, and whether its answer is known to be always the same."""
        chance, word = self.chance, self.chance.choice(WORDS)
        given: dict[str, Any] = {"model": "tiny", "max_tokens": chance.choice((1, 4, 8, 16)), "temperature": 0}
        same = chance.random() < 0.6
        if not same:
            given |= {"temperature": 1.0, "n": chance.choice((1, 1, 3)), "seed": chance.randrange(2**31)}
            given |= {"stop": chance.choice((None, ["e", "@"])), "presence_penalty": chance.choice((0, 0.5))}
        if chance.random() < 0.02:
            given["temperature"] = -1
        kind = chance.choice(("completion", "chat"))
        stream = chance.random() < 0.5
        asks = {"completion": self._completion, "chat": self._chat}
        name = f"{kind} {word} {given['max_tokens']}"
        return name, lambda: asks[kind](word, stream, given), same and given["temperature"] == 0

    async def _completion(self, word: str, stream: bool, given: dict[str, Any]) -> str:
        answer = await self.client.completions.create(prompt=word, stream=stream, **given)
        if not stream:
            return "".join(choice.text for choice in answer.choices)
        return "".join([choice.text async for part in answer for choice in part.choices if choice.index == 0])

    async def _chat(self, word: str, stream: bool, given: dict[str, Any]) -> str:
        messages = [{"role": "user", "content": word}]
        answer = await self.client.chat.completions.create(messages=messages, stream=stream, **given)
        if not stream:
            return "".join(choice.message.content or "" for choice in answer.choices)
        parts = [choice.delta.content or "" async for part in answer for choice in part.choices if choice.index == 0]
        return "".join(parts)

    async def one(self) -> None:
        name, ask, same = self.draw()
        leaves = self.chance.random() < LEAVING
        begin = time.monotonic()
        try:
            text = await asyncio.wait_for(ask(), self.chance.uniform(0.0, 0.2) if leaves else 300)
        except TimeoutError:
            self.outcomes["left" if leaves else "never answered"] += 1
            return
        except openai.APIStatusError as error:
            self.outcomes[f"status {error.status_code}"] += 1
            return
        except openai.APIError as error:
            self.outcomes[f"{type(error).__name__}: {error.message}"[:80]] += 1
            return
        self.outcomes["answered"] += 1
        self.seconds.append(time.monotonic() - begin)
        if same and self.known.setdefault(name, text) != text:
            self.wrong.append(f"{name}: {text!r}, not {self.known[name]!r}")


async def soak(server: Server, count: int, kills: int) -> dict[str, Any]:
    chance = random.Random(0)
    limits = openai.DefaultAsyncHttpxClient(timeout=310)
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=limits
    ) as client:
        clients = Clients(server, client, chance)
        left, done, memory = iter(range(count)), 0, []
        kill_at = {count * (number + 1) // (kills + 1) for number in range(kills)}

        async def ask_on() -> None:
            nonlocal done
            for _ in left:
                await clients.one()
                done += 1
                if done in kill_at:
                    server.kill_a_rank(chance)
                if done % max(1, count // 20) == 0:
                    memory.append(round(server.megabytes(), 1))
                    print(f"{done} of {count}, {memory[-1]} MB, {dict(clients.outcomes)}", file=sys.stderr)

        begin = time.monotonic()
        await asyncio.gather(*(ask_on() for _ in range(AT_ONCE)))
        took = time.monotonic() - begin
    order = sorted(clients.seconds)
    return {
        "requests": count,
        "seconds": round(took, 1),
        "requests_per_second": round(count / took, 1),
        "answer_seconds": {f"p{p}": round(order[len(order) * p // 100], 3) for p in (50, 90, 99)},
        "outcomes": dict(clients.outcomes),
        "wrong": clients.wrong[:5],
        "kills": kills,
        "engine_failures": server.metric("ladder_engine_failures"),
        "server_megabytes": memory,
    }


def fuzz(server: Server, count: int) -> dict[str, Any]:
    chance, statuses, bad = random.Random(1), Counter[int](), []
    begin = time.monotonic()
    with httpx.Client(headers={"content-type": "application/json"}, timeout=60) as client:
        for _ in range(count):
            path, body = mutated(chance)
            answer = client.post(f"{server.url}/v1/{path}", content=body)
            statuses[answer.status_code] += 1
            if answer.status_code not in (200, 400, 404) or (
                answer.status_code != 200 and "error" not in answer.json()
            ):
                bad.append((path, body.decode("utf-8", "replace"), answer.status_code))
    took = round(time.monotonic() - begin, 1)
    return {"bodies": count, "seconds": took, "statuses": {str(key): statuses[key] for key in statuses}, "bad": bad[:5]}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("requests", 10_000), ("fuzz", 2000), ("kills", 3), ("tp", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny(Path(folder) / "model", "ladder", eos=(), layers=2)
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(model)
        server = Server(model, given.tp, Path(folder) / "log")
        try:
            soaked = asyncio.run(soak(server, given.requests, given.kills))
            fuzzed = fuzz(server, given.fuzz)
            left = server.end()
        finally:
            if server.process.poll() is None:
                server.process.kill()
        common = {"program": "serve_soak", "tp": given.tp, **machine(torch.device("cpu"))}
        print(json.dumps({**common, "part": "soak", **soaked, "left": left}))
        print(json.dumps({**common, "part": "fuzz", **fuzzed}), flush=True)
        answered = sum(soaked["outcomes"].values()) == given.requests and "never answered" not in soaked["outcomes"]
        clean = left == {"exit": 0, "requests": 0, "processes": 0, "port": False, "tracebacks": 0}
        if not clean:
            print(server.log.read_text()[-4000:], file=sys.stderr)
    sys.exit(0 if answered and clean and not soaked["wrong"] and not fuzzed["bad"] else 1)


if __name__ == "__main__":
    main()
