"""Whole-file writing: all of the new content, or all of the old."""

import json
from pathlib import Path

import pytest

from ladder.files import replaced, write_json, write_text


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    write_text(file, "old\n")
    with pytest.raises(ValueError), replaced(file) as partial:
        partial.write_text("half of the new")
        raise ValueError
    assert file.read_text() == "old\n" and list(tmp_path.iterdir()) == [file]


def test_the_name_appears_only_when_the_file_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    with replaced(file) as partial:
        partial.write_bytes(b"1234")
        assert not file.exists()
    assert file.read_bytes() == b"1234" and list(tmp_path.iterdir()) == [file]


def test_json_is_sorted_and_ends_its_line(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1, "a": "ä"})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"a": "ä", "b": 1} and text.index('"a"') < text.index('"b"') and text.endswith("}\n")
