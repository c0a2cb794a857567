"""A directory opened for generation, and the requests made of it: all is checked here, before a weight is read."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ladder.checkpoint import Directory
from ladder.comm.base import RankOnly
from ladder.comm.link import Link
from ladder.config import ModelConfig
from ladder.devices import device
from ladder.engine.options import EngineOptions, SamplingParams
from ladder.engine.text import Text, load_tokenizer
from ladder.errors import LadderError
from ladder.kernels.table import read_table
from ladder.model import Decoder

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Chunk:
    """What a request has become since the last chunk. `finish_reason` comes with the last: stop, length or error."""

    index: int
    token_ids: tuple[int, ...]
    text: str | None  # None where the directory has no tokenizer
    finish_reason: str | None


@dataclass(frozen=True)
class Result:
    """A finished request; `token_ids` are the new ones only. It finished by error where the model's output for it was
    not finite: its weights are broken (see `check`), or its dtype is too narrow.
    """

    prompt: str | list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str


class Request:
    """A prompt on its way: what the ranks are asked to do, and the text that becomes of their tokens."""

    def __init__(self, index: int, tokens: list[int], limit: int, params: SamplingParams, text: Text | None) -> None:
        self.index = index
        self.tokens = tuple(tokens)  # the prompt's
        self.limit = limit  # new tokens, at most
        # a seed is drawn here and not by the ranks, which must all draw the same tokens
        self.params = params if params.seed is not None else replace(params, seed=secrets.randbits(63))
        self.text = text
        self.new: list[int] = []
        self.finish_reason: str | None = None

    def add(self, token: int | None, finish_reason: str | None) -> Chunk:
        """Take a token from the ranks."""
        new = () if token is None else (token,)
        self.new += new
        piece = "".join(map(self.text.add, new)) if self.text else None
        self.finish_reason = "stop" if self.text and self.text.stopped else finish_reason
        if self.text and self.finish_reason:
            piece = (piece or "") + self.text.finish()
        return Chunk(self.index, new, piece, self.finish_reason)


class Opened:
    """A model directory whose config, headers and tokenizer fit each other, the wiring and the number of ranks."""

    def __init__(self, options: EngineOptions, tokenizer: bool = True) -> None:
        """`tokenizer`: False for those who will never see text."""
        self.options = options
        self.link = None if options.link is None else Link.parse(options.link)
        self.device = device(options.device)
        if options.wire in ("symmetric", "nccl") and self.device.type != "cuda":
            raise LadderError(
                f"wire {options.wire!r} is between GPUs, the device is {options.device}: use --device cuda"
            )
        self.table = {} if options.tuned is None else read_table(options.tuned)
        if options.tuned is not None and self.device.type != "cuda":
            raise LadderError(f"tuned kernels are for GPUs, the device is {options.device}: use --device cuda")
        self.directory = Directory(options.model)
        config = self.directory.config
        if options.wiring is not None:
            config = config.rewired(options.wiring)
        if options.dtype != "auto":
            config = replace(config, dtype=options.dtype)
        self.config: ModelConfig = config
        config.check_degree(options.tp)
        if config.ranks not in (1, options.tp):
            raise LadderError(
                f"{options.model} was trained for {config.ranks} ranks, not {options.tp}: give --tp {config.ranks}"
            )
        ranks = (Decoder(config, RankOnly(rank, options.tp), device="meta") for rank in range(options.tp))
        shards = [shard for rank in ranks for shard in rank.shards()]
        self.directory.check(shards)
        self.weight_bytes = sum(s.target.numel() * s.target.element_size() for s in shards)  # of all ranks together
        self.tokenizer = load_tokenizer(options.model, config.vocab) if tokenizer else None

    def requests(self, prompts: Sequence[Prompt], params: SamplingParams, first: int = 0) -> list[Request]:
        """Tokenize and check the prompts, which are numbered from `first`."""
        if isinstance(prompts, str | bytes):
            raise LadderError("prompts must be a list: write [prompt] for a single one")
        if not isinstance(params, SamplingParams):
            raise LadderError(f"sampling parameters must be SamplingParams, not {type(params).__name__}")
        if params.stop and self.tokenizer is None:
            raise LadderError(f"stop texts need a tokenizer, {self.options.model} has none")
        requests = []
        for index, prompt in enumerate(prompts, first):
            tokens = self._tokens(prompt, index)
            room = self.config.context - len(tokens)
            if room < 1:
                raise LadderError(
                    f"prompt {index} has {len(tokens)} tokens, which leaves no room in the model's context of "
                    f"{self.config.context}"
                )
            text = Text(self.tokenizer, params.stop) if self.tokenizer is not None else None
            requests.append(Request(index, tokens, min(params.max_new_tokens, room), params, text))
        return requests

    def _tokens(self, prompt: Prompt, index: int) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise LadderError(f"{self.options.model} has no tokenizer: give the prompt as token ids")
            try:
                prompt.encode("utf-8")
            except UnicodeEncodeError:
                raise LadderError(f"prompt {index} is not valid UTF-8") from None
            tokens = [int(token) for token in self.tokenizer(prompt).input_ids]
        else:
            if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
                raise LadderError(f"prompt {index} must be a text or a list of ids, not {type(prompt).__name__}")
            tokens = list(prompt)  # type: ignore[arg-type]
            if any(isinstance(token, bool) or not isinstance(token, int) for token in tokens):
                raise LadderError(f"prompt {index} has ids that are not whole numbers: {tokens[:8]}")
        if not tokens:
            raise LadderError(f"prompt {index} is empty: it has no tokens to start from")
        wrong = [token for token in tokens if not 0 <= token < self.config.vocab]
        if wrong:
            last = self.config.vocab - 1
            raise LadderError(f"prompt {index} has the token {wrong[0]}, the model's vocabulary is 0 to {last}")
        return tokens
