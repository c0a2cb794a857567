"""Texts to shards of tokens, with a model's tokenizer or a new one.

A very long document is tokenized piece by piece. The ids are those of the whole where the tokenizer begins a word
behind a line end, as byte-level ones do; one that writes a space before every text writes it before every piece.
What looks like one of the tokenizer's special tokens becomes that token, as it does in a prompt.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ladder.data.check import END, INDEX, check_tokenizer_named, check_tokenizing
from ladder.data.documents import Piece, documents
from ladder.data.shards import TOKENIZER, Shards, ShardWriter
from ladder.errors import LadderError
from ladder.files import new_folder
from ladder.hf.load import pretrained, quiet  # ladder.hf also registers wired checkpoints with AutoTokenizer
from ladder.progress import Progress

SAMPLE = 64 << 20  # bytes of text that it is trained on, at most
SHARD = 1 << 27  # tokens of a shard
BATCH = 1 << 22  # characters that are tokenized at a time, on all cores


def tokenize(
    files: Sequence[Path],
    out: Path,
    tokenizer: Any = None,
    vocab: int | None = None,
    *,
    shard_tokens: int = SHARD,
    field: str = "text",
    progress: Progress | None = None,
) -> Shards:
    """Write the folder `out` from `files`, by a tokenizer (a directory, a hub id, or one in memory), or by a new one of
    `vocab` entries that is trained on the beginning of each file. The folder has its name only when it is complete.
    """
    files, out = [Path(file) for file in files], Path(out).resolve()
    check_tokenizing(files, out, tokenizer, vocab, shard_tokens, field)
    loaded = train_tokenizer(files, vocab, field) if vocab is not None else load_tokenizer(tokenizer)
    if loaded.eos_token_id is None:
        raise LadderError(
            f"the tokenizer {tokenizer} has no end-of-text token (eos): take another, or train one (--vocab)"
        )
    with new_folder(out) as folder:
        loaded.save_pretrained(folder / TOKENIZER)
        with ShardWriter(folder, max(loaded.get_vocab().values()) + 1, shard_tokens) as writer:
            counts = _write(writer, files, field, loaded, progress or (lambda done, total, what: None))
            writer.finish(loaded.eos_token_id, fingerprint(loaded), *counts)
        if out.exists():
            out.rmdir()  # empty, as was seen
        folder.rename(out)
    return Shards.open(out)


def _write(
    writer: ShardWriter, files: Sequence[Path], field: str, tokenizer: Any, progress: Progress
) -> tuple[int, int]:
    """Every document and its end; returns how many there are, and of how many bytes."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy
    backend.no_truncation()
    backend.no_padding()
    total, ends, size = sum(file.stat().st_size for file in files), 0, 0
    for pieces in _batches(documents(files, field)):
        found = backend.encode_batch_fast([piece.text for piece in pieces], add_special_tokens=False)
        for piece, encoding in zip(pieces, found, strict=True):
            writer.add([*encoding.ids, tokenizer.eos_token_id] if piece.last else encoding.ids)
            ends += piece.last
            size += len(piece.text.encode())
        progress(min(pieces[-1].at, total), total, "tokenizing")
    progress(total, total, "tokenizing")
    return ends, size


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch, size = list[Piece](), 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + 64  # what a piece costs besides
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# --- tokenizers -----------------------------------------------------------------------------------------------------


def load_tokenizer(tokenizer: Any) -> Any:
    """A fast one, from a directory, from the hub by org/name, or as it is."""
    if isinstance(tokenizer, str | Path):
        name = str(tokenizer)
        check_tokenizer_named(name)
        if (Path(name) / INDEX).is_file():  # a folder of ours, with the tokenizer that it was made by
            name = str(Path(name) / TOKENIZER)
        with quiet():
            tokenizer = pretrained(AutoTokenizer, name)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise LadderError(
            f"{type(tokenizer).__name__} has no fast form (tokenizer.json): take a tokenizer that has one"
        )
    return tokenizer


def train_tokenizer(files: Sequence[Path], vocab: int, field: str = "text", sample: int = SAMPLE) -> Any:
    """A byte-level BPE of at most `vocab` entries (a small text has no more), trained on the beginning of each file, as
    much of it as its share in all. Its entry 0 is the end, the beginning and the padding of texts.
    """
    sizes = {file: file.stat().st_size for file in files}
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    shares = {file: sample * size // sum(sizes.values()) + 1 for file, size in sizes.items()}
    texts = (text for file, share in shares.items() for text in _beginning(file, field, share))
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, bos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def _beginning(file: Path, field: str, most: int) -> Iterator[str]:
    """A file's pieces until there are `most` bytes of text."""
    for piece in documents([file], field):
        yield piece.text
        most -= len(piece.text.encode())
        if most <= 0:
            return


def fingerprint(tokenizer: Any) -> str:
    """Of all that decides which ids a text gets, and of nothing else: two that agree tokenize alike."""
    raw = json.loads(tokenizer.backend_tokenizer.to_str())
    model = raw["model"]
    if "merges" in model:  # written as "a b" or as ["a", "b"]
        model["merges"] = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    deciding = {name: raw.get(name) for name in ("normalizer", "pre_tokenizer", "model")}
    deciding["added_tokens"] = [
        {name: value for name, value in token.items() if name != "special"}
        for token in sorted(raw.get("added_tokens") or [], key=lambda token: int(token["id"]))
    ]
    text = json.dumps(_plain(deciding), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Without what is off or unset, which some versions write and others do not, and what only concerns offsets."""
    if isinstance(value, dict):
        kept = {key: _plain(entry) for key, entry in value.items() if key != "trim_offsets"}
        return {key: entry for key, entry in kept.items() if entry is not None and entry is not False}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value
