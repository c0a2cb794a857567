"""Between text and tokens: the checkpoint's tokenizer, text as it grows, and stop texts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ladder.errors import LadderError

_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")  # the latter since transformers 5
_BELIEVED = ("ladder", "llama")  # of some other models AutoTokenizer knows better than their checkpoints
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(directory: Path, vocab: int) -> Any | None:
    """The directory's tokenizer; None where there is none.

    It may know fewer ids than the model has rows (tables are padded), never more.
    """
    if not any((directory / name).exists() for name in _FILES):
        return None
    from transformers.utils import logging  # seconds to import: only for those who need it

    logging.set_verbosity_error()
    try:
        tokenizer = _kind(directory).from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its own libraries raise whatever they like for a broken file
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise LadderError(f"the tokenizer in {directory} cannot be read: {reason[0]}") from None
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab:
        raise LadderError(
            f"vocabulary mismatch in {directory}: the tokenizer's ids go up to {largest}, the model has {vocab} tokens"
        )
    return tokenizer


def _kind(directory: Path) -> Any:
    """The class that reads it. One that says it is of no special kind needs no search, which takes seconds."""
    kind = _said(directory / "tokenizer_config.json", "tokenizer_class")
    model = _said(directory / "config.json", "model_type")
    if kind in _PLAIN and model in _BELIEVED and (directory / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _said(file: Path, key: str) -> Any:
    """What a file of JSON says; None where it says nothing."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    return found.get(key) if isinstance(found, dict) else None


class Text:
    """The text of a growing list of tokens, given out piece by piece and cut before the first stop text.

    Characters whose bytes are not all there yet, and text that may turn out to begin a stop text, are held back.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        self._settled = 0  # tokens before this one have been turned into text for good
        self._context = 0  # decoding starts here: some tokenizers write a token differently at the very beginning
        self.text = ""
        self.given = 0
        self.stopped = False

    def add(self, token: int) -> str:
        """Append a token; returns the text that is now certain and has not been given out before."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._context : self._settled])
        after = self._decode(self._tokens[self._context :])
        if not after.endswith("\ufffd"):
            self._append(after[len(before) :])
            self._context, self._settled = self._settled, len(self._tokens)
        return self._give(len(self.text) if self.stopped else len(self.text) - self._doubtful())

    def finish(self) -> str:
        """The rest of the text, when no token follows."""
        if not self.stopped:
            before = self._decode(self._tokens[self._context : self._settled])
            self._append(self._decode(self._tokens[self._context :])[len(before) :])
            self._settled = len(self._tokens)
        return self._give(len(self.text))

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _append(self, piece: str) -> None:
        # a stop text that ends in the new piece begins at most its own length before it
        begin = max(0, len(self.text) - max((len(stop) for stop in self._stop), default=0))
        self.text += piece
        found = [at for stop in self._stop if (at := self.text.find(stop, begin)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _doubtful(self) -> int:
        """How many characters at the end could begin a stop text."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for count in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-count:]) for stop in self._stop):
                return count
        return 0

    def _give(self, upto: int) -> str:
        piece = self.text[self.given : upto]
        self.given = max(self.given, upto)
        return piece
