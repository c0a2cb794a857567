"""`ladder data`: texts to tokens, for training."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from ladder.cli.verbs import bytes_bar, verb
from ladder.data.check import check_tokenizing
from ladder.options import argument, option


@dataclass(frozen=True)
class DataOptions:
    """Which texts, by which tokenizer, into which folder."""

    out: Path = argument("New folder for the tokens.")
    file: tuple[Path, ...] = argument("Texts: .jsonl, .parquet, or plain text; .xz and .gz are unpacked.")
    tokenizer: str | None = option(None, "Directory with a tokenizer, such as a model's, or one of the hub: org/name.")
    vocab: int | None = option(None, "Train a tokenizer of this many entries on these texts instead.")
    shard_tokens: int = option(1 << 27, "Tokens of a shard, at most.")
    field: str = option("text", "Key of the text in a JSON line, or column of a parquet file.")
    json: bool = option(False, "Print one JSON line about what was written.")


@verb(DataOptions)
def data(options: DataOptions) -> None:
    """Tokenize texts into a folder of memory-mapped shards, streamed, for training."""
    given = (options.file, options.out.resolve(), options.tokenizer, options.vocab, options.shard_tokens)
    check_tokenizing(*given, options.field)
    from ladder.data.texts import tokenize  # imports for seconds: not for what can be refused at once

    with bytes_bar("tokenizing") as progress:
        shards = tokenize(
            options.file,
            options.out,
            options.tokenizer,
            options.vocab,
            shard_tokens=options.shard_tokens,
            field=options.field,
            progress=progress,
        )
    if options.json:
        typer.echo(json.dumps({"out": str(options.out), **asdict(shards.index)}))
        return
    typer.echo(
        f"wrote {options.out}: {shards.tokens} tokens of {shards.documents} documents,"
        f" {shards.bytes / shards.tokens:.2f} bytes a token, vocabulary {shards.vocab}"
    )
    if options.vocab is not None and shards.vocab < options.vocab:
        typer.echo(f"These texts have no more than {shards.vocab} entries for a vocabulary, not {options.vocab}.")
