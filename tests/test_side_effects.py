"""What the transformers host leaves of other libraries' settings: everything as it was."""

import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import tqdm
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from transformers.utils import logging as transformers_logging

from ladder.errors import LadderError
from ladder.hf import rewire
from ladder.hf.convert import convert
from ladder.hf.evaluate import Arm, evaluate
from ladder.hf.load import quiet
from ladder.hf.measures import distance
from tests.checkpoints import byte_tokenizer
from tests.hosts import host

LIBRARIES = ("transformers", "huggingface_hub", "accelerate", "datasets", "lm_eval")


def settings() -> dict[str, Any]:
    return {
        "levels": [logging.getLogger(name).level for name in LIBRARIES],
        "verbosity": (transformers_logging.get_verbosity(), datasets.logging.get_verbosity()),
        "bars": (transformers_logging.is_progress_bar_enabled(), are_progress_bars_disabled()),
        "datasets": (datasets.are_progress_bars_disabled(), datasets.config.HF_UPDATE_DOWNLOAD_COUNTS),
        "tqdm": [vars(bar)["__init__"] for bar in (tqdm.tqdm, tqdm.auto.tqdm)],
        "warnings": (list(warnings.filters), warnings.showwarning),
        "streams": (sys.stdout, sys.stderr),
    }


@contextmanager
def unchanged(set_by_user: bool) -> Iterator[None]:
    """Fails where a setting is another one afterwards."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    try:
        if set_by_user:
            transformers_logging.set_verbosity_info()
            transformers_logging.enable_progress_bar()
            disable_progress_bars()
        before = settings()
        yield
        assert settings() == before
    finally:
        transformers_logging.set_verbosity(level)
        (transformers_logging.enable_progress_bar if bars else transformers_logging.disable_progress_bar)()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    host("llama", vocab_size=300).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("Never wait for the network. " * 4)
    (tmp_path / "rows.jsonl").write_text('{"context": "Never wait", "continuation": "for it"}\n' * 2)
    return tmp_path


def measured(folder: Path, **options: Any) -> list[dict[str, Any]]:
    arms = [Arm(str(folder / "model")), Arm(str(folder / "model"), "ladder")]
    return evaluate(arms, text=folder / "text.txt", source=str(folder / "model"), window=32, **options)


def refused(folder: Path) -> None:
    with pytest.raises(LadderError, match="two tasks are called rows"):
        measured(folder, tasks=[folder / "rows.jsonl"] * 2)


def with_tasks(folder: Path) -> None:
    rows = measured(folder, tasks=[folder / "rows.jsonl"])
    assert "rows/acc" in {row["measure"] for row in rows}


def interrupted(folder: Path) -> None:
    def stop(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(folder, tasks=[folder / "rows.jsonl"], progress=stop)


def wired(folder: Path) -> None:
    tokens = torch.arange(40) % 50
    distance(rewire(host("llama"), "ladder"), host("llama"), tokens, window=8)


def converted(folder: Path) -> None:
    convert(str(folder / "model"), folder / "out", "ladder")


@pytest.mark.parametrize("set_by_user", [False, True])
@pytest.mark.parametrize("work", [with_tasks, refused, interrupted, wired, converted])
def test_nothing_stays_changed(
    work: Callable[[Path], None], set_by_user: bool, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with unchanged(set_by_user):
        capfd.readouterr()
        work(folder)
        assert set_by_user or capfd.readouterr() == ("", "")  # no bars, and nothing in the log


@pytest.mark.parametrize("set_by_user", [False, True])
def test_quiet_is_quiet_and_warnings_are_seen(set_by_user: bool) -> None:
    with unchanged(set_by_user), quiet("datasets"):
        assert not transformers_logging.is_progress_bar_enabled() and are_progress_bars_disabled()
        assert [logging.getLogger(name).level for name in LIBRARIES[:4]] == [logging.ERROR] * 4
        with quiet(), pytest.warns(UserWarning, match="something else"):
            warnings.warn("something else", stacklevel=1)
        assert not transformers_logging.is_progress_bar_enabled()


def test_importing_changes_four_functions_of_transformers() -> None:
    """Those that every config and every model is made by, and found by: the reasons stand in `register`."""
    program = """
import logging, sys, warnings
import tqdm, transformers
transformers.AutoModel, transformers.AutoModelForCausalLM  # imported when they are first named
from transformers.utils import logging as theirs
def settings():
    levels = [logging.getLogger(name).level for name in ("transformers", "huggingface_hub", "accelerate")]
    return levels, theirs.is_progress_bar_enabled(), vars(tqdm.tqdm)['__init__'], list(warnings.filters), sys.stderr
configs = [vars(transformers.PreTrainedConfig)[name] for name in ("get_config_dict", "from_dict")]
before, own, files = settings(), transformers.PreTrainedModel.post_init, transformers.utils.hub.cached_files
import ladder.hf, ladder.hf.evaluate, ladder.hf.convert
assert settings() == before
assert transformers.PreTrainedModel.post_init.__wrapped__ is own
now = [vars(transformers.PreTrainedConfig)[name] for name in ("get_config_dict", "from_dict")]
assert transformers.utils.hub.cached_files.__wrapped__ is files
assert [each.__func__.__wrapped__ for each in now] == [each.__func__ for each in configs]
"""
    subprocess.run([sys.executable, "-c", program], check=True)
