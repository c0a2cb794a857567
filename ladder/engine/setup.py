"""A model directory made ready for generation: everything is checked here, before a weight is read."""

import threading
from collections.abc import Sequence
from dataclasses import replace

from ladder.checkpoint import Directory
from ladder.comm.base import RankOnly
from ladder.config import ModelConfig
from ladder.devices import computing_dtype, converts_fp8, device
from ladder.engine.early import check_options, checked_config
from ladder.engine.executors.torchrun import torchrun_rank
from ladder.engine.memory import check_machine, check_memory
from ladder.engine.options import EngineOptions, SamplingParams
from ladder.engine.requests import Prompt, Request
from ladder.engine.text import Text, encode, load_tokenizer
from ladder.errors import LadderError
from ladder.model import Decoder


class Setup:
    """A model directory whose config, headers and tokenizer fit each other, the wiring and the number of ranks."""

    def __init__(self, options: EngineOptions, tokenizer: bool = True) -> None:
        """`tokenizer`: False where only token ids are used."""
        self.options = options
        self.link, self.table = check_options(options)
        self.device = device(options.device)
        if options.cache_dtype == "fp8" and options.kernels and not converts_fp8(self.device):
            raise LadderError(
                "cache_dtype fp8 needs a GPU of compute capability 8.9 or newer: leave it out, or use --no-kernels"
            )
        self.directory = Directory(options.model)
        config = checked_config(self.directory.config, options)
        config = replace(config, dtype=computing_dtype(options.dtype, config.dtype, self.device))
        self.config: ModelConfig = config
        if options.cache_dtype == "fp8" and config.dtype == "float64":
            raise LadderError("cache_dtype fp8 is not for float64 models: use another --dtype")
        check_memory(options, config)
        ranks = (
            Decoder(config, RankOnly(rank, options.tp), device="meta", expert_parallel=options.expert_parallel)
            for rank in range(options.tp)
        )
        shards = [shard for rank in ranks for shard in rank.shards()]
        self.directory.check(shards)
        self.weight_bytes = sum(s.target.numel() * s.target.element_size() for s in shards)  # of all ranks together
        if tokenizer and self.device.type == "cpu":  # once: ranks that have been started already hold some of it
            own = torchrun_rank()
            check_machine(options, config, self.weight_bytes, 1.0 if own is None else own.local_size / own.size)
        self.tokenizer = load_tokenizer(options.model, config.vocab) if tokenizer else None
        self.tokenizing = threading.Lock()  # tokenizers may not encode in two threads at once

    @property
    def rewired_remark(self) -> str | None:
        """What is to be said where the weights were trained under another wiring than the one they are run with."""
        own = self.directory.config.wiring
        if own == self.config.wiring:
            return None
        return (
            f"the weights of {self.options.model} are those of the wiring '{own}', and are run as "
            f"'{self.config.wiring}': without adaptation (ladder adapt) the text is poor"
        )

    def requests(self, prompts: Sequence[Prompt], params: SamplingParams, first: int = 0) -> list[Request]:
        """Tokenize and check the prompts. Results are numbered from `first`: the first prompt's, the second's, ..."""
        if isinstance(prompts, str | bytes):
            raise LadderError("prompts must be a list: write [prompt] for a single one")
        if not isinstance(params, SamplingParams):
            raise LadderError(f"sampling parameters must be SamplingParams, not {type(params).__name__}")
        if params.stop and self.tokenizer is None:
            raise LadderError(f"stop texts need a tokenizer, {self.options.model} has none")
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", [id for id, _ in params.logit_bias]),
        ):
            if wrong := [id for id in ids if not 0 <= id < self.config.vocab]:
                raise LadderError(
                    f"{name} has the token {wrong[0]}, the model's vocabulary is 0 to {self.config.vocab - 1}"
                )
        requests: list[Request] = []
        for index, prompt in enumerate(prompts):
            tokens = self._tokens(prompt, index)
            room = self.config.context - len(tokens)
            if room < 1:
                raise LadderError(
                    f"prompt {index} has {len(tokens)} tokens, which leaves no room in the model's context of "
                    f"{self.config.context}"
                )
            shown = prompt if isinstance(prompt, str) else tokens
            for sample in range(params.n):
                text = Text(self.tokenizer, params.stop) if self.tokenizer is not None else None
                number, limit = first + len(requests), min(params.max_new_tokens, room)
                requests.append(Request(number, shown, tokens, limit, params, text, sample))
        return requests

    def _tokens(self, prompt: Prompt, index: int) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise LadderError(f"{self.options.model} has no tokenizer: give the prompt as token ids")
            try:
                prompt.encode("utf-8")
            except UnicodeEncodeError:
                raise LadderError(f"prompt {index} is not valid UTF-8") from None
            with self.tokenizing:
                tokens = encode(self.tokenizer, prompt)
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
