"""Texts to shards of tokens and back: what is written, what is read, what is refused, and what a failure leaves."""

import gzip
import importlib
import json
import lzma
import os
import re
import signal
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import ladder.cli.data as _data
import ladder.data.documents as reading
from ladder.data.documents import documents
from ladder.data.shards import Shards, ShardWriter
from ladder.data.texts import fingerprint, tokenize, train_tokenizer
from ladder.errors import LadderError
from tests.checkpoints import END, byte_tokenizer, tiny

Run = Callable[..., tuple[int, str, str]]
assert _data  # the verb
TEXTS = ["One ünd two.\nThree\n\nfour", "five \N{SNOWMAN}", "  six", "seven, eight and nine"]


@pytest.fixture
def run(run: Run) -> Run:
    """`ladder data ARGUMENTS` in this process: exit status, standard output, standard error."""
    return partial(run, "data")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return folder


def write(path: Path, texts: list[str]) -> Path:
    """The texts as a file of the kind that its name says."""
    path.parent.mkdir(exist_ok=True)
    inner = path.name.lower().removesuffix(".xz").removesuffix(".gz")
    if inner.endswith(".parquet"):
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
        parquet.write_table(arrow.table({"n": list(range(len(texts))), "text": texts}), path, row_group_size=2)
        return path
    rows = [json.dumps({"n": 1, "text": text}) + "\n\n" for text in texts]
    raw = ("".join(rows) if inner.endswith(".jsonl") else "\n\n\n".join(texts)).encode()
    path.write_bytes({".xz": lzma.compress, ".gz": gzip.compress}.get(path.suffix, bytes)(raw))
    return path


def as_bytes(texts: list[str]) -> list[int]:
    """The ids of the byte tokenizer, without it: it numbers the 256 letters for bytes in their order as characters."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + rank) for rank, byte in enumerate(sorted(set(range(256)) - set(plain)))}
    order = sorted(letters, key=lambda byte: letters[byte])
    ids = {byte: number for number, byte in enumerate(order)}
    return [id for text in texts for id in (*(ids[byte] for byte in text.encode()), END)]


def ids(shards: Shards) -> list[int]:
    return [int(id) for id in shards.read(0, shards.tokens)]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl", "a.parquet", "a.txt.xz", "a.JSONL.gz", "a.jsonl.xz", "a"])
def test_every_kind_of_file(name: str, model: Path, tmp_path: Path) -> None:
    """The ids of every document and its end, whatever it lies in, in whatever shards."""
    file, expected = write(tmp_path / name, TEXTS), as_bytes(TEXTS)
    seen: list[tuple[int, int]] = []
    how: dict[str, Any] = {"shard_tokens": 7, "progress": lambda done, total, what: seen.append((done, total))}
    shards = tokenize([file, file], tmp_path / "out", str(model), **how)
    assert ids(shards) == 2 * expected and ids(Shards.open(tmp_path / "out")) == 2 * expected
    assert (shards.documents, shards.vocab, shards.eos) == (8, 257, END)
    assert shards.bytes == 2 * sum(len(text.encode()) for text in TEXTS)
    for start in range(0, len(expected), 3):
        for count in (0, 1, 7, 20):
            assert shards.read(start, count).tolist() == (2 * expected)[start : start + count]
    files = sorted((tmp_path / "out").glob("*.bin"))
    sizes = [file.stat().st_size for file in files]
    assert sizes == [min(14, 4 * len(expected) - start) for start in range(0, 4 * len(expected), 14)]
    assert seen[-1] == (2 * file.stat().st_size,) * 2


def test_texts_are_split_alike_whatever_is_read_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "\n\n\n\nöne\r\n\r\ntwo\n\n\n\n\nthree\r\n\r\n\r\nfour\n \n\n\n  \n\n\n\N{SNOWMAN}\n\n\n\n"
    expected = ["öne\n\ntwo", "three", "four\n ", "\N{SNOWMAN}"]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    for chunk in (*range(3, 12), 1000):
        monkeypatch.setattr(reading, "CHUNK", chunk)
        pieces = list(documents([tmp_path / "a.txt"]))
        assert [piece.text for piece in pieces] == expected and all(piece.last for piece in pieces)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_long_documents_are_cut_where_it_does_not_matter(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A byte-level tokenizer gives the pieces the ids of the whole; only the last one has an end."""
    lines = [f"line {number} of many,  and so on.{' ' * (number % 3)}\n" * (1 + number % 2) for number in range(60)]
    texts = ["\n".join(lines).strip(), "x" * 700 + " " + "word " * 90, "short"]
    file = write(tmp_path / name, texts)
    words = train_tokenizer([file], 300)
    expected = [id for text in texts for id in (*words(text).input_ids, 0)]
    monkeypatch.setattr(reading, "LONGEST", 400)
    monkeypatch.setattr(reading, "CHUNK", 333)
    pieces = list(documents([file]))
    assert len(pieces) > 12 and all(0 < len(piece.text) <= 400 for piece in pieces)
    assert "".join(piece.text + "|" * piece.last for piece in pieces) == "|".join(texts) + "|"
    shards = tokenize([file], tmp_path / "out", words)
    assert shards.documents == 3
    found = ids(shards)
    assert words.decode(found) == "<|end|>".join(texts) + "<|end|>"
    hard = 2  # the 700 letters without a place to cut
    assert len(expected) <= len(found) <= len(expected) + 2 * hard
    first = len(words(texts[0]).input_ids)
    assert found[: first + 1] == expected[: first + 1]


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """One document of 40 MB, and the peak of what reading it takes."""
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"so many words, and no end of them\n" * (40 << 15), 1))
    tracemalloc.start()
    assert sum(len(piece.text) for piece in documents([tmp_path / "a.txt.gz"])) == 34 * (40 << 15)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20


@pytest.mark.parametrize("vocab, dtype, width", [(65536, "uint16", 2), (65537, "uint32", 4)])
def test_ids_take_as_many_bytes_as_they_need(vocab: int, dtype: str, width: int, tmp_path: Path) -> None:
    tokens = [0, vocab - 1, 5, vocab - 2, vocab - 1]
    with ShardWriter(tmp_path, vocab, 2) as writer:
        writer.add(tokens[:3])
        writer.add(tokens[3:])
        writer.finish(eos=5, fingerprint="f", documents=1, bytes=9)
    shards = Shards.open(tmp_path)
    assert ids(shards) == tokens and shards.read(0, 5).dtype == torch.int64
    assert [file.stat().st_size for file in sorted(tmp_path.glob("*.bin"))] == [2 * width, 2 * width, width]
    assert json.loads((tmp_path / "shards.json").read_text())["dtype"] == dtype


def test_a_large_vocabulary_through_the_tokenizer(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(70000)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    file = write(tmp_path / "a.txt", ["w7 w69998", "w65536"])
    shards = tokenize([file], tmp_path / "out", PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w69999"))
    assert (shards.index.dtype, shards.vocab, ids(shards)) == ("uint32", 70000, [7, 69998, 69999, 65536, 69999])


def test_a_trained_tokenizer(run: Run, tmp_path: Path) -> None:
    """It comes back by AutoTokenizer, alone and from beside a wired model, with its fingerprint and its ids."""
    texts = [f"{text} {number} {'<|end|>' if number == 4 else ''}" for number in range(40) for text in TEXTS]
    file = write(tmp_path / "a.jsonl.xz", texts)
    status, out, err = run(tmp_path / "out", file, "--vocab", 300, "--json")
    told = json.loads(out)
    shards = Shards.open(tmp_path / "out")
    assert (status, err, shards.vocab, shards.eos, told["vocab"]) == (0, "", 300, 0, 300)
    assert told["fingerprint"] == shards.fingerprint and told["documents"] == len(texts)
    tiny(tmp_path / "model", "ladder", tokenizer=False)
    AutoTokenizer.from_pretrained(tmp_path / "out/tokenizer").save_pretrained(tmp_path / "model")
    for folder in (tmp_path / "out/tokenizer", tmp_path / "model"):
        found = AutoTokenizer.from_pretrained(folder)
        assert fingerprint(found) == shards.fingerprint
        assert (found.eos_token_id, found.bos_token_id, found.pad_token_id, len(found)) == (0, 0, 0, 300)
        assert ids(shards) == [id for text in texts for id in (*found(text).input_ids, 0)]
        assert found.decode(ids(shards)) == "".join(text + "<|end|>" for text in texts)
    assert len(ids(shards)) < 0.8 * shards.bytes
    assert fingerprint(train_tokenizer([file], 300)) == shards.fingerprint  # and it is the same the next time
    for name, folder in (("again", tmp_path / "model"), ("beside", tmp_path / "out")):  # a model's, or that of data
        again = run(tmp_path / name, file, "--tokenizer", folder)
        assert again[0] == 0 and f"{shards.tokens} tokens of {len(texts)} documents" in again[1]
        assert ids(Shards.open(tmp_path / name)) == ids(shards)
    few = run(tmp_path / "few", write(tmp_path / "few.txt", ["ab ab"]), "--vocab", 999)
    assert few[0] == 0 and "no more than 259 entries" in few[1]


def test_a_tokenizer_learns_from_every_file(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{word}.txt", [f"{word} " * 3000]) for word in ("aaaa", "zzzz")]
    words = train_tokenizer(files, 280, sample=2000)
    assert all(words.convert_tokens_to_ids(f"Ġ{word}") > 256 for word in ("aaaa", "zzzz"))


def test_fingerprints(tmp_path: Path) -> None:
    """They follow what decides ids: words, merges, what is done before; not what is added around or done afterwards."""
    first = fingerprint(byte_tokenizer())
    assert re.fullmatch("[0-9a-f]{16}", first)
    assert first == fingerprint(PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer))
    around = byte_tokenizer()
    around.backend_tokenizer.enable_truncation(5)
    around.backend_tokenizer.enable_padding()
    assert fingerprint(around) == first
    assert ids(tokenize([write(tmp_path / "a.txt", TEXTS)], tmp_path / "out", around)) == as_bytes(TEXTS)
    assert fingerprint(byte_tokenizer(1)) == fingerprint(byte_tokenizer(1, begin=True)) != first
    raw = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    assert fingerprint(_Backend(raw)) == first
    merged = {**raw["model"], "vocab": {**raw["model"]["vocab"], "ab": 300}}
    spelled = [fingerprint(_Backend({**raw, "model": {**merged, "merges": m}})) for m in (["a b"], [["a", "b"]], [])]
    assert spelled[0] == spelled[1] != spelled[2] and first not in spelled
    swapped = {**raw["model"]["vocab"], "a": raw["model"]["vocab"]["b"], "b": raw["model"]["vocab"]["a"]}
    for other in ({"model": {**raw["model"], "vocab": swapped}}, {"normalizer": {"type": "NFC"}}):
        assert fingerprint(_Backend({**raw, **other})) != first
    older = {key: value for key, value in raw["model"].items() if value not in (None, False)}
    assert fingerprint(_Backend({**raw, "model": older})) == first


class _Backend:
    """A tokenizer of another version of the library, as far as a fingerprint looks at it."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.backend_tokenizer, self._raw = self, raw

    def to_str(self) -> str:
        return json.dumps(self._raw)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_refused_files(run: Run, model: Path, tmp_path: Path) -> None:
    """One sentence each, exit status 2, and nothing is left."""
    good = write(tmp_path / "good.txt", TEXTS)
    packed = lzma.compress(os.urandom(5000))

    def made(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    long = b"a" * ((1 << 20) - 1)
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    tables = {"number": [1, 2], "lists": [["a"], ["b"]], "holes": ["a", None]}
    parquet.write_table(arrow.table(tables), tmp_path / "t.parquet")
    table, rows = tmp_path / "t.parquet", b'{"text": "a"}\n\n'
    cases: list[tuple[str, Path, list[object]]] = [
        ("no such file: .*missing", tmp_path / "missing.txt", []),
        ("is not a file", tmp_path, []),
        ("empty.txt is empty", made("empty.txt", b""), []),
        ("one.json is one JSON value: write a document a line", made("one.json", b'{"text": "a"}'), []),
        ("one.json.gz is one JSON value", made("one.json.gz", gzip.compress(b'{"text": "a"}')), []),
        ("blank.txt has no documents", made("blank.txt", b" \n\n\n\n \n"), []),
        ("blank.jsonl has no documents", made("blank.jsonl", b'{"text": " "}\n'), []),
        ("latin.txt is no UTF-8 text: invalid start byte at byte 4$", made("latin.txt", b"abc \xfc bc"), []),
        (f"at byte {(1 << 20) + 1}$", made("late.txt", long + "ü".encode() + b"\xff"), []),
        (f"unexpected end of data at byte {(1 << 20) - 1}$", made("cut.txt", long + b"\xc3"), []),
        ("zero at byte 3$", made("zero.txt", b"abc\x00"), []),
        ("line 3 of .*bad.jsonl is no JSON", made("bad.jsonl", rows + b"{'text'"), []),
        ("line 3 of .*no UTF-8 text: .* at its byte 10$", made("latin.jsonl", rows + b'{"text": "\xff"}'), []),
        ("line 3 of .*no text 'text': its keys are 'body', 'n'", made("o.jsonl", rows + b'{"body": "", "n": 1}'), []),
        ("line 1 of .*no text 'body': its keys are 'text'", made("f.jsonl", rows), ["--field", "body"]),
        ("line 3 of .*no text 'text': its keys are none", made("list.jsonl", rows + b"[1]"), []),
        ("line 3 of .*: the value of .text. is a number, not a text", made("number.jsonl", rows + b'{"text": 7}'), []),
        ("line 3 of .*no Unicode", made("half.jsonl", rows + b'{"text": "\\ud800"}'), []),
        ("no column 'text': its columns are 'number', 'lists', 'holes'", table, []),
        ("'number' of .* is no text, but int64", table, ["--field", "number"]),
        ("'lists' of .* is no text", table, ["--field", "lists"]),
        ("row 2 of .*t.parquet has no 'holes'", table, ["--field", "holes"]),
        ("bad.parquet cannot be read", made("bad.parquet", b"PAR1 no"), []),
        ("packed parquet file", made("p.parquet.gz", b"x"), []),
        ("bad.txt.xz cannot be read", made("bad.txt.xz", b"no xz at all"), []),
        ("short.xz cannot be read: Compressed file ended", made("short.xz", packed[:-2000]), []),
        ("short.gz cannot be read: Compressed file ended", made("short.gz", gzip.compress(long)[:-9]), []),
    ]
    before = {path.name for path in tmp_path.iterdir()}
    for message, file, more in cases:
        status, out, err = run(tmp_path / "out", good, file, "--tokenizer", model, *more)
        assert (status, out) == (2, "") and re.search(message, err.strip()), f"{message}: {err}"
        assert err.startswith("ladder: ") and err.count("\n") == 1
        assert {path.name for path in tmp_path.iterdir()} == before, message


def test_refused_options(run: Run, model: Path, tmp_path: Path) -> None:
    good = write(tmp_path / "good.txt", TEXTS)
    endless, empty = tmp_path / "endless", tmp_path / "empty"
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer).save_pretrained(endless)
    empty.mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "busy.partial").mkdir()
    cases: list[tuple[str, str, list[object]]] = [
        ("either a tokenizer", "out", []),
        ("either a tokenizer", "out", ["--vocab", 300, "--tokenizer", model]),
        ("vocabulary of 256: 257 .* are possible", "out", ["--vocab", 256]),
        ("vocabulary of 99999999999", "out", ["--vocab", 99999999999]),
        ("at least 1 is needed", "out", ["--vocab", 300, "--shard-tokens", 0]),
        ("no such tokenizer directory: .*nowhere", "out", ["--tokenizer", tmp_path / "nowhere"]),
        ("no such tokenizer directory: nowhere", "out", ["--tokenizer", "nowhere"]),
        ("empty cannot be loaded", "out", ["--tokenizer", empty]),
        ("endless has no end-of-text token", "out", ["--tokenizer", endless]),
        ("full is there already: name a new folder", "full", ["--tokenizer", model]),
        ("good.txt is a file", "good.txt", ["--tokenizer", model]),
        ("good.txt is a file", "good.txt/out", ["--tokenizer", model]),
        ("busy.partial is there already", "busy", ["--tokenizer", model]),
    ]
    before = {str(path) for path in tmp_path.rglob("*")}
    for message, name, more in cases:
        status, out, err = run(tmp_path / name, good, *more)
        assert (status, out) == (2, "") and re.search(message, err), f"{message}: {err}"
        assert err.startswith("ladder: ") and err.count("\n") == 1
        assert {str(path) for path in tmp_path.rglob("*")} == before, message
    assert run(empty, good, "--tokenizer", model)[0] == 0 and Shards.open(empty).tokens  # an empty folder is no harm


def test_parquet_without_pyarrow(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(LadderError, match=r"needs pyarrow .*: pip install 'pyarrow>=15'"):
        tokenize([file], tmp_path / "out", str(model))


# --- what a failure leaves ------------------------------------------------------------------------------------------


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C, by a full disk, by a line far into the text; and then it works."""
    monkeypatch.setattr("ladder.data.texts.BATCH", 200)
    file = write(tmp_path / "a.jsonl", TEXTS * 20)

    def interrupt(done: int, total: int, what: str) -> None:
        assert (tmp_path / "out.partial").is_dir() and not (tmp_path / "out").exists()
        if done > total // 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        tokenize([file], tmp_path / "out", byte_tokenizer(), shard_tokens=50, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    with monkeypatch.context() as broken:
        broken.setattr(ShardWriter, "_next", lambda self: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            tokenize([file], tmp_path / "out", byte_tokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    assert ids(tokenize([file], tmp_path / "out", byte_tokenizer())) == as_bytes(TEXTS * 20)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"shards.json", "shard-00000.bin", "tokenizer"}


def test_killed(model: Path, tmp_path: Path) -> None:
    """Nothing has the name of the result, and the next run says what lies in its way."""
    file = write(tmp_path / "a.txt", TEXTS)
    if not (child := os.fork()):
        signal.alarm(60)  # nobody waits for ever
        try:
            tokenize([file], tmp_path / "out", str(model), progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out.partial"]
    with pytest.raises(LadderError, match=r"out.partial is there already, left by a run that was killed"):
        tokenize([file], tmp_path / "out", str(model))
