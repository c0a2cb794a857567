"""The command line as a shell has it: help, examples, completion, colours, exit statuses, pipes and terminals."""

import io
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from ladder.cli import app, main
from ladder.cli.generate import Speed
from ladder.cli.help import EXAMPLES, GROUPS
from ladder.comm.link import LINKS
from ladder.config import SIZES
from ladder.hub import directory_of, name_of
from tests.checkpoints import tiny

Run = Callable[..., tuple[int, str, str]]
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
ESCAPE = "\x1b"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"))


# --- help -----------------------------------------------------------------------------------------------------------


def test_without_a_verb_there_is_help(run: Run) -> None:
    status, out, err = run()
    assert (status, err) == (0, "") and all(f" {verb} " in out for verb in COMMANDS)
    assert run("--help") == run("-h") == (0, out, "")
    assert "Exit status: 0" in out and re.search(r"130\s+after\s+Ctrl-C", out)
    assert all(group in out for group in {GROUPS[verb] for verb in COMMANDS})


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_has_examples_and_groups(verb: str, run: Run) -> None:
    status, out, err = run(verb, "-h")
    assert (status, err) == (0, "") and run(verb, "--help")[1] == out
    assert "Examples" in out and verb in GROUPS
    words = " ".join(out.split())
    assert all(" ".join(example.split())[:40] in words for example in EXAMPLES[verb])
    own = [entry for entry in COMMANDS[verb].params if isinstance(entry, typer.core.TyperOption)]
    panels = {entry.rich_help_panel for entry in own} - {None}
    assert panels or len(own) <= 3  # --quiet, --log-level and --help have no group


@pytest.mark.parametrize("verb", COMMANDS)
def test_examples_are_command_lines(verb: str) -> None:
    for example in EXAMPLES[verb]:
        name, called, *arguments = shlex.split(example.split(" < ")[0])
        assert (name, called) == ("ladder", verb)
        COMMANDS[verb].make_context(verb, arguments)  # an unknown option, or a value of the wrong type, raises


def test_usage_errors_name_the_help_of_their_verb(run: Run) -> None:
    for arguments, message in (
        (["plan", "--nosuch"], "ladder: No such option: --nosuch"),
        (["quantize", "a", "b"], "ladder: Missing option '--format'"),
        (["trace", "--tp", "x"], "ladder: Invalid value for '--tp'"),
    ):
        status, out, err = run(*arguments)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert (
            err.startswith(message) and err.endswith(f"(see ladder {arguments[0]} --help)\n") and "." not in err[-30:]
        )
    assert "see ladder --help" in run("nosuch")[2]


def test_memory_that_ends_is_one_sentence(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch's is called."""

    def ends(error: Exception) -> Callable[..., None]:
        def work(*_: object) -> None:
            raise error

        return work

    for error in (MemoryError(), OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")):
        monkeypatch.setattr("ladder.cli.plan.print_plan", ends(error))
        status, _, err = run("plan")
        assert status == 1 and err.startswith("ladder: there is not enough memory: ") and err.count("\n") == 1
    monkeypatch.setattr("ladder.cli.plan.print_plan", ends(RuntimeError("a defect")))
    monkeypatch.setattr(sys, "argv", ["ladder", "plan"])
    with pytest.raises(RuntimeError, match="a defect"):
        main()


# --- completion, colours, quiet -------------------------------------------------------------------------------------


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ladder", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_completion() -> None:
    """What bash asks for: verbs, and a verb's options."""
    for words, found in (("ladder pl", "plan"), ("ladder plan --ch", "--chip")):
        asked = {"_LADDER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = shell(**asked)
        assert done.stdout.split() == [found], done.stderr
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # whichever shell the tests are run from
    assert "_LADDER_COMPLETE" in shell("--show-completion", "bash", **named).stdout


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """What both outputs show on a terminal."""
    ours, theirs = pty.openpty()
    settings = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment}
    command = [sys.executable, "-m", "ladder", *arguments]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=settings)
    os.close(theirs)
    found = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        found += piece
    assert process.wait(120) == 0, found
    os.close(ours)
    return found.decode()


COLOUR = re.compile(ESCAPE + r"\[(?:[0-9]+;)*(?:3[0-7]|9[0-7]|38)(?:;[0-9]+)*m")


def test_colours_only_on_a_terminal() -> None:
    assert ESCAPE not in shell("plan", "--help").stdout
    assert COLOUR.search(on_a_terminal("plan", "--help"))
    assert not COLOUR.search(on_a_terminal("plan", "--help", NO_COLOR="1"))


def test_a_terminal_shows_prompt_and_speed(model: Path, run: Run) -> None:
    """And a pipe, or --quiet, the text alone."""
    arguments = ("generate", "--model", str(model), "--prompt", "Never wait", "--max-new-tokens", "5")
    plain = re.sub(ESCAPE + r"\[[0-9;?]*[A-Za-z]", "", on_a_terminal(*arguments))
    assert "loading weights" in plain and "Never wait" in plain
    assert re.search(r"5 tokens in [0-9.]+ s, [0-9.]+ tokens/s after the first", plain)
    status, text, err = run(*arguments)
    assert (status, err) == (0, "") and "Never wait" not in text
    assert on_a_terminal(*arguments, "--quiet").replace("\r\n", "\n") == text


def test_speed_is_that_after_the_first_token() -> None:
    speed = Speed()
    assert re.fullmatch(r"0 tokens in [0-9.]+ s", str(speed))
    speed.add(1)
    assert re.fullmatch(r"1 tokens in [0-9.]+ s", str(speed))
    speed.add(2)
    assert re.fullmatch(r"3 tokens in [0-9.]+ s, [0-9.]+ tokens/s after the first", str(speed))


def test_quiet_leaves_out_warnings(model: Path, run: Run) -> None:
    arguments = ("generate", "--model", model, "--wiring", "ladder", "--prompt", "abc", "--max-new-tokens", 2)
    assert "without adaptation" in run(*arguments)[2]
    assert run(*arguments, "--quiet")[2] == run("--quiet", *arguments)[2] == run(*arguments, "-q")[2] == ""
    assert "without adaptation" in run(*arguments, "--quiet", "--log-level", "warning")[2]
    assert run(*arguments[:3], "--quiet")[0] == 2  # errors are shown


# --- prompts from a pipe, models of the hub, lists ------------------------------------------------------------------


def test_standard_input_is_a_prompt(model: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("generate", "--model", model, "--max-new-tokens", 4, "--json")
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    status, out, _ = run(*arguments)
    assert status == 0 and json.loads(out)["prompt"] == "two\nlines"
    monkeypatch.setattr(sys, "stdin", io.StringIO("not read"))
    assert json.loads(run(*arguments, "--prompt", "abc")[1])["prompt"] == "abc"
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert "no prompt: give --prompt" in run(*arguments)[2]


def test_a_model_of_the_hub(model: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in the hub's cache, its files as links to others, and has its own name."""
    asked: list[str] = []
    cached = tmp_path / "models--org--some-model" / "snapshots" / "abc123"
    cached.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        (tmp_path / "blobs" / str(number)).write_bytes(file.read_bytes())
        (cached / file.name).symlink_to(tmp_path / "blobs" / str(number))

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        if name != "org/some-model":
            raise OSError("no such repository")
        return str(cached)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    arguments = ("--prompt", "abc", "--max-new-tokens", 4, "--json")
    status, out, err = run("generate", "--model", "org/some-model", *arguments)
    assert (status, err) == (0, "") and out == run("generate", "--model", model, *arguments)[1]
    assert name_of(cached) == "org/some-model" and name_of(model) == model.name
    status, _, err = run("generate", "--model", "org/other", *arguments)
    assert status == 2 and "org/other is no directory here, and cannot be downloaded from the hub: no such" in err
    assert asked == ["org/some-model", "org/other"]
    (tmp_path / "org" / "here").mkdir(parents=True)
    assert directory_of(Path("org/here")) == Path("org/here") and directory_of(Path("one")) == Path("one")
    assert len(asked) == 2


def test_what_has_a_name_is_listed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run("list")
    assert status == 0 and max(map(len, out.splitlines())) <= 80
    assert all(re.search(rf"^ *{re.escape(name)} ", out, re.MULTILINE) for name in (*SIZES, *LINKS, "h200", "int4-64"))
    found = json.loads(run("list", "--json")[1])
    assert list(found) == ["sizes", "chips", "links", "wirings", "weights"]
    assert {row["name"]: row["us"] for row in found["links"]}["nvlink_nccl"] == 24
    rows = {row["name"]: row for row in found["wirings"]}
    assert rows["ladder"] == {
        "name": "ladder", "attention": "lag 1, reduce", "mlp": "lag 1, reduce", "all_reduces_per_layer": 2
    }  # fmt: skip
    assert rows["desync-3x-local"] == {
        "name": "desync-3x-local", "attention": "not the same in all layers", "mlp": "not the same in all layers",
        "all_reduces_per_layer": 0.67,
    }  # fmt: skip
    assert "TB/s" in out and "GB/s" in out and "all-reduces a layer" in out
    assert rows["parallel-1"]["all_reduces_per_layer"] == 1 and rows["none"]["all_reduces_per_layer"] == 0
    assert [row["name"] for row in json.loads(run("list", "chips", "--json")[1])["chips"]][:2] == ["a100", "h100"]
    assert "unknown list 'link'" in run("list", "link")[2]
