"""Shards of tokens: windows of them, and damage that is found."""

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ladder.data.shards import Sequences, Shards, ShardWriter
from ladder.data.texts import tokenize
from ladder.errors import LadderError
from tests.checkpoints import byte_tokenizer
from tests.test_data import write


@pytest.fixture(scope="module")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """The tokens 0 to 99 in shards of 8."""
    folder = tmp_path_factory.mktemp("hundred")
    with ShardWriter(folder, 100, 8) as writer:
        writer.add(range(100))
        writer.finish(eos=0, fingerprint="f", documents=1, bytes=100)
    return Shards.open(folder)


def test_windows(hundred: Shards) -> None:
    rows = np.arange(99).reshape(9, 11).tolist()
    for windows, expected in (
        (Sequences(hundred, 11), rows),
        (Sequences(hundred, 11, skip=4), rows[4:]),
        (Sequences(hundred, 11, skip=2, limit=3), rows[2:5]),
        (Sequences(hundred, 11, limit=50), rows),
    ):
        assert len(windows) == len(expected)
        assert [item["input_ids"].tolist() for item in _items(windows)] == expected
        assert all(item["labels"] is item["input_ids"] for item in _items(windows))
        assert windows[-1]["input_ids"].tolist() == expected[-1]
    for wrong in (9, -10):
        with pytest.raises(IndexError):
            Sequences(hundred, 11)[wrong]
    for start, count in ((-1, 2), (99, 2), (0, 101)):
        with pytest.raises(IndexError):
            hundred.read(start, count)


def _items(windows: Sequences) -> Iterator[dict[str, torch.Tensor]]:
    return (windows[index] for index in range(len(windows)))


def test_windows_travel_to_workers(hundred: Shards) -> None:
    """Pickled without their open files, and read by processes that were started afresh."""
    windows = Sequences(hundred, 8)
    assert windows[0] and hundred._maps and not pickle.loads(pickle.dumps(hundred))._maps
    loader = DataLoader(windows, batch_size=5, num_workers=2, multiprocessing_context="spawn")
    found = torch.cat([batch["labels"] for batch in loader])
    assert torch.equal(found, torch.arange(96).reshape(12, 8))


def test_many_shards_are_not_open_at_once(hundred: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ladder.data.shards.MAPS", 3)
    again = Shards.open(hundred.folder)
    for start in (0, 50, 92, 8, 30):
        assert again.read(start, 8).tolist() == list(range(start, start + 8)) and len(again._maps) <= 3


# --- what is refused ------------------------------------------------------------------------------------------------


def damage(folder: Path, **changes: Any) -> None:
    index = json.loads((folder / "shards.json").read_text())
    (folder / "shards.json").write_text(json.dumps({k: v for k, v in {**index, **changes}.items() if v != "gone"}))


DAMAGES: list[tuple[str, Callable[[Path], object]]] = [
    ("no such folder of tokens", lambda out: out.rename(out.with_name("away"))),
    ("has no shards.json: name a folder that ladder data made", lambda out: (out / "shards.json").unlink()),
    ("shards.json cannot be read as JSON", lambda out: (out / "shards.json").write_text('{"version": 1, "vo')),
    ("version 2, this program knows 1", lambda out: damage(out, version=2)),
    ("'version' is missing", lambda out: damage(out, version="gone")),
    ("'tokens' must be a whole number, not '5'", lambda out: damage(out, tokens="5")),
    ("unknown key 'more'", lambda out: damage(out, more=1)),
    ("'fingerprint' and a list of 'files'", lambda out: damage(out, files="gone")),
    ("dtype 'uint16' does not belong", lambda out: damage(out, vocab=70000)),
    ("dtype 'float' does not belong", lambda out: damage(out, dtype="float")),
    ("numbers that cannot be", lambda out: damage(out, eos=257)),
    ("not a file of the folder", lambda out: damage(out, files=[{"name": "../a", "tokens": 5}])),
    ("files have 5 tokens together, not 60", lambda out: damage(out, files=[{"name": "a", "tokens": 5}])),
    ("has no tokens", lambda out: damage(out, files=[], tokens=0)),
    ("no such file: .*shard-00002.bin", lambda out: (out / "shard-00002.bin").unlink()),
    ("shard-00001.bin is damaged: it has 27 bytes, not 40", lambda out: os.truncate(out / "shard-00001.bin", 27)),
    ("shard-00000.bin is damaged: it has 44 bytes, not 40", lambda out: os.truncate(out / "shard-00000.bin", 44)),
    ("an id 65535 among tokens 40 to 60, the vocabulary has 257", lambda out: (out / "shard-00002.bin").write_bytes(
        b"\xff" * 40
    )),
]  # fmt: skip


@pytest.mark.parametrize("message, harm", DAMAGES, ids=[message for message, _ in DAMAGES])
def test_damaged_folders(message: str, harm: Callable[[Path], object], tmp_path: Path) -> None:
    shards = tokenize([write(tmp_path / "a.txt", ["x" * 59])], tmp_path / "out", byte_tokenizer(), shard_tokens=20)
    assert shards.tokens == 60
    harm(tmp_path / "out")
    with pytest.raises(LadderError, match=message) as refused:
        Shards.open(tmp_path / "out")
    assert "\n" not in str(refused.value)


def test_an_id_in_the_middle_and_a_shard_that_vanished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What opening did not see, reading does."""
    monkeypatch.setattr("ladder.data.shards.EDGE", 4)
    tokenize([write(tmp_path / "a.txt", ["x" * 59])], tmp_path / "out", byte_tokenizer(), shard_tokens=20)
    shard = tmp_path / "out/shard-00001.bin"
    shard.write_bytes(shard.read_bytes()[:20] + b"\xff\xff" + shard.read_bytes()[22:])
    shards = Shards.open(tmp_path / "out")
    assert len(shards.read(0, 30)) == 30
    with pytest.raises(LadderError, match="id 65535 among tokens 30 to 40"):
        shards.read(30, 10)
    again = pickle.loads(pickle.dumps(shards))
    shard.unlink()
    with pytest.raises(LadderError, match=r"shard-00001.bin cannot be read"):
        again.read(30, 10)


def test_refused_sequences_and_models(hundred: Shards) -> None:
    for message, arguments in (
        ("100 tokens, fewer than one sequence of 101", (101,)),
        ("9 sequences of 11 tokens: none is left after 9", (11, 9)),
        ("no such sequences", (0,)),
        ("no such sequences", (5, -1)),
        ("no such sequences", (5, 0, 0)),
    ):
        with pytest.raises(LadderError, match=message):
            Sequences(hundred, *arguments)
    hundred.check_tokenizer("f", "MODEL")
    hundred.check_vocab(100, "MODEL")
    with pytest.raises(LadderError, match=r"another tokenizer than MODEL's: run ladder data .*--tokenizer MODEL"):
        hundred.check_tokenizer("g", "MODEL")
    with pytest.raises(LadderError, match="has a vocabulary of 100, MODEL one of 99: run ladder data"):
        hundred.check_vocab(99, "MODEL")
