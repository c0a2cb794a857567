"""The log: nothing at import; lines on standard error with the rank's name, from the level that was asked for."""

import logging
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ladder import LLM, SamplingParams
from ladder.checkpoint import load
from ladder.engine.executors.multi_process import MultiProcessExecutor
from ladder.engine.executors.worker import run_rank
from ladder.engine.options import EngineOptions
from ladder.engine.setup import Setup
from ladder.errors import LadderError
from ladder.logs import LEVELS, current_level, level_number, name_rank, shown
from tests.checkpoints import tiny

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"), dtype="bfloat16")


def test_imports_add_no_handler() -> None:
    program = "import logging, ladder.engine.llm, ladder.cli; assert not logging.getLogger('ladder').handlers"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("ladder.engine")
    before = current_level()
    with shown(logging.INFO):
        logger.info("one\nline, %d", 2)
        logger.debug("not shown")
        with shown(logging.ERROR, "inner"):
            logger.warning("not shown")
            logger.error("once")
        name_rank(3)
        logger.warning("again")
    logger.info("not shown")
    assert capsys.readouterr().err == "ladder: info: one line, 2\ninner: error: once\nladder rank 3: warning: again\n"
    assert not logging.getLogger("ladder").handlers and current_level() == before


def test_levels() -> None:
    assert [level_number(name) for name in LEVELS] == [10, 20, 30, 40]
    with pytest.raises(LadderError, match="unknown log level 'loud': known are debug, info, warning, error"):
        level_number("loud")


@pytest.mark.parametrize("before, after", [(["--log-level", "info"], []), ([], ["--log-level", "info"])])
def test_the_option_stands_before_or_behind_the_verb(
    before: list[str], after: list[str], model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ladder.devices.cpu_multiplies_bfloat16", lambda: False)
    status, out, err = run(*before, "generate", "--model", model, "--token-ids=5", "--max-new-tokens=1", *after)
    assert status == 0 and out
    first, second = err.splitlines()
    assert first == "ladder: info: dtype auto: float32 instead of bfloat16, this CPU has no bf16 products"
    assert second.startswith("ladder: info: KV cache: ")
    status, out, err = run("generate", "--model", model, "--token-ids=5", "--max-new-tokens=1")
    assert (status, err) == (0, "")
    status, out, err = run("--log-level", "all", "generate", "--model", model, "--token-ids=5")
    assert status == 2 and err.startswith("ladder: unknown log level 'all'") and err.count("\n") == 1


def talk(out: Path, rank: int, *arguments: Any) -> None:
    """`run_rank`, with a line before it loads; its standard error is a file."""
    logger = logging.getLogger("ladder.engine")

    def talking(*given: Any) -> Any:
        logger.info("loads")
        logger.debug("not shown")
        return load(*given)

    patch("ladder.engine.executors.worker.load", talking).start()
    with out.open("a") as sys.stderr:
        run_rank(rank, *arguments)


def test_ranks_show_the_level_of_their_parent(model: Path, tmp_path: Path) -> None:
    for level, lines in ((logging.INFO, ["ladder rank 0: info: loads", "ladder rank 1: info: loads"]), (30, [])):
        with shown(level):
            setup = Setup(EngineOptions(model, tp=2, dtype="float32"))
            with LLM.over(setup, MultiProcessExecutor(setup, target=partial(talk, tmp_path / str(level)))) as llm:
                llm.generate([[1]], SamplingParams(1))
        found = (tmp_path / str(level)).read_text().splitlines()
        assert sorted(line for line in found if "KV cache" not in line) == lines
