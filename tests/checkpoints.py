"""Checkpoints with a tokenizer, made on the spot."""

from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ladder.checkpoint import Random, load, save
from ladder.config import ModelConfig
from ladder.model import Decoder

END = 256  # the byte tokenizer's end-of-text


def byte_tokenizer(extra: int = 0, begin: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte, an end-of-text, and `extra` words more; on request every text begins with the last."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<end>", *(f"<extra-{index}>" for index in range(extra))]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    if begin:
        first = (specials[-1], tokenizer.token_to_id(specials[-1]))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{first[0]} $A", special_tokens=[first])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def tiny(directory: Path, wiring: str = "standard", tokenizer: bool = True, layers: int = 4, **changes: object) -> Path:
    """The size `tiny` with random weights strong enough to make every token depend on all before it."""
    config = replace(ModelConfig.named("tiny").first(layers).rewired(wiring), **changes)  # type: ignore[arg-type]
    save(load(Decoder(config), Random(seed=5, deviation=0.15)), directory)
    if tokenizer:
        byte_tokenizer().save_pretrained(directory)
    return directory
