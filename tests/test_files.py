"""Whole-file writing: all of the new content, or all of the old."""

import json
import re
from pathlib import Path

import pytest

from ladder import files
from ladder.bench.demo.options import DemoOptions
from ladder.charts import library
from ladder.errors import LadderError
from ladder.files import PICTURES, LineFile, check_file, replaced, write_json, write_text
from ladder.scan.options import ScanOptions


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


def test_folders_above_a_file_are_made(tmp_path: Path) -> None:
    """By whatever writes one."""
    file = tmp_path / "new" / "folder" / "a.txt"
    check_file(file)
    assert not file.parent.exists()
    write_text(file, "whole")
    assert file.read_text() == "whole"
    LineFile(tmp_path / "another" / "a.jsonl").append({"a": 1})
    picture = tmp_path / "third" / "a.svg"
    assert DemoOptions(out=picture).out == ScanOptions(tmp_path, "model", plot=picture).plot == picture
    library.picture({"mark": "point", "data": {"values": [{}]}}, picture)
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    "ending, begins", [(".png", b"\x89PNG"), (".svg", b"<svg"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_a_picture_is_what_its_name_says(ending: str, begins: bytes, tmp_path: Path) -> None:
    library.picture({"mark": "point", "data": {"values": [{}]}}, tmp_path / f"a{ending}")
    assert (tmp_path / f"a{ending}").read_bytes().startswith(begins)


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for file, why in (
        (tmp_path / "file" / "a.png", "cannot be made: .* is a file"),
        (tmp_path, "is a directory: name a file"),
        (tmp_path / "a.gif", r"a.gif must end in .png, .svg or .pdf"),
    ):
        endings = PICTURES if file.suffix == ".gif" else ()
        with pytest.raises(LadderError, match=why):
            check_file(file, *endings)


# who writes files in a folder that appears, or becomes a model, when it is complete
IN_FOLDERS = {"hf/convert.py", "scan/fit.py", "scan/fit_inputs.py", "scan/checkpoints.py", "train/scratch.py"}
IN_FOLDERS |= {
    "train/distill.py",
    "train/distill_inputs.py",
    "train/teacher.py",
    "data/shards.py",
    "quantize/tensors.py",
}


def test_single_files_appear_when_they_are_complete() -> None:
    package = Path(files.__file__).parent
    plain = re.compile(r"(?<!partial)\.(write_text|write_bytes)\(|\.savefig\((?!partial)|open\(\"[wx]")
    found = {str(file.relative_to(package)) for file in package.rglob("*.py") if plain.search(file.read_text())}
    assert found == IN_FOLDERS
