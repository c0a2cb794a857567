"""ladder chat: turns, commands, streaming, Ctrl-C, pipes; a local model with and without a chat template, endpoints."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from ladder import LLM
from ladder.chat.conversation import Conversation
from ladder.chat.local import LocalPartner
from ladder.chat.options import ChatOptions, ChatSampling, LocalOptions
from ladder.chat.partner import Message, continued
from ladder.chat.remote import RemotePartner
from ladder.client.endpoint import Endpoint, EndpointError
from ladder.engine.text import encode
from ladder.errors import LadderError
from tests.checkpoints import tiny
from tests.endpoint import TEXT, FakeEndpoint

Run = Callable[..., tuple[int, str, str]]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny(tmp_path_factory.mktemp("templated"))
    file = made / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    return made


class FakeTerminal:
    """Gives lines, or raises what stands among them."""

    def __init__(self, *lines: str | type[BaseException], interactive: bool = True) -> None:
        self._lines = list(lines)
        self.interactive = interactive
        self.written, self.said = "", ""

    def read(self) -> str | None:
        line = self._lines.pop(0) if self._lines else None
        if isinstance(line, type):
            raise line
        return line

    def write(self, text: str) -> None:
        self.written += text

    def say(self, text: str) -> None:
        self.said += f"{text}\n"


class Echo:
    """Answers with the last message, letter by letter; `hook` is called before each."""

    name, waits_safely = "echo", True

    def __init__(self, hook: Callable[[int], None] = lambda at: None) -> None:
        self.notes = ["a note"]
        self.asked: list[list[Message]] = []
        self.closed = 0
        self._hook = hook

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        self.asked.append(list(messages))
        try:
            for at, letter in enumerate(messages[-1].content):
                self._hook(at)
                yield letter
        finally:
            self.closed += 1


def talk(
    partner: Any, *lines: str | type[BaseException], interactive: bool = True, system: str | None = None
) -> FakeTerminal:
    terminal = FakeTerminal(*lines, interactive=interactive)
    Conversation(partner, terminal, system).run()  # type: ignore[arg-type]
    return terminal


# --- the conversation -----------------------------------------------------------------------------------------------


def test_turns_and_commands() -> None:
    echo = Echo()
    terminal = talk(
        echo, "one", "", "  ", "two", "/help", "/etc/hosts", "/nothing", "/reset", "three", "/quit", "never", system="s"
    )
    assert terminal.written == "one\ntwo\n/etc/hosts\nthree\n"
    system = Message("system", "s")
    turns = [Message("user", "one"), Message("assistant", "one"), Message("user", "two")]
    assert echo.asked[1] == [system, *turns] and echo.asked[3] == [system, Message("user", "three")]
    assert (
        terminal.said.count("a note") == 1 and "/reset" in terminal.said and "unknown command /nothing" in terminal.said
    )


def test_ctrl_c_ends_the_answer_and_twice_leaves() -> None:
    def press(at: int) -> None:
        if at == 2:
            raise KeyboardInterrupt

    echo = Echo(press)
    terminal = talk(echo, "abcd", "x", KeyboardInterrupt, "y")
    assert terminal.written == "ab\nx\ny\n" and "stopped" in terminal.said and "Ctrl-C again" in terminal.said
    assert echo.asked[1][1] == Message("assistant", "ab")  # what came stays
    for lines in (("abcd", KeyboardInterrupt, "y"), (KeyboardInterrupt, KeyboardInterrupt, "y")):
        with pytest.raises(KeyboardInterrupt):
            talk(Echo(press), *lines)
    with pytest.raises(KeyboardInterrupt):
        talk(Echo(press), "abcd", interactive=False)


def test_a_step_is_not_interrupted() -> None:
    """Where an exception would break the partner, the signal is only noted; the second one is raised."""
    steps: list[int] = []

    def press(at: int) -> None:
        if at == 1:
            signal.raise_signal(signal.SIGINT)
        steps.append(at)

    before = signal.getsignal(signal.SIGINT)
    echo = Echo(press)
    echo.waits_safely = False  # type: ignore[misc]
    assert talk(echo, "abcd").written == "ab\n" and steps == [0, 1] and echo.closed == 1
    assert signal.getsignal(signal.SIGINT) is before
    twice = Echo(lambda at: [signal.raise_signal(signal.SIGINT) for _ in range(2)] and None)
    twice.waits_safely = False  # type: ignore[misc]
    with pytest.raises(KeyboardInterrupt):
        talk(twice, "abcd")


def test_a_failed_turn_is_taken_back() -> None:
    def fail(at: int) -> None:
        if at == 3:
            raise EndpointError("status 500", "out of order")

    echo = Echo(fail)
    terminal = talk(echo, "abcd", "\udcff", "xy")
    assert "out of order" in terminal.said and "not valid UTF-8" in terminal.said
    assert echo.asked[-1] == [Message("user", "xy")]
    with pytest.raises(EndpointError):
        talk(Echo(fail), "abcd", interactive=False)


# --- a local model --------------------------------------------------------------------------------------------------


def test_a_model_without_a_template_continues(plain: Path) -> None:
    with LLM(plain, max_num_seqs=1) as llm:
        partner = LocalPartner(llm, ChatSampling(max_new_tokens=5, temperature=0.0))
        terminal = talk(partner, "Once upon", "and then", interactive=False)
        first = llm.generate(["Once upon"], ChatSampling(max_new_tokens=5, temperature=0.0))[0].text or ""
        text = f"Once upon{first}\nand then"
        second = llm.generate([text], ChatSampling(max_new_tokens=5, temperature=0.0))[0].text
        assert terminal.written == f"{first}\n{second}\n" and terminal.said.count("no chat template") == 1
        long = [Message("user", "x" * 2000)]
        assert len(partner._fitting(long)) == llm.setup.config.context - 5


def test_a_chat_template(templated: Path) -> None:
    with LLM(templated, max_num_seqs=1) as llm:
        partner = LocalPartner(llm, ChatSampling(max_new_tokens=5))
        talked = [Message("system", "s"), Message("user", "hi"), Message("assistant", "ho"), Message("user", "so")]
        assert partner.notes == [] and partner._fitting(talked) == encode(llm.setup.tokenizer, "<s>s<u>hi<a>ho<u>so<a>")
        many = [Message("system", "s"), *(Message(r, c * 200) for c in "abcd" for r in ("user", "assistant"))]
        kept = llm.setup.tokenizer.decode(partner._fitting([*many, Message("user", "last")]))
        assert kept.startswith("<s>s<u>d") and kept.endswith("<u>last<a>")  # the oldest turns are left out
        with pytest.raises(LadderError, match="the message has 2006 tokens, the model's context is 512"):
            partner._fitting([Message("user", "x" * 2000)])
        llm.setup.tokenizer.chat_template = "{{ raise_exception('no system here') }}"
        with pytest.raises(LadderError, match="chat template refuses this conversation: no system here"):
            partner._fitting(talked)


def test_pipes(run: Run, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("abc\n/reset\nabc\n"))
    status, out, err = run("chat", plain, "--max-new-tokens", 6, "--temperature", 0, "--dtype", "float64")
    with LLM(plain, dtype="float64") as llm:
        text = llm.generate(["abc"], ChatSampling(max_new_tokens=6, temperature=0.0))[0].text
    assert (status, out) == (0, f"{text}\n{text}\n") and err.count("\n") == 2


def test_the_embedded_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("It was a dark and stormy night"))  # a last line without its end
    status, out, _ = run("chat", "--max-new-tokens", 8, "--seed", 4, "--dtype", "float32")
    assert status == 0 and len(out) > 10 and out.endswith("\n")


@pytest.mark.parametrize("arguments, words", [
    (("nowhere",), "no model 'nowhere': there is no such directory"),
    (("--api-key", "x"), "--name and --api-key are for endpoints"),
    (("http://127.0.0.1:1", "--tp", "2"), "--tp is for local models"),
    (("http://127.0.0.1:x",), "is not the URL of an endpoint"),
    (("--temperature", "-1"), "temperature must be 0 or more"),
    (("--max-num-seqs", "4"), "No such option"),
])  # fmt: skip
def test_refusals(run: Run, arguments: tuple[str, ...], words: str) -> None:
    status, out, err = run("chat", *arguments)
    assert (status, out) == (2, "") and words in err and err.count("\n") == 1


def test_no_tokenizer(run: Run, tmp_path: Path) -> None:
    status, _, err = run("chat", tiny(tmp_path, tokenizer=False))
    assert status == 2 and "has no tokenizer" in err


def test_options_reach_the_engine() -> None:
    assert LocalOptions(tp=2).tp == 2 and LocalOptions().max_num_seqs == 1 and ChatOptions("http://h").remote
    assert ChatOptions("model").remote is None and ChatSampling(max_tokens=3).max_new_tokens == 3
    assert continued([Message("user", "a"), Message("assistant", "b"), Message("user", "c")]) == "ab\nc"


# --- an endpoint ----------------------------------------------------------------------------------------------------


def test_an_endpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("hello\nand you?\n"))
    flags = ["--system", "Be brief.", "--api-key", "k", "--temperature", 0.3, "--max-new-tokens", 4]
    with FakeEndpoint() as endpoint:
        status, out, err = run("chat", endpoint.url, *flags)
    answer = "".join(TEXT[:4])
    assert (status, out, err) == (0, f"{answer}\n{answer}\n", "")
    roles = [message["role"] for message in endpoint.bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"] and endpoint.bodies[1]["messages"][2]["content"] == answer
    assert endpoint.bodies[1]["temperature"] == 0.3 and endpoint.bodies[1]["max_tokens"] == 4
    assert "top_p" not in endpoint.bodies[1] and endpoint.bodies[1]["model"] == "fake"
    assert all("authorization: bearer k" in head.lower() for head in endpoint.heads)


def test_an_endpoint_without_a_template() -> None:
    with FakeEndpoint(template=False) as endpoint, RemotePartner(Endpoint.parse(endpoint.url), None, {}) as partner:
        terminal = talk(partner, "Never", "And")
    assert terminal.written == 2 * ("".join(TEXT) + "\n") and terminal.said.count("no chat template") == 1
    prompts = [body.get("prompt") for body in endpoint.bodies]
    assert prompts == [None, "Never", f"Never{''.join(TEXT)}\nAnd"]


def test_an_endpoint_that_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for fault, words in (
        ("500", "status 500: out of order"),
        ("midway", "closed the connection"),
        ("broken", "not JSON"),
    ):
        monkeypatch.setattr(sys, "stdin", StringIO("hello\n"))
        with FakeEndpoint(fault=lambda number, body, fault=fault: fault) as endpoint:  # type: ignore[misc]
            status, _, err = run("chat", endpoint.url)
        assert status == 1 and words in err and err.count("\n") == 1


# --- a terminal -----------------------------------------------------------------------------------------------------


def test_on_a_terminal() -> None:
    """As a user sits before it: a prompt, an answer that Ctrl-C ends, and Ctrl-D."""
    ours, theirs = pty.openpty()
    seen = ""

    def until(words: str) -> None:
        nonlocal seen
        end = time.monotonic() + 40
        while words not in seen:
            assert time.monotonic() < end, seen
            seen += os.read(ours, 10_000).decode()
        seen = seen.split(words, 1)[1]

    with FakeEndpoint(gap=0.2) as endpoint:
        command = [sys.executable, "-m", "ladder", "chat", endpoint.url, "--max-new-tokens", "100"]
        environment = {**os.environ, "TERM": "dumb"}
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        try:
            until("> ")
            os.write(ours, b"hello\n")
            until("wait")
            process.send_signal(signal.SIGINT)
            until("stopped")
            until("> ")
            os.write(ours, b"\x04")
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait()
            os.close(ours)
    assert len(endpoint.bodies) == 1
