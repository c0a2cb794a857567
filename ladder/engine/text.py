"""The checkpoint's tokenizer and its chat template, incremental detokenization, and stop texts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream

from ladder.config.fields import read_json
from ladder.config.inside import check_tokenizer
from ladder.config.lock import own_model_type
from ladder.errors import LadderError

_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")  # the latter since transformers 5
_TRUSTED = ("llama",)  # for some other models AutoTokenizer corrects what their checkpoints say
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(directory: Path, vocab: int) -> Any | None:
    """The directory's tokenizer; None where there is none.

    It may know fewer ids than the model has rows (tables are padded), never more.
    """
    if not any((directory / name).exists() for name in _FILES):
        return None
    try:
        check_tokenizer(directory)
        with _errors_only():
            tokenizer = _reader(directory)(directory, local_files_only=True, trust_remote_code=False)
            largest = max(tokenizer.get_vocab().values(), default=-1)
            tokenizer.decode(tokenizer("a").input_ids, skip_special_tokens=True)  # some settings are used only here
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # transformers raises many types for a broken file, tokenizers even no Exception
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise LadderError(f"the tokenizer in {directory} cannot be read: {reason[0]}") from None
    if largest >= vocab:
        raise LadderError(
            f"vocabulary mismatch in {directory}: the tokenizer's ids go up to {largest}, the model has {vocab} tokens"
        )
    return tokenizer


def encode(tokenizer: Any, prompt: str, special: bool = True) -> list[int]:
    """A prompt's tokens. (Whether they fit the model's context is checked by the caller, not warned of here.)

    `special`: with those that the tokenizer puts around every text, such as a beginning of text.
    """
    with _errors_only():
        return [int(token) for token in tokenizer(prompt, add_special_tokens=special).input_ids]


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens of a conversation by the tokenizer's chat template, up to where the assistant answers."""
    try:
        text = tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True)
    except ImportError:
        raise LadderError("chat templates need jinja2: pip install jinja2") from None
    except Exception as error:  # of Jinja, of the template itself, or whatever it does to its values
        reason = " ".join(str(error).split()) or type(error).__name__
        raise LadderError(f"the model's chat template refuses this conversation: {reason}") from None
    return encode(tokenizer, text, special=False)  # the template has written them


@contextmanager
def _errors_only() -> Iterator[None]:
    """transformers' log without its warnings, and as it was afterwards."""
    from transformers.utils import logging  # takes seconds to import: only where it is needed

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _reader(directory: Path) -> Any:
    """What reads it. A plain fast tokenizer needs no AutoTokenizer, whose import takes seconds."""
    config = directory / "config.json"
    raw = read_json(config) if config.exists() else {}
    kind, model = _json_value(directory / "tokenizer_config.json", "tokenizer_class"), own_model_type(raw)
    if kind in _PLAIN and model in _TRUSTED and (directory / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained
    from transformers import AutoConfig, AutoTokenizer

    if model is None or model == raw["model_type"]:
        return AutoTokenizer.from_pretrained
    # wired: it is told what the model is, whose config.json it would not understand
    return partial(AutoTokenizer.from_pretrained, config=AutoConfig.for_model(model))


def _json_value(file: Path, key: str) -> Any:
    """The value of a key of a JSON file; None where either is missing."""
    return read_json(file).get(key) if file.exists() else None


class Stop:
    """A stop text in a text that grows. Each character is looked at once (Knuth, Morris, Pratt), and no more of the
    stop text than has been found: a request may have long ones, and the engine's thread waits.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.found = 0  # how many of its characters, from the first, end the text so far
        self._again = [0, 0]  # with so many found: how many of them, fewer than all, are its first characters again

    def end_in(self, piece: str) -> int | None:
        """What the text grows by; how many of these characters there are up to the end of the stop text."""
        for count, character in enumerate(piece, 1):
            while self.found and self.text[self.found] != character:
                self.found = self._fewer(self.found)
            self.found += self.text[self.found] == character
            if self.found == len(self.text):
                return count
        return None

    def _fewer(self, found: int) -> int:
        again = self._again
        while len(again) <= found:
            known, character = again[-1], self.text[len(again) - 1]
            while known and self.text[known] != character:
                known = again[known]
            again.append(known + (self.text[known] == character))
        return again[found]


class Text:
    """The text of a growing list of tokens, given out piece by piece and cut before the first stop text.

    Characters whose bytes are not complete yet, and text that may turn out to begin a stop text, are held back.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = [Stop(text) for text in stop]
        self._tokens: list[int] = []
        # None for tokenizers written in Python, which decode everything again with every token
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._decoded = 0  # characters, of which `text` has lost those after a stop text
        self.text = ""
        self.given = 0
        self.stopped = False

    def add(self, token: int) -> str:
        """Append a token; returns the text that is now certain and has not been given out before."""
        self._tokens.append(token)
        self._append(self._piece(token))
        return self._give(len(self.text) if self.stopped else len(self.text) - self._possible_stop())

    def _piece(self, token: int) -> str:
        """What the newest token adds to the text; empty where characters are incomplete."""
        if self._backend is not None:
            try:
                return self._stream.step(self._backend, token) or ""
            except Exception:  # of no type of its own: bytes given out as characters became invalid with later bytes
                self._stream = DecodeStream(skip_special_tokens=True)
                self._stream.step(self._backend, token)  # the next token's context
        rest = self._rest()
        return "" if rest.endswith("\ufffd") else rest

    def finish(self) -> str:
        """The rest of the text, when no token follows."""
        if not self.stopped:
            self._append(self._rest())
        return self._give(len(self.text))

    def _rest(self) -> str:
        """What all tokens decode to, behind what has been decoded already."""
        kwargs = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(self._tokens, **kwargs))[self._decoded :]

    def _append(self, piece: str) -> None:
        before = len(self.text)
        self._decoded += len(piece)
        self.text += piece
        ends = [(stop, stop.end_in(piece)) for stop in self._stop]
        if found := [before + end - len(stop.text) for stop, end in ends if end is not None]:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _possible_stop(self) -> int:
        """How many characters at the end could begin a stop text."""
        return max((stop.found for stop in self._stop), default=0)

    def _give(self, upto: int) -> str:
        piece = self.text[self.given : upto]
        self.given = max(self.given, upto)
        return piece
